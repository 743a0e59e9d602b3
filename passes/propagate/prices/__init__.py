"""What operations cost, and the time of a step from that."""

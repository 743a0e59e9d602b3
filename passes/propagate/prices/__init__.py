"""Cost model: seconds of operations, of overheads of collectives, and of a step."""

"""A module under torch.distributed: what ranks agree on, hold, and take in."""

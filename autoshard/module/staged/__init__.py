"""A module with pipeline stages, in one process and under torch.distributed."""

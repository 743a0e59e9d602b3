"""A module in pipeline stages, in one process and under torch.distributed."""

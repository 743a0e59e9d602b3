"""The module a user gets back: in one process, under torch.distributed, and as files."""

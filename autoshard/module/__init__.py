"""The sharded module: in one process, under torch.distributed, and saved as files."""

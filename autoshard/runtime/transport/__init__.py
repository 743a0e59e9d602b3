"""What carries tensors between ranks: moves, and the communicators that run them, of processes and of threads."""

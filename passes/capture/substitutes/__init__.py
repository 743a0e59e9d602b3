"""What a trace gets wrong, and what is traced in its place."""

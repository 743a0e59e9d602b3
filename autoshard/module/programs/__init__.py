"""The programs of a module: compiled when a call needs them, and kept."""

"""What an exported program says: where its nodes come from, what its arguments are, which numbers are open."""

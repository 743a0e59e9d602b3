"""Guards and specialization: answers to questions about values in a trace without data."""

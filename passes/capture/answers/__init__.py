"""What a trace without data is asked, and what is answered: known values, conditions, loops, numbers."""

"""What is refused, and the sentence that says so."""

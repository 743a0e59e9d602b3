"""What a plan records, and what it says of itself in numbers and words; pictures of it are ``viz``."""

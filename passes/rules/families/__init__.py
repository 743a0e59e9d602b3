"""The rules, a family of operations in each file."""

"""Refusals: unsupported features of models, and the errors that name them and the way out."""

"""Lowering: from chosen layouts to a program on local tensors."""

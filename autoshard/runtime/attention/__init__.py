"""Attention on parts of heads and sequences, and the ring."""

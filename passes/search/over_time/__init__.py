"""Liveness-constrained search: a memory limit at every moment."""

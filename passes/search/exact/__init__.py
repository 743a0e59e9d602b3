"""Unconstrained search: pruning, bucket elimination, bounds by message passing, MILP."""

"""The search without rows: pruning, elimination, bounds, the integer programme."""

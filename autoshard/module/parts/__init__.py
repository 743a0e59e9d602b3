"""Models that are not one graph: parts are compiled, and the code between them runs eagerly."""

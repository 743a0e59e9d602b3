"""The types that passes exchange: the graph, the program, sizes and symbols, and what is valid. Imports no pass."""

"""The program cache of a module: programs are compiled on demand and kept."""

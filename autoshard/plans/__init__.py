"""Plans: options, description of a program, plan reuse, zigzag order, pipeline stages."""

"""Intermediate representation: graph, assignment, program, symbolic sizes. Imports no pass."""

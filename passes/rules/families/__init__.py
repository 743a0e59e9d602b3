"""Sharding rules, one family of ops per file."""

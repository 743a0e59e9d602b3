"""Shared regions (regional compilation): equal modules are traced once, then inlined."""

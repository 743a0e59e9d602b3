"""The search under a limit on what is held at any time."""

"""Transport between ranks: moves, and communicators over processes or threads."""

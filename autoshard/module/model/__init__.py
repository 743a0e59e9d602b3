"""The user's model behind the sharded one: its parts, its state, how it looks from outside."""

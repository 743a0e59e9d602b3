"""Initial values of sharded parameters, bit for bit those of one device."""

from autoshard.initialise.deferred import deferred_init, materialise

__all__ = ["deferred_init", "materialise"]

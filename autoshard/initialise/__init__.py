"""Deferred initialisation of sharded parameters, bit for bit as on one device."""

from autoshard.initialise.deferred import deferred_init, materialise

__all__ = ["deferred_init", "materialise"]

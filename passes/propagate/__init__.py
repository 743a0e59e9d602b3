"""The search for a layout of every definition and every use: a cost network and its prices."""

from autoshard.passes.propagate.planner import propagate

__all__ = ["propagate"]

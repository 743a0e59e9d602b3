"""The choice of a layout for every definition and every use: a cost network, and what it costs."""

from autoshard.passes.propagate.planner import propagate

__all__ = ["propagate"]

"""Peak memory of a program over one step, and the cheapest program within a memory budget."""

from __future__ import annotations

from autoshard.passes.memory.fit import fitting, tried
from autoshard.passes.memory.simulate import simulate

__all__ = ["fitting", "simulate", "tried"]

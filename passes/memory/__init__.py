"""What a program holds in memory over one step, and the cheapest program that stays within a budget."""

from __future__ import annotations

from autoshard.passes.memory.fit import fitting, tried
from autoshard.passes.memory.simulate import simulate

__all__ = ["fitting", "simulate", "tried"]

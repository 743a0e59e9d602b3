"""Peak memory of a program over one step, and the cheapest program within a memory budget."""

from __future__ import annotations

from autoshard.passes.memory.fit import lower_and_simulate, search_within_memory
from autoshard.passes.memory.offload import search_with_offload
from autoshard.passes.memory.simulate import simulate_memory

__all__ = ["lower_and_simulate", "search_with_offload", "search_within_memory", "simulate_memory"]

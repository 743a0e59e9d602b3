"""Redistribution (resharding) between layouts, with the fewest bytes or in the least time."""

from autoshard.passes.ir.program import RedistributionStep
from autoshard.passes.redistribute.cost_matrices import link_matrices, peak_move_elements
from autoshard.passes.redistribute.resharding import redistribution
from autoshard.passes.redistribute.shortest_path import Redistribution, runtime_call

__all__ = [
    "Redistribution",
    "RedistributionStep",
    "link_matrices",
    "peak_move_elements",
    "redistribution",
    "runtime_call",
]

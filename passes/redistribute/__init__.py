"""Redistribution (resharding) between layouts, with the fewest bytes or in the least time."""

from autoshard.passes.ir.program import Step
from autoshard.passes.redistribute.query import redistribution
from autoshard.passes.redistribute.steps import Redistribution, emit
from autoshard.passes.redistribute.table import cost_matrix, link_matrices, on_the_way

__all__ = ["Redistribution", "Step", "cost_matrix", "emit", "link_matrices", "on_the_way", "redistribution"]

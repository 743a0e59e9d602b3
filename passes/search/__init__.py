"""Exact search for the cheapest strategies of a cost network."""

from __future__ import annotations

from autoshard.passes.search.network import CostNetwork, LinearRow, Solution
from autoshard.passes.search.prepared import Prepared, solve

__all__ = ["CostNetwork", "LinearRow", "Prepared", "Solution", "solve"]

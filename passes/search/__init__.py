"""The exact search for the cheapest strategies of a cost network."""

from __future__ import annotations

from .network import CostNetwork, Memory, Solution
from .solver import solve

__all__ = ["CostNetwork", "Memory", "Solution", "solve"]

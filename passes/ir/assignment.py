"""What was chosen for a graph: a strategy per operation and mesh axis, and the layouts that follow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.layout import Invariant, Layout, Placement, R, chunk
from autoshard.mesh import Mesh
from autoshard.passes.ir.sizes import Size
from autoshard.passes.search.network import Solution

Placements = tuple[Placement, ...]
"""one placement per mesh axis, nested in mesh order"""


def canonical(placement: Placement, grad: bool) -> Placement:
    """Where no gradient flows, Invariant and Replicate are one."""
    return R if isinstance(placement, Invariant) and not grad else placement


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run an op along one mesh axis; strategies of several axes combine freely.

    ``inputs``: a placement per entry of ``node.inputs``; ``outputs``: one per entry of ``node.outputs``.
    """

    label: str
    """"I", "R", "P(…)" or the factor's name; the lowering looks at it"""
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    size: int | None = None
    """the factor's length: the axes on it may not outnumber it. None for strategies that divide nothing"""
    even: bool = False
    """the axes on this factor must divide ``size`` (compound dims of a reshape)"""
    divides: bool = False
    """whether the op's work is divided by the axis"""
    least: int = 0
    """what every rank must hold of the factor at least: 1 where the op's kernel takes no empty part"""

    def allows(self, ranks: Sequence[int]) -> bool:
        """Whether axes of these sizes, outer to inner, may all be on the factor."""
        if self.size is None:
            return True
        count = math.prod(ranks)
        if int(self.size) < count or (self.even and self.size % count):
            return False
        if not self.least or (self.least == 1 and self.size % count == 0):
            return True
        return not isinstance(self.size, Size) and _least(self.size, tuple(ranks)) >= self.least


def _least(size: int, ranks: tuple[int, ...]) -> int:
    """The shortest chunk of ``size`` cut by axes of these sizes, outer to inner."""
    if not ranks:
        return size
    return min(_least(chunk(size, ranks[0], r)[1], ranks[1:]) for r in (0, ranks[0] - 1))


@dataclass(frozen=True)
class Assignment:
    """A solved graph. Layouts of definitions, shared layouts, and every node's strategies (one per mesh axis)."""

    mesh: Mesh
    layouts: Mapping[str, Layout]
    """value → the layout it is defined in"""
    shared: Mapping[str, Layout]
    """value → the layout its readers convert from (only values with several readers)"""
    choices: Mapping[str, tuple[Strategy, ...]]
    """node → its strategy along every mesh axis"""
    outputs: tuple[Layout | None, ...]
    """per flat output: the layout it is returned in; None for outputs that are no tensors"""
    solution: Solution
    pinned: frozenset[str] = frozenset()
    """values with a hint: readers convert from the shared layout only, whatever else exists"""

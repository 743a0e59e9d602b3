"""What a sharding rule is: an op's strategies along ONE mesh axis, and its local form."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autoshard.layout import Layout, Placement, chunk
from autoshard.mesh import Mesh
from autoshard.passes.ir import Graph, Node, TensorType
from autoshard.passes.sizes import Size


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


@dataclass(frozen=True, slots=True)
class Local:
    """A local length: of a global length ``size`` cut by ``axes`` (outer to inner). A literal where even."""

    size: int
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Offset:
    """Where this rank's chunk of a global length ``size`` cut by ``axes`` starts."""

    size: int
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A call on local tensors. ``fn``: an op, or the name of a function of ``autoshard.runtime``.

    ``args``/``kwargs`` hold :class:`~autoshard.passes.ir.Ref`, literals, :class:`Local`, :class:`Offset`,
    and nested calls.
    """

    fn: torch._ops.OpOverload | str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Internal:
    """A collective inside a local form: no redistribution shows it."""

    kind: str
    axes: tuple[str, ...]
    bytes: float
    """what an all-reduce reduces on rank 0, the gathered whole, or what a halo brings; not ring bytes"""
    phase: str
    what: str


@dataclass(frozen=True, slots=True)
class Site:
    """What a local form may look at: the node, the graph's types, and the layouts chosen for it."""

    node: Node
    graph: Graph
    mesh: Mesh
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    choice: tuple[Strategy, ...]
    """the strategy of every mesh axis"""

    @property
    def example(self) -> Site:
        """The site with the example's lengths, where types are symbolic: for costs."""
        if not self.graph.symbols.read:
            return self
        types = {name: self.graph.types[name].example for name in (*self.node.inputs, *self.node.outputs)}
        return replace(self, graph=replace(self.graph, types=types))

    def axes(self, label: str) -> tuple[str, ...]:
        """Mesh axes (in mesh order) on which the strategy labelled ``label`` was chosen."""
        return tuple(a for a, s in zip(self.mesh.axes, self.choice, strict=True) if s.label == label)

    def in_type(self, i: int) -> TensorType:
        return self.graph.types[self.node.inputs[i]]

    def out_type(self, i: int = 0) -> TensorType:
        return self.graph.types[self.node.outputs[i]]

    def local(self, layout: Layout, dim: int, size: int) -> int | Local:
        """The local length of tensor dim ``dim`` (global ``size``): an int where no axis cuts it."""
        axes = layout.axes_of(dim)
        return Local(size, axes) if axes else size


StrategiesOf = Callable[[Node, Graph], tuple[Strategy, ...]]
LocalFormOf = Callable[[Site], Call]
CollectivesOf = Callable[[Site], tuple[Internal, ...]]


@dataclass(frozen=True)
class Rule:
    """An op's strategies and local form. ``flops(node, graph)``: multiply-adds count 2; 0 for elementwise ops."""

    op: torch._ops.OpOverload
    strategies: StrategiesOf
    local: LocalFormOf | None = None
    """None: the same op on local tensors with unchanged arguments"""
    flops: Callable[[Node, Graph], float] | None = None
    notation: str = ""
    """the rule as its author wrote it, for reports"""
    collectives: CollectivesOf | None = None
    """what the local form communicates, in order of execution; None: nothing"""
    sized: bool = True
    """whether the local form needs lengths of dims that are whole; else the others may depend on the data"""

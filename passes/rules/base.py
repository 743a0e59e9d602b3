"""What a sharding rule is: an op's strategies along ONE mesh axis, and its local form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node, TensorType
from autoshard.passes.ir.program import Call, Internal, Local


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


Types = Mapping[str, TensorType]
Rounding = Literal["", "exact", "sum", "product"]


@dataclass(frozen=True)
class Facts:
    """What is known of an op beside how it may be divided; :mod:`~autoshard.passes.rules.facts` answers from it.

    The defaults hold of any op: it may keep all that it sees.
    """

    saves: str | Callable[[Node, Types], str | None] | None = None
    """what autograd keeps for the backward of operands and results, by their names in the schema; None: all of them

    ``"self result"``: these two; ``"self: other; other: self"``: each where the other wants a gradient. The results
    are ``result``, ``result1``, …
    """
    intermediates: Callable[[Node, Types], Sequence[TensorType]] | None = None
    """what it keeps beside these: tensors that are no operands, nor results that are read; from local types, local ones"""
    view: bool | None = None
    """whether it returns a view of its operand, at no cost; None: as its schema says"""
    draws: Callable[[Mapping[str, Any]], bool] | None = None
    """whether it draws from the generator, given its arguments by name; None: as its tags say"""
    effect: bool = False
    """whether it counts where nobody reads its result"""
    rounding: Rounding | Callable[[Node], Rounding] = ""
    """what a float32 island may rely on: elements rounded correctly each by itself, sums, or products of matrices"""
    backward: float | None = None
    """backward FLOPs per forward FLOP; None: one more product per operand that wants a gradient, two at most"""


UNKNOWN = Facts()


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
    facts: Facts = UNKNOWN


def stating(facts: Facts, rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """``rules``, all with the same facts."""
    return tuple(replace(rule, facts=facts) for rule in rules)


def indices(node: Node, types: Types) -> tuple[TensorType, ...]:
    """:attr:`Facts.intermediates` of an op that gives elements and where they lie, where only the elements are read."""
    return () if 1 in node.output_slots else (TensorType(types[node.outputs[0]].shape, torch.int64),)


def each_other(*names: str) -> str:
    """:attr:`Facts.saves` of a product of these operands: for the gradient of each all others."""
    return "; ".join(f"{a}: {' '.join(b for b in names if b != a)}" for a in names)

"""Sharding rules: an op's strategies along one mesh axis, and its local (per-shard) form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from autoshard.aten import Absent, aten
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node, TensorType
from autoshard.passes.ir.program import Call, Internal, Local, spell
from autoshard.passes.rules.factors import Factors, Space, positive


@dataclass(frozen=True, slots=True)
class Site:
    """The input of a local form: node, types of the graph, and the layouts chosen for the node."""

    node: Node
    graph: Graph
    mesh: Mesh
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    choice: tuple[Strategy, ...]
    """the strategy chosen on every mesh axis"""
    of_micro_batch: bool = False
    """ranks stand for micro-batches, whose graphs are planned later: no tuning for a rank here"""

    @property
    def example(self) -> Site:
        """The site with the example's sizes in place of symbolic ones, for costs."""
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

    def unchanged(self, /, **changes: Any) -> Call:
        """The op's own call, with some arguments replaced."""
        return Call(self.node.op, *self.node.with_arguments(**changes))

    def axes_of(self, name: str, dim: int) -> tuple[str, ...]:
        """Mesh axes that shard ``dim`` of operand ``name``, outer to inner; () if it is absent."""
        position = self.node.positions.get(name)
        return () if position is None else self.inputs[position].axes_of(dim)

    @property
    def cut_dim(self) -> tuple[int, tuple[str, ...]]:
        """The op's ``dim`` argument, non-negative, and the mesh axes that shard it."""
        shape = self.in_type(0).shape
        dim: int = positive(self.node.argument("dim"), max(1, len(shape)))
        return dim, self.inputs[0].axes_of(dim) if shape else ()

    def local_shape(self, name: str) -> tuple[int, ...]:
        """The shape of an operand's shard on rank 0, which holds the largest shard."""
        i = self.node.positions[name]
        return self.inputs[i].max_local_shape(self.in_type(i).shape)

    @property
    def grad(self) -> bool:
        """Whether any result requires a gradient."""
        return any(self.graph.types[name].grad for name in self.node.outputs)

    def reductions(
        self, axes: tuple[str, ...], size: float, forward: Sequence[str], backward: Sequence[str]
    ) -> tuple[Internal, ...]:
        """All-reduces of ``size`` bytes, one per name; ``backward`` only with a gradient."""
        if self.mesh.size_of(axes) == 1:
            return ()
        phases = [("forward", what) for what in forward] + [("backward", what) for what in backward if self.grad]
        return tuple(Internal("all_reduce", axes, size, phase, what) for phase, what in phases)

    def gathered(self, axes: tuple[str, ...], size: float, what: str, to: str) -> tuple[Internal, ...]:
        """All-gather of ``size`` bytes per rank to I, or to R, whose backward reduce-scatters."""
        ranks = self.mesh.size_of(axes)
        if ranks == 1:
            return ()
        forward = Internal("all_gather", axes, ranks * size, "forward", what)
        if to == "I" or not self.grad:
            return (forward,)
        return forward, Internal("reduce_scatter", axes, ranks * size, "backward", f"gradient of the {what}")

    def local_sizes(self, layout: Layout, shape: Sequence[int]) -> list[int | Local]:
        """The local sizes of a tensor of global ``shape``; ints for unsharded dims."""
        return [Local(n, axes) if (axes := layout.cutting(d)) else n for d, n in enumerate(shape)]


SpaceOf = Callable[[Node, Graph], Space]
LocalFormOf = Callable[[Site], Call]
CollectivesOf = Callable[[Site], tuple[Internal, ...]]


Types = Mapping[str, TensorType]
Rounding = Literal["", "exact", "sum", "product"]


@dataclass(frozen=True)
class Facts:
    """Facts about an op besides its sharding, see :mod:`~autoshard.passes.rules.facts`.

    The defaults are safe for any op: autograd may save everything.
    """

    saves: str | Callable[[Node, Types], str | None] | None = None
    """names of operands and results that autograd saves for the backward; None: all of them

    ``"self result"`` saves both. ``"self: other; other: self"`` saves each if the other requires a
    gradient. Results are ``result``, ``result1``, …
    """
    intermediates: Callable[[Node, Types], Sequence[TensorType]] | None = None
    """other tensors autograd saves, no operands or used results; local types give local ones"""
    view: bool | None = None
    """whether it returns a view of its operand at no cost; None: as its schema says"""
    draws: Callable[[Mapping[str, Any]], bool] | None = None
    """whether it uses the random generator, given its arguments by name; None: as its tags say"""
    redrawn: bool = False
    """whether the other saved tensors are random draws that recomputation can draw again"""
    effect: bool = False
    """whether the op must stay although its result is unused"""
    rounding: Rounding | Callable[[Node], Rounding] = ""
    """what float32 upcast regions may rely on: "exact" elements, a "sum", a matrix "product"."""
    chains: bool = False
    """whether a compiler fuses it with elementwise neighbours though torch has no such tag"""
    function: bool = False
    """whether one element costs more than an addition: exp, softmax, a norm"""
    looks_up: bool = False
    """whether it reads only as many elements of its first operand as it returns"""
    joins: bool = False
    """whether its result joins its operands; a rank may own some operands and lack others"""
    backward: float | None = None
    """backward FLOPs / forward FLOPs; None: a product per operand with a gradient, at most two"""
    addend: str = ""
    """operand of a product whose gradient needs no product: an added bias, routing weights"""
    kernels: int = 1
    """kernels in a row in the forward, and again in the backward; each reads the one before"""


UNKNOWN, NOTHING = Facts(), Facts(saves="")
"""the default for any op; an op that saves nothing"""


@dataclass(frozen=True)
class Rule:
    """An op's strategies and local form. ``flops``: a multiply-add counts 2, elementwise ops 0."""

    op: torch._ops.OpOverload
    space: SpaceOf
    local: LocalFormOf | None = None
    """None: the op itself on shards, with unchanged arguments"""
    flops: Callable[[Node, Graph], float] | None = None
    notation: str = ""
    """the rule as its author wrote it, shown in reports"""
    collectives: CollectivesOf | None = None
    """collectives of the local form in execution order; forward all-reduces use ``statistic``"""
    sized: bool = True
    """whether the local form needs lengths of unsharded dims, so that they cannot be unknown"""
    facts: Facts = UNKNOWN
    named: str = ""
    """the runtime function that replaces the op, also on full tensors"""

    def strategies(self, node: Node, graph: Graph) -> tuple[Strategy, ...]:
        """Every strategy of ``node`` along one mesh axis."""
        found = self.space(node, graph)
        return found.strategies(node, graph) if isinstance(found, Factors) else found


def ops(names: str) -> tuple[torch._ops.OpOverload, ...]:
    """aten ops from ``"conv1d.default conv2d.default"``, without those this torch lacks."""
    pairs = (name.split(".") for name in names.split())
    found = (getattr(getattr(aten, packet), overload) for packet, overload in pairs)
    return tuple(op for op in found if not isinstance(op, Absent))


def rules(
    names: str,
    space: SpaceOf,
    local: LocalFormOf | None = None,
    notation: str = "",
    collectives: CollectivesOf | None = None,
    *,
    facts: Facts = UNKNOWN,
    sized: bool = True,
) -> list[Rule]:
    """One rule for each of several aten ops, named as for :func:`ops`."""
    return [Rule(op, space, local, None, notation, collectives, sized, facts) for op in ops(names)]


def stating(facts: Facts, rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """``rules`` with the same facts."""
    return tuple(replace(rule, facts=facts) for rule in rules)


def along_cut(function: str, *given: str) -> LocalFormOf:
    """Local form over a sharded dim: ``function(self, dim, *given, length, axes)``."""

    def local(site: Site) -> Call:
        node, (dim, axes) = site.node, site.cut_dim
        if not axes:
            return site.unchanged()
        others = (node.argument(a) for a in given)
        return Call(function, (node.argument("self"), dim, *others, site.in_type(0).shape[dim], spell(axes)), {})

    return local


def over_cut(function: str) -> LocalFormOf:
    """Local form over a sharded dim: ``function(self, dim, axes)``, with dtype if changed."""

    def local(site: Site) -> Call:
        dim, axes = site.cut_dim
        if not axes:
            return site.unchanged()
        dtype = site.out_type().dtype
        extra = {} if dtype == site.in_type(0).dtype else {"dtype": dtype}
        return Call(function, (site.node.args[0], dim, spell(axes)), extra)

    return local


def indices(node: Node, types: Types) -> tuple[TensorType, ...]:
    """:attr:`Facts.intermediates` of ops with values and indices: unused indices are saved."""
    return () if 1 in node.output_slots else (TensorType(types[node.outputs[0]].shape, torch.int64),)


def each_other(*names: str) -> str:
    """:attr:`Facts.saves` of a product: the gradient of each operand needs all others."""
    return "; ".join(f"{a}: {' '.join(b for b in names if b != a)}" for a in names)

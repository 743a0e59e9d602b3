"""What a sharding rule is: an op's strategies along ONE mesh axis, and its local form."""

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
    """What a local form may look at: the node, the graph's types, and the layouts chosen for it."""

    node: Node
    graph: Graph
    mesh: Mesh
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    choice: tuple[Strategy, ...]
    """the strategy of every mesh axis"""
    of_micro_batch: bool = False
    """parts are micro-batches, whose graph is planned then: how a rank works on its part of one is asked there"""

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

    def unchanged(self, /, **changes: Any) -> Call:
        """The same op, with some arguments replaced."""
        return Call(self.node.op, *self.node.with_arguments(**changes))

    def axes_of(self, name: str, dim: int) -> tuple[str, ...]:
        """Mesh axes that cut ``dim`` of the operand ``name``, outer to inner; none where the operand is absent."""
        position = self.node.positions.get(name)
        return () if position is None else self.inputs[position].axes_of(dim)

    @property
    def cut_dim(self) -> tuple[int, tuple[str, ...]]:
        """The dim that the op works along, and the axes that cut it; none of a scalar."""
        shape = self.in_type(0).shape
        dim: int = positive(self.node.argument("dim"), max(1, len(shape)))
        return dim, self.inputs[0].axes_of(dim) if shape else ()

    def local_shape(self, name: str) -> tuple[int, ...]:
        """The shape of an operand on rank 0."""
        i = self.node.positions[name]
        return self.inputs[i].max_local_shape(self.in_type(i).shape)

    @property
    def grad(self) -> bool:
        """Whether a gradient flows through any result."""
        return any(self.graph.types[name].grad for name in self.node.outputs)

    def reductions(
        self, axes: tuple[str, ...], size: float, forward: Sequence[str], backward: Sequence[str]
    ) -> tuple[Internal, ...]:
        """All-reduces of ``size`` bytes each over ``axes``: what they reduce, forward, and backward if a gradient flows."""
        if self.mesh.size_of(axes) == 1:
            return ()
        phases = [("forward", what) for what in forward] + [("backward", what) for what in backward if self.grad]
        return tuple(Internal("all_reduce", axes, size, phase, what) for phase, what in phases)

    def gathered(self, axes: tuple[str, ...], size: float, what: str, to: str) -> tuple[Internal, ...]:
        """An all-gather of ``size`` bytes per rank over ``axes`` to I or R; to R, its backward reduce-scatters."""
        ranks = self.mesh.size_of(axes)
        if ranks == 1:
            return ()
        forward = Internal("all_gather", axes, ranks * size, "forward", what)
        if to == "I" or not self.grad:
            return (forward,)
        return forward, Internal("reduce_scatter", axes, ranks * size, "backward", f"gradient of the {what}")

    def local_sizes(self, layout: Layout, shape: Sequence[int]) -> list[int | Local]:
        """The local lengths of a tensor of global ``shape``: ints where no axis cuts it."""
        return [Local(n, axes) if (axes := layout.cutting(d)) else n for d, n in enumerate(shape)]


SpaceOf = Callable[[Node, Graph], Space]
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
    redrawn: bool = False
    """whether what it keeps beside operands and results is drawn, so that the backward can draw it again without these"""
    effect: bool = False
    """whether it counts where nobody reads its result"""
    rounding: Rounding | Callable[[Node], Rounding] = ""
    """what a float32 island may rely on: elements rounded correctly each by itself, sums, or products of matrices"""
    chains: bool = False
    """whether a compiler computes it in one kernel with elementwise neighbours, though no tag of torch says so"""
    function: bool = False
    """whether it computes more for an element than an addition does: exp, softmax, a norm"""
    looks_up: bool = False
    """whether it reads of its first operand no more than it gives"""
    joins: bool = False
    """whether its operands together are what it gives, also where a rank owns some of them and has no rows of the others"""
    backward: float | None = None
    """backward FLOPs per forward FLOP; None: one more product per operand that wants a gradient, two at most"""
    addend: str = ""
    """of a product, the argument whose gradient takes none: a bias that is added to it, gates that weigh its rows"""
    kernels: int = 1
    """how many run one after another, forward, and as many backward: more than one reads what another wrote"""


UNKNOWN, NOTHING = Facts(), Facts(saves="")
"""of any op; of one that keeps nothing"""


@dataclass(frozen=True)
class Rule:
    """An op's strategies and local form. ``flops(node, graph)``: multiply-adds count 2; 0 for elementwise ops."""

    op: torch._ops.OpOverload
    space: SpaceOf
    local: LocalFormOf | None = None
    """None: the same op on local tensors with unchanged arguments"""
    flops: Callable[[Node, Graph], float] | None = None
    notation: str = ""
    """the rule as its author wrote it, for reports"""
    collectives: CollectivesOf | None = None
    """what the local form communicates, in order of execution, all-reduces of its forward by ``statistic``; None: nothing"""
    sized: bool = True
    """whether the local form needs lengths of dims that are whole; else the others may depend on the data"""
    facts: Facts = UNKNOWN
    named: str = ""
    """the function of the runtime that runs in the op's place, also on whole tensors"""

    def strategies(self, node: Node, graph: Graph) -> tuple[Strategy, ...]:
        """Every way to run ``node`` along one mesh axis."""
        found = self.space(node, graph)
        return found.strategies(node, graph) if isinstance(found, Factors) else found


def ops(names: str) -> tuple[torch._ops.OpOverload, ...]:
    """aten ops, as in ``"conv1d.default conv2d.default"``, without those that this torch lacks."""
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
    """The rules of several aten ops, named as for :func:`ops`."""
    return [Rule(op, space, local, None, notation, collectives, sized, facts) for op in ops(names)]


def stating(facts: Facts, rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """``rules``, all with the same facts."""
    return tuple(replace(rule, facts=facts) for rule in rules)


def along_cut(function: str, *given: str) -> LocalFormOf:
    """``function`` of the runtime where the op's dim is cut: of self, dim, these arguments, the dim's length, and axes."""

    def local(site: Site) -> Call:
        node, (dim, axes) = site.node, site.cut_dim
        if not axes:
            return site.unchanged()
        others = (node.argument(a) for a in given)
        return Call(function, (node.argument("self"), dim, *others, site.in_type(0).shape[dim], spell(axes)), {})

    return local


def over_cut(function: str) -> LocalFormOf:
    """The same of self, dim and axes, with the result's dtype where it is another."""

    def local(site: Site) -> Call:
        dim, axes = site.cut_dim
        if not axes:
            return site.unchanged()
        dtype = site.out_type().dtype
        extra = {} if dtype == site.in_type(0).dtype else {"dtype": dtype}
        return Call(function, (site.node.args[0], dim, spell(axes)), extra)

    return local


def indices(node: Node, types: Types) -> tuple[TensorType, ...]:
    """:attr:`Facts.intermediates` of an op that gives elements and where they lie, where only the elements are read."""
    return () if 1 in node.output_slots else (TensorType(types[node.outputs[0]].shape, torch.int64),)


def each_other(*names: str) -> str:
    """:attr:`Facts.saves` of a product of these operands: for the gradient of each all others."""
    return "; ".join(f"{a}: {' '.join(b for b in names if b != a)}" for a in names)

"""Sharding rules: an op's strategies along one mesh axis, its factors, and its local form. Along
factor f, operands and results with f are sharded, operands without it replicated, results
without it Partial. An op also runs on full tensors, and on partial sums of operands in which it
is linear."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Union

import torch

from autoshard.aten import MissingOp, aten
from autoshard.errors import RuleError
from autoshard.layout import I, Layout, P, Partial, Placement, R, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node, TensorType
from autoshard.passes.ir.program import InternalCollective, Local, LocalCall, axes_argument
from autoshard.torch_private.ops import OpOverload

Dims = tuple[str | None, ...]
"""one factor per tensor dim; None: the dim must be unsharded"""

SUMMABLE_DTYPES = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
    | {torch.uint8, torch.int8, torch.int32, torch.int64}
)
"""dtypes that collectives can sum, so that Partial exists; not bool or int16"""


@dataclass(frozen=True)
class Factors:
    """The factors of one node: for each input and output one factor per tensor dim."""

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, int]
    """length of every factor; only factors longer than 1 are sharded"""
    even: frozenset[str] = frozenset()
    """factors that lead a compound dim: their chunks must have equal size"""
    addends: frozenset[int] = frozenset()
    """operands added to a sum over factors they lack; Partial there, so they are added once"""
    linear: tuple[tuple[int, ...], ...] = ()
    """groups of operands in which the op is jointly linear"""
    reduced: Mapping[str, Placement] = field(default_factory=dict)
    """placement of results that lack the factor, if not Partial("sum")"""
    nonempty: frozenset[str] = frozenset()
    """factors of which no rank may hold an empty chunk, since the kernel fails on it"""

    def strategies(self, node: Node, graph: Graph) -> tuple[Strategy, ...]:
        """Every strategy: I, R, one per factor, one per linear group of operands."""
        return (
            *unsharded_strategies(len(self.inputs), len(self.outputs)),
            *(self._along(f) for f, n in self.sizes.items() if int(n) > 1 and self._shardable(f, node, graph)),
            *(self._through(group) for group in self.linear if _can_be_summed(node, graph, group)),
        )

    def _shardable(self, factor: str, node: Node, graph: Graph) -> bool:
        """Whether no tensor has ``factor`` twice and results without it have a summable dtype."""
        if max((dims.count(factor) for dims in self.inputs + self.outputs), default=0) != 1:
            return False
        if not isinstance(self.reduced.get(factor, P), Partial):
            return True
        lacking = [name for name, dims in zip(node.outputs, self.outputs, strict=True) if factor not in dims]
        return all(graph.types[name].dtype in SUMMABLE_DTYPES for name in lacking)

    def _along(self, factor: str) -> Strategy:
        summed = not any(factor in dims for dims in self.outputs)
        inputs = tuple(
            _placement_along(dims, factor, P if summed and i in self.addends else R)
            for i, dims in enumerate(self.inputs)
        )
        outputs = tuple(_placement_along(dims, factor, self.reduced.get(factor, P)) for dims in self.outputs)
        even, nonempty = factor in self.even, factor in self.nonempty
        return Strategy(factor, inputs, outputs, self.sizes[factor], even, divides=True, nonempty=nonempty)

    def _through(self, group: tuple[int, ...]) -> Strategy:
        inputs = tuple(P if i in group else R for i in range(len(self.inputs)))
        return Strategy(f"P({','.join(map(str, group))})", inputs, (P,) * len(self.outputs))


Space = Union[tuple[Strategy, ...], Factors]
"""the strategies of a node, or the factors that give them"""


def unsharded_strategies(inputs: int, outputs: int) -> tuple[Strategy, ...]:
    """The two strategies of any op on full tensors: I (full gradients), R (partial gradients)."""
    return Strategy("I", (I,) * inputs, (I,) * outputs), Strategy("R", (R,) * inputs, (R,) * outputs)


def unsharded_only(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """The space of an op that runs on full tensors only."""
    return unsharded_strategies(len(node.inputs), len(node.outputs))


def same_shape_factors(node: Node, graph: Graph) -> Factors:
    """Factors of an op whose results have the shape of its one operand: every dim is a factor."""
    (shape,) = graph.shapes(node.inputs)
    dims = numbered_factors(shape)
    return Factors((dims,), (dims,) * len(node.outputs), sizes_of(shape))


def _placement_along(dims: Dims, factor: str, lacking: Placement) -> Placement:
    return Shard(dims.index(factor)) if factor in dims else lacking


def _can_be_summed(node: Node, graph: Graph, group: tuple[int, ...]) -> bool:
    """Whether partial sums of these operands give partial sums of the results, without rounding."""
    ins = [graph.types[node.inputs[i]].dtype for i in group]
    outs = [graph.types[name].dtype for name in node.outputs]
    if not ins or not SUMMABLE_DTYPES.issuperset(ins + outs):
        return False
    fractional = any(d.is_floating_point or d.is_complex for d in ins)
    return not fractional or all(d.is_floating_point or d.is_complex for d in outs)


# Building blocks of rules.


def operand_factors(node: Node, dims: Mapping[str, Dims]) -> tuple[Dims, ...]:
    """Factors per entry of ``node.inputs`` from factors per argument name."""
    return tuple(dims[name] for name in node.positions)


def positive(dim: int, rank: int) -> int:
    """``dim`` as a non-negative number."""
    return dim + rank if dim < 0 else dim


def dims_argument(dims: int | Sequence[int] | None, rank: int, *, empty_is_all: bool = True) -> tuple[int, ...]:
    """A ``dim`` argument as sorted non-negative dims; None, and mostly (), means all."""
    if isinstance(dims, int):
        dims = (dims,)
    elif dims is None or (empty_is_all and not dims):
        dims = range(rank)
    return tuple(sorted({positive(d, rank) for d in dims}))


def numbered_factors(shape: Sequence[int], without: Iterable[int] = ()) -> Dims:
    """Factors ``d0, d1, …`` for the dims of a shape, None for those in ``without``."""
    skipped = set(without)
    return tuple(None if d in skipped else f"d{d}" for d in range(len(shape)))


def sizes_of(shape: Sequence[int]) -> dict[str, int]:
    """Lengths of the factors that :func:`numbered_factors` names."""
    return {f"d{d}": n for d, n in enumerate(shape)}


def broadcast(shape: Sequence[int], to: Sequence[int], names: Dims) -> Dims:
    """Factors of a ``shape`` that broadcasts to ``to`` (right-aligned) with factors ``names``."""
    start = len(to) - len(shape)
    return tuple(names[start + d] if _is_same_length(n, to[start + d]) else None for d, n in enumerate(shape))


def _is_same_length(a: int, b: int) -> bool:
    """Whether two lengths are equal. Raises :class:`RuleError` if they are in the example only."""
    if a != b and int(a) == int(b) != 1:
        raise RuleError(f"the lengths {a} and {b} are equal, but perhaps not in all calls")
    return a == b


def broadcast_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    rank = max(map(len, shapes), default=0)
    padded = [(1,) * (rank - len(s)) + tuple(s) for s in shapes]
    return tuple(next((n for n in lengths if n != 1), 1) for lengths in zip(*padded, strict=True))


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
    in_micro_batch: bool = False
    """ranks stand for micro-batches, whose graphs are planned later: no tuning for a rank here"""

    @property
    def example(self) -> Site:
        """The site with the example's sizes in place of symbolic ones, for costs."""
        if not self.graph.symbols.read:
            return self
        types = {name: self.graph.types[name].example for name in self.node.values}
        return replace(self, graph=replace(self.graph, types=types))

    def axes(self, label: str) -> tuple[str, ...]:
        """Mesh axes (in mesh order) on which the strategy labelled ``label`` was chosen."""
        return tuple(a for a, s in zip(self.mesh.axes, self.choice, strict=True) if s.label == label)

    def in_type(self, i: int) -> TensorType:
        return self.graph.types[self.node.inputs[i]]

    def out_type(self, i: int = 0) -> TensorType:
        return self.graph.types[self.node.outputs[i]]

    def unchanged(self, /, **changes: Any) -> LocalCall:
        """The op's own call, with some arguments replaced."""
        return LocalCall(self.node.op, *self.node.with_arguments(**changes))

    def axes_of(self, name: str, dim: int) -> tuple[str, ...]:
        """Mesh axes that shard ``dim`` of operand ``name``, outer to inner; () if it is absent."""
        position = self.node.positions.get(name)
        return () if position is None else self.inputs[position].axes_of(dim)

    @property
    def sharded_dim(self) -> tuple[int, tuple[str, ...]]:
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
        return self.graph.is_differentiable(self.node)

    def local_sizes(self, layout: Layout, shape: Sequence[int]) -> list[int | Local]:
        """The local sizes of a tensor of global ``shape``; ints for unsharded dims."""
        return [Local(n, axes) if (axes := layout.cutting(d)) else n for d, n in enumerate(shape)]


SpaceOf = Callable[[Node, Graph], Space]
LocalFormOf = Callable[[Site], LocalCall]
Annotation = Callable[[Site, InternalCollective], InternalCollective]
Stated = Callable[[Site], tuple[InternalCollective, ...]]


Types = Mapping[str, TensorType]


@dataclass(frozen=True)
class Facts:
    """Facts about an op besides its sharding, see :mod:`~autoshard.passes.rules.facts`.
    The defaults are safe for any op: autograd may save everything."""

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


DEFAULT_FACTS, KEEPS_NOTHING = Facts(), Facts(saves="")
"""the default for any op; an op that saves nothing"""


@dataclass(frozen=True)
class Rule:
    """An op's strategies and local form. ``flops``: a multiply-add counts 2, elementwise ops 0."""

    op: OpOverload
    space: SpaceOf
    local: LocalFormOf | None = None
    """None: the op itself on shards, with unchanged arguments"""
    flops: Callable[[Node, Graph], float] | None = None
    notation: str = ""
    """the rule as its author wrote it, shown in reports"""
    sends: bool | Stated = False
    """whether ranks may communicate inside the local form; what they send is recorded, or stated

    Recomputation reuses results of all-reduces in the forward, so these are ``reduce_statistic``.
    """
    sized: bool = True
    """whether the local form needs lengths of unsharded dims, so that they cannot be unknown"""
    facts: Facts = DEFAULT_FACTS
    named: str = ""
    """the runtime function that replaces the op, also on full tensors"""
    annotate: Annotation | None = None
    """adds what spares a recorded collective, and who shares it"""

    def strategies(self, node: Node, graph: Graph) -> tuple[Strategy, ...]:
        """Every strategy of ``node`` along one mesh axis."""
        found = self.space(node, graph)
        return found.strategies(node, graph) if isinstance(found, Factors) else found


def ops(names: str) -> tuple[OpOverload, ...]:
    """aten ops from ``"conv1d.default conv2d.default"``, without those this torch lacks."""
    pairs = (name.split(".") for name in names.split())
    found = (getattr(getattr(aten, packet), overload) for packet, overload in pairs)
    return tuple(op for op in found if not isinstance(op, MissingOp))


def rules(
    names: str,
    space: SpaceOf,
    local: LocalFormOf | None = None,
    notation: str = "",
    *,
    sends: bool = False,
    facts: Facts = DEFAULT_FACTS,
    sized: bool = True,
    annotate: Annotation | None = None,
) -> list[Rule]:
    """One rule for each of several aten ops, named as for :func:`ops`."""
    return [Rule(op, space, local, None, notation, sends, sized, facts, "", annotate) for op in ops(names)]


def with_facts(facts: Facts, rules: Iterable[Rule]) -> tuple[Rule, ...]:
    return tuple(replace(rule, facts=facts) for rule in rules)


def indexed_dim_form(function: str, *given: str) -> LocalFormOf:
    """Local form over a sharded dim: ``function(self, dim, *given, length, axes)``."""

    def local(site: Site) -> LocalCall:
        node, (dim, axes) = site.node, site.sharded_dim
        if not axes:
            return site.unchanged()
        others = (node.argument(a) for a in given)
        return LocalCall(
            function, (node.argument("self"), dim, *others, site.in_type(0).shape[dim], axes_argument(axes)), {}
        )

    return local


def reduced_dim_form(function: str) -> LocalFormOf:
    """Local form over a sharded dim: ``function(self, dim, axes)``, with dtype if changed."""

    def local(site: Site) -> LocalCall:
        dim, axes = site.sharded_dim
        if not axes:
            return site.unchanged()
        dtype = site.out_type().dtype
        extra = {} if dtype == site.in_type(0).dtype else {"dtype": dtype}
        return LocalCall(function, (site.node.args[0], dim, axes_argument(axes)), extra)

    return local


def index_intermediates(node: Node, types: Types) -> tuple[TensorType, ...]:
    """:attr:`Facts.intermediates` of ops with values and indices: unused indices are saved."""
    return () if 1 in node.output_slots else (TensorType(types[node.outputs[0]].shape, torch.int64),)


def product_saves(*names: str) -> str:
    """:attr:`Facts.saves` of a product: the gradient of each operand needs all others."""
    return "; ".join(f"{a}: {' '.join(b for b in names if b != a)}" for a in names)

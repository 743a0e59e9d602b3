"""Factors (einsum-like loop dims of an op) and the strategies that follow from them.

Sharding factor f along one mesh axis gives: operands with f → Shard, without f → Replicate; results
with f → Shard, without f → Partial. An op also runs on full tensors (all I or all R), and on
partial sums of operands in which it is linear.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Union

import torch

from autoshard.errors import RuleError
from autoshard.layout import I, P, Partial, Placement, R, Shard
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node

Dims = tuple[str | None, ...]
"""one factor per tensor dim; None: the dim must be unsharded"""

ADDED = frozenset(
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
    filled: frozenset[str] = frozenset()
    """factors of which no rank may hold an empty chunk, since the kernel fails on it"""

    def strategies(self, node: Node, graph: Graph) -> tuple[Strategy, ...]:
        """Every strategy: I, R, one per factor, one per linear group of operands."""
        return (
            *whole(len(self.inputs), len(self.outputs)),
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
        return all(graph.types[name].dtype in ADDED for name in lacking)

    def _along(self, factor: str) -> Strategy:
        summed = not any(factor in dims for dims in self.outputs)
        inputs = tuple(
            _place(dims, factor, P if summed and i in self.addends else R) for i, dims in enumerate(self.inputs)
        )
        outputs = tuple(_place(dims, factor, self.reduced.get(factor, P)) for dims in self.outputs)
        least = int(factor in self.filled)
        return Strategy(factor, inputs, outputs, self.sizes[factor], factor in self.even, divides=True, least=least)

    def _through(self, group: tuple[int, ...]) -> Strategy:
        inputs = tuple(P if i in group else R for i in range(len(self.inputs)))
        return Strategy(f"P({','.join(map(str, group))})", inputs, (P,) * len(self.outputs))


Space = Union[tuple[Strategy, ...], Factors]
"""the strategies of a node, or the factors that give them"""


def whole(inputs: int, outputs: int) -> tuple[Strategy, ...]:
    """The two strategies of any op on full tensors: I (full gradients), R (partial gradients)."""
    return Strategy("I", (I,) * inputs, (I,) * outputs), Strategy("R", (R,) * inputs, (R,) * outputs)


def undivided(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """The space of an op that runs on full tensors only."""
    return whole(len(node.inputs), len(node.outputs))


def alike(node: Node, graph: Graph) -> Factors:
    """Factors of an op whose results have the shape of its one operand: every dim is a factor."""
    (shape,) = graph.shapes(node.inputs)
    dims = numbered(shape)
    return Factors((dims,), (dims,) * len(node.outputs), sizes_of(shape))


def _place(dims: Dims, factor: str, lacking: Placement) -> Placement:
    return Shard(dims.index(factor)) if factor in dims else lacking


def _can_be_summed(node: Node, graph: Graph, group: tuple[int, ...]) -> bool:
    """Whether partial sums of these operands give partial sums of the results, without rounding."""
    ins = [graph.types[node.inputs[i]].dtype for i in group]
    outs = [graph.types[name].dtype for name in node.outputs]
    if not ins or not ADDED.issuperset(ins + outs):
        return False
    fractional = any(_is_fractional(d) for d in ins)
    return not fractional or all(_is_fractional(d) for d in outs)


def _is_fractional(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


# Building blocks of rules.


def inputs(node: Node, dims: Mapping[str, Dims]) -> tuple[Dims, ...]:
    """Factors per entry of ``node.inputs`` from factors per argument name."""
    return tuple(dims[name] for name in node.positions)


def positive(dim: int, rank: int) -> int:
    """``dim`` as a non-negative number."""
    return dim + rank if dim < 0 else dim


def dims_argument(dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """A ``dim`` argument as sorted non-negative dims; None and () mean all dims."""
    listed = (dims,) if isinstance(dims, int) else tuple(dims or range(rank))
    return tuple(sorted({positive(d, rank) for d in listed}))


def numbered(shape: Sequence[int], without: Iterable[int] = ()) -> Dims:
    """Factors ``d0, d1, …`` for the dims of a shape, None for those in ``without``."""
    skipped = set(without)
    return tuple(None if d in skipped else f"d{d}" for d in range(len(shape)))


def sizes_of(shape: Sequence[int]) -> dict[str, int]:
    """Lengths of the factors that :func:`numbered` names."""
    return {f"d{d}": n for d, n in enumerate(shape)}


def broadcast(shape: Sequence[int], to: Sequence[int], names: Dims) -> Dims:
    """Factors of a ``shape`` that broadcasts to ``to`` (right-aligned) with factors ``names``."""
    start = len(to) - len(shape)
    return tuple(names[start + d] if _meet(n, to[start + d]) else None for d, n in enumerate(shape))


def _meet(a: int, b: int) -> bool:
    """Whether two lengths are equal. Raises :class:`RuleError` if they are in the example only."""
    if a != b and int(a) == int(b) != 1:
        raise RuleError(f"the lengths {a} and {b} are equal, but not in all calls as far as can be seen")
    return a == b


def broadcast_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape to which tensors of these shapes broadcast."""
    rank = max(map(len, shapes), default=0)
    padded = [(1,) * (rank - len(s)) + tuple(s) for s in shapes]
    return tuple(next((n for n in lengths if n != 1), 1) for lengths in zip(*padded, strict=True))


def wide_bytes(dtype: torch.dtype) -> int:
    """Bytes per element in sums: at least float32."""
    return max(4, dtype.itemsize)

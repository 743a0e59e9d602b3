"""From factors to strategies: the one sentence of which every sharding rule is an instance.

Sharding factor f along one mesh axis gives: operands that have f → Shard, operands that lack it → Replicate,
results that have f → Shard, results that lack it → Partial. Beside the factors an op runs on whole values
(all Invariant, or all Replicate), and on summands of each operand in which it is linear.
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
"""a factor per tensor dim; None: the dim must be whole"""

ADDED = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
    | {torch.uint8, torch.int8, torch.int32, torch.int64}
)
"""dtypes whose summands collectives add up: of others, such as booleans and int16, there are none"""


@dataclass(frozen=True)
class Factors:
    """The factors of one node: per entry of ``node.inputs`` and ``node.outputs`` a factor per tensor dim."""

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, int]
    """length of every factor; a factor without one, or of length 1, is not sharded"""
    even: frozenset[str] = frozenset()
    """factors that lead a compound dim: their chunks must be equal"""
    addends: frozenset[int] = frozenset()
    """operands added to a sum over factors they lack: Partial there, so that they are added once"""
    linear: tuple[tuple[int, ...], ...] = ()
    """groups of operands in which the op is jointly linear"""
    reduced: Mapping[str, Placement] = field(default_factory=dict)
    """placement of results that lack the factor, where that is not Partial("sum")"""
    filled: frozenset[str] = frozenset()
    """factors of which every rank must hold a part: the kernel takes no empty one"""

    def strategies(self, node: Node, graph: Graph) -> tuple[Strategy, ...]:
        """Every strategy: I, R, one per factor, one per linear group."""
        return (
            *whole(len(self.inputs), len(self.outputs)),
            *(self._along(f) for f, n in self.sizes.items() if int(n) > 1 and self._shardable(f, node, graph)),
            *(self._through(group) for group in self.linear if _can_be_summed(node, graph, group)),
        )

    def _shardable(self, factor: str, node: Node, graph: Graph) -> bool:
        """Once at most in every operand and result, with summands only of what is added up."""
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
"""the strategies of a node, or the factors that they follow from"""


def whole(inputs: int, outputs: int) -> tuple[Strategy, ...]:
    """The two strategies every op has: whole values, with whole gradients or with summands of gradients."""
    return Strategy("I", (I,) * inputs, (I,) * outputs), Strategy("R", (R,) * inputs, (R,) * outputs)


def undivided(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """The space of an op that runs on whole tensors only."""
    return whole(len(node.inputs), len(node.outputs))


def alike(node: Node, graph: Graph) -> Factors:
    """The factors of an op whose results have the shape of its operand: every dim is one."""
    (shape,) = graph.shapes(node.inputs)
    dims = numbered(shape)
    return Factors((dims,), (dims,) * len(node.outputs), sizes_of(shape))


def _place(dims: Dims, factor: str, lacking: Placement) -> Placement:
    return Shard(dims.index(factor)) if factor in dims else lacking


def _can_be_summed(node: Node, graph: Graph, group: tuple[int, ...]) -> bool:
    """Whether summands of these operands make summands of the results: no rounding to integers."""
    ins = [graph.types[node.inputs[i]].dtype for i in group]
    outs = [graph.types[name].dtype for name in node.outputs]
    if not ins or not ADDED.issuperset(ins + outs):
        return False
    fractional = any(_is_fractional(d) for d in ins)
    return not fractional or all(_is_fractional(d) for d in outs)


def _is_fractional(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


# What rules are written with.


def inputs(node: Node, dims: Mapping[str, Dims]) -> tuple[Dims, ...]:
    """Factors per entry of ``node.inputs`` from factors per argument name."""
    return tuple(dims[name] for name in node.positions)


def positive(dim: int, rank: int) -> int:
    """``dim`` counted from the front."""
    return dim + rank if dim < 0 else dim


def dims_argument(dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """A ``dim`` argument as non-negative dims; None and () mean all of them."""
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
    """Factors of an operand of ``shape`` that broadcasts to a shape whose dims are ``names`` (right-aligned)."""
    start = len(to) - len(shape)
    return tuple(names[start + d] if _meet(n, to[start + d]) else None for d, n in enumerate(shape))


def _meet(a: int, b: int) -> bool:
    """Whether two lengths are equal. Raises :class:`RuleError` for symbolic ones that are and do not show it."""
    if a != b and int(a) == int(b) != 1:
        raise RuleError(f"the lengths {a} and {b} are equal, but not in all calls as far as can be seen")
    return a == b


def broadcast_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that tensors of these shapes broadcast to."""
    rank = max(map(len, shapes), default=0)
    padded = [(1,) * (rank - len(s)) + tuple(s) for s in shapes]
    return tuple(next((n for n in lengths if n != 1), 1) for lengths in zip(*padded, strict=True))


def wide_bytes(dtype: torch.dtype) -> int:
    """Bytes an element takes in sums: float32 at least."""
    return max(4, dtype.itemsize)

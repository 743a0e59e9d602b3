"""From factors to strategies: the one sentence of which every sharding rule is an instance.

Sharding factor f along one mesh axis gives: operands that have f → Shard, operands that lack it → Replicate,
results that have f → Shard, results that lack it → Partial. Beside the factors an op runs on whole values
(all Invariant, or all Replicate), and on summands of each operand in which it is linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from autoshard.errors import RuleError
from autoshard.layout import I, P, Partial, Placement, R, Shard
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node, Ref, refs
from autoshard.passes.rules.base import UNKNOWN, CollectivesOf, Facts, LocalFormOf, Rule

Dims = tuple[str | None, ...]
"""a factor per tensor dim; None: the dim must be whole"""


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
        """Once at most in every operand and result; booleans have no summands."""
        if max((dims.count(factor) for dims in self.inputs + self.outputs), default=0) != 1:
            return False
        if not isinstance(self.reduced.get(factor, P), Partial):
            return True
        lacking = [name for name, dims in zip(node.outputs, self.outputs, strict=True) if factor not in dims]
        return not any(graph.types[name].dtype == torch.bool for name in lacking)

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


def whole(inputs: int, outputs: int) -> tuple[Strategy, ...]:
    """The two strategies every op has: whole values, with whole gradients or with summands of gradients."""
    return Strategy("I", (I,) * inputs, (I,) * outputs), Strategy("R", (R,) * inputs, (R,) * outputs)


def _place(dims: Dims, factor: str, lacking: Placement) -> Placement:
    return Shard(dims.index(factor)) if factor in dims else lacking


def _can_be_summed(node: Node, graph: Graph, group: tuple[int, ...]) -> bool:
    """Whether summands of these operands make summands of the results: no booleans, no rounding to integers."""
    ins = [graph.types[node.inputs[i]].dtype for i in group]
    outs = [graph.types[name].dtype for name in node.outputs]
    if not ins or any(d == torch.bool for d in ins + outs):
        return False
    fractional = any(_is_fractional(d) for d in ins)
    return not fractional or all(_is_fractional(d) for d in outs)


def _is_fractional(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


FactorsOf = Callable[[Node, Graph], Factors]


def by_factors(
    names: str,
    factors: FactorsOf,
    local: LocalFormOf | None = None,
    notation: str = "",
    collectives: CollectivesOf | None = None,
    facts: Facts = UNKNOWN,
) -> list[Rule]:
    """Rules of several aten ops, as in ``"cat.default stack.default"``, from a function that finds the factors."""

    def strategies(node: Node, graph: Graph) -> tuple[Strategy, ...]:
        return factors(node, graph).strategies(node, graph)

    pairs = (name.split(".") for name in names.split())
    ops = [getattr(getattr(torch.ops.aten, packet), overload) for packet, overload in pairs]
    return [Rule(op, strategies, local, None, notation, collectives, facts=facts) for op in ops]


# What rules read of a node.


@cache
def tensor_arguments(op: torch._ops.OpOverload) -> tuple[str, ...]:
    """Names of the op's arguments that take tensors, in schema order."""
    return tuple(a.name for a in op._schema.arguments if "Tensor" in str(a.type))


def operands(node: Node) -> tuple[int, ...]:
    """Per entry of ``node.inputs``: the position of its argument among :func:`tensor_arguments`."""
    names = tensor_arguments(node.op)
    slots: list[int] = []
    named = [*zip((a.name for a in node.op._schema.arguments), node.args, strict=False), *node.kwargs.items()]
    for name, value in named:
        found = len(list(refs(value)))
        if found and name not in names:
            raise RuleError(f"{node.op}: argument {name!r} takes no tensor, got {value}")
        slots += [names.index(name)] * found if found else []
    return tuple(slots)


def argument(node: Node, name: str) -> Any:
    """The value of the op's argument ``name``, or its default."""
    for i, a in enumerate(node.op._schema.arguments):
        if a.name == name:
            if name in node.kwargs:
                return node.kwargs[name]
            return node.args[i] if i < len(node.args) else a.default_value
    raise RuleError(f"{node.op} has no argument {name!r}; it has {[a.name for a in node.op._schema.arguments]}")


def with_arguments(node: Node, **changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``(args, kwargs)`` of the node with some arguments replaced; a missing one is added by name."""
    args, kwargs = list(node.args), dict(node.kwargs)
    position = {a.name: i for i, a in enumerate(node.op._schema.arguments)}
    for name, value in changes.items():
        if name not in kwargs and position[name] < len(args):
            args[position[name]] = value
        else:
            kwargs[name] = value
    return tuple(args), kwargs


def shape_of(graph: Graph, value: Ref | str) -> tuple[int, ...]:
    """The global shape of a value."""
    return graph.types[value.name if isinstance(value, Ref) else value].shape


def input_shapes(node: Node, graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Global shapes of ``node.inputs``."""
    return tuple(graph.types[name].shape for name in node.inputs)


def output_shapes(node: Node, graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Global shapes of ``node.outputs``."""
    return tuple(graph.types[name].shape for name in node.outputs)


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

"""Abstract interpretation: values that are functions of indices, from ``arange`` and constants.

Two forms are tracked: integers that are linear in the indices (*Linear*), and values that are
constant along the diagonals of two dims, as attention masks are (*Stripes*).
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from autoshard.aten import aten
from autoshard.passes.ir.graph import Graph, Node, Ref
from autoshard.passes.ir.sizes import Size


class LinearIndex(NamedTuple):
    """start + Σ steps[d] · index[d]; a constant, of any dtype, if all steps are 0."""

    steps: tuple[int, ...]
    start: Any

    @property
    def is_constant(self) -> bool:
        return not any(self.steps)


class DiagonalBands(NamedTuple):
    """values[k] where ends[k-1] ≤ index[column] - index[row] < ends[k]: constant on diagonals."""

    rank: int
    row: int
    column: int
    ends: tuple[int, ...]
    values: tuple[Any, ...]

    def at(self, diagonal: int) -> Any:
        return self.values[bisect.bisect_right(self.ends, diagonal)]


IndexFunction = LinearIndex | DiagonalBands
_COMPARISONS = {name: getattr(operator, name) for name in ("le", "lt", "ge", "gt", "eq", "ne")}
_UNTAGGED_POINTWISE = {"__and__", "__or__", "where", "_to_copy"}
"""pointwise ops without torch's tag"""
_CONSTANT_FILLS = {"ones": 1, "zeros": 0, "new_ones": 1, "new_zeros": 0, "ones_like": 1, "zeros_like": 0}
_VALUE_COPIES = {"clone", "detach", "alias", "lift_fresh_copy", "expand_as"}


class PositionAnalysis:
    """Computes the form of each value of a graph, lazily; None: unknown."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.found: dict[str, IndexFunction | None] = {}

    def __call__(self, value: Any) -> IndexFunction | None:
        """The form of a value; numbers are constants."""
        if not isinstance(value, Ref):
            return (
                LinearIndex((), value)
                if isinstance(value, int | float | bool) and not isinstance(value, Size)
                else None
            )
        if value.name not in self.found:
            node = self.graph.producers.get(value.name)
            self.found[value.name] = None
            if node is not None and not self.graph.types[value.name].grad:
                known = self._of(node)
                self.found[value.name] = None if known is None else _simplified(known, self.graph.shape(value))
        return self.found[value.name]

    def _of(self, node: Node) -> IndexFunction | None:
        name = node.op._schema.name.removeprefix("aten::")
        if node.op.namespace != "aten" or len(node.outputs) != 1:
            return None
        if (rule := _INDEX_RULES.get(name)) is not None:
            return rule(self, node)
        if name in _VALUE_COPIES:
            return self(node.args[0])
        if name in _CONSTANT_FILLS:
            return self._filled(node, _CONSTANT_FILLS[name])
        if torch.Tag.pointwise in node.op.tags or name in _UNTAGGED_POINTWISE:
            return self._pointwise(node, name)
        return None

    def _filled(self, node: Node, value: Any) -> IndexFunction | None:
        if not isinstance(value, int | float | bool) or isinstance(value, Size):
            return None
        return self._constant(node, torch.tensor(value, dtype=self._dtype(node)).item())

    def _constant(self, node: Node, value: Any) -> LinearIndex:
        return LinearIndex((0,) * len(self._shape(node)), value)

    def _shape(self, node: Node) -> tuple[int, ...]:
        return self.graph.shape(node.outputs[0])

    def _dtype(self, node: Node) -> torch.dtype:
        return self.graph.types[node.outputs[0]].dtype

    # --- elementwise ---

    def _pointwise(self, node: Node, name: str) -> IndexFunction | None:
        if name in _COMPARISONS and (found := self._distance(node, name)) is not None:
            return found
        operands = {ref.name: self._broadcast(ref, node) for ref in map(Ref, node.inputs)}
        known = [k for k in operands.values() if k is not None]
        if not operands or len(known) < len(operands):
            return None
        if any(isinstance(k, LinearIndex) and not k.is_constant for k in known):
            return self._linear(node, name)
        stripes = [k for k in known if isinstance(k, DiagonalBands)]
        if not stripes:
            return self._constant(node, self._value(node, {n: k.start for n, k in operands.items()}))  # type: ignore[union-attr]
        first = stripes[0]
        if any((s.row, s.column) != (first.row, first.column) for s in stripes):
            return None
        ends = sorted({e for s in stripes for e in s.ends})
        values = []
        for diagonal in [ends[0] - 1, *ends]:
            here = {n: k.at(diagonal) if isinstance(k, DiagonalBands) else k.start for n, k in operands.items()}  # type: ignore[union-attr]
            values.append(self._value(node, here))
        return first._replace(ends=tuple(ends), values=tuple(values))

    def _value(self, node: Node, operands: dict[str, Any]) -> Any:
        """The op applied to one value per operand."""

        def scalar(x: Any) -> Any:
            return torch.tensor(operands[x.name], dtype=self.graph.types[x.name].dtype) if isinstance(x, Ref) else x

        args, kwargs = map(scalar, node.args), {k: scalar(v) for k, v in node.kwargs.items()}
        return node.op(*args, **kwargs).item()

    def _broadcast(self, ref: Ref, node: Node) -> IndexFunction | None:
        known, of, to = self(ref), self.graph.shape(ref), self._shape(node)
        if known is None:
            return None
        more = len(to) - len(of)
        if isinstance(known, LinearIndex):
            return LinearIndex((0,) * more + known.steps, known.start)
        row, column = known.row + more, known.column + more
        if (of[known.row], of[known.column]) != (to[row], to[column]):
            return None
        return known._replace(rank=len(to), row=row, column=column)

    def _linear(self, node: Node, name: str) -> IndexFunction | None:
        """Sums, multiples and comparisons of linear integers."""
        if name == "_to_copy" and self._dtype(node) not in (torch.bool, torch.float16, torch.bfloat16):
            known = self(node.args[0])
            exact = self._dtype(node).is_floating_point or (isinstance(known, LinearIndex) and _is_integral(known))
            return known if exact else None
        if name == "neg" and isinstance(inner := self(node.args[0]), LinearIndex):
            return LinearIndex(tuple(-s for s in inner.steps), -inner.start)
        if (
            len(node.args) != 2
            or set(node.kwargs) - {"alpha"}
            or not (name not in _COMPARISONS or self._is_whole(node))
        ):
            return None
        sides = [self._broadcast(x, node) if isinstance(x, Ref) else self(x) for x in node.args]
        rank = len(self._shape(node))
        a, b = (_pad_rank(s, rank) for s in sides)
        if a is None or b is None:
            return None
        if name in ("add", "sub"):
            alpha = node.kwargs.get("alpha", 1) * (1 if name == "add" else -1)
            return _add_linear(a, b, alpha) if isinstance(alpha, int) else None
        if name == "mul" and (a.is_constant or b.is_constant):
            factor, other = (a.start, b) if a.is_constant else (b.start, a)
            return LinearIndex(tuple(s * factor for s in other.steps), other.start * factor)
        if name not in _COMPARISONS:
            return None
        return _comparison_bands(
            _add_linear(a, b, -1), self._shape(node), lambda x: bool(_COMPARISONS[name](x, 0)), (0,)
        )

    def _distance(self, node: Node, name: str) -> IndexFunction | None:
        """A comparison of |difference| with a number, as in sliding windows; else None."""
        first, limit = (*node.args, None)[:2]
        made = self.graph.producers.get(first.name) if isinstance(first, Ref) else None
        if made is None or made.op is not aten.abs.default or not self._is_whole(node):
            return None
        inner, most = self(made.args[0]), self(limit)
        if not isinstance(inner, LinearIndex) or not isinstance(most, LinearIndex) or not most.is_constant:
            return None
        if len(inner.steps) != len(self._shape(node)) or self.graph.shape(first) != self._shape(node):
            return None
        number = most.start
        changes = (-number, number)
        return _comparison_bands(inner, self._shape(node), lambda x: bool(_COMPARISONS[name](abs(x), number)), changes)

    def _is_whole(self, node: Node) -> bool:
        """Whether all operands are integers."""
        types = [self.graph.types[n].dtype for n in node.inputs]
        return not any(t.is_floating_point or t.is_complex for t in types) and all(
            isinstance(x, Ref) or (isinstance(x, int) and not isinstance(x, Size)) for x in node.args
        )

    # --- factories and shapes ---

    def full(self, node: Node) -> IndexFunction | None:
        return self._filled(node, node.argument("fill_value"))

    def arange(self, node: Node) -> IndexFunction | None:
        start, step = node.argument("start", 0), node.argument("step", 1)
        half = self._dtype(node) in (torch.float16, torch.bfloat16)  # large integers are not exact
        if half or any(not isinstance(x, int) or isinstance(x, Size) for x in (start, step)):
            return None
        return LinearIndex((step,), start)

    def reshape(self, node: Node) -> IndexFunction | None:
        """A reshape that only adds or removes dims of length 1."""
        known, of, to = self(node.args[0]), self.graph.shape(node.args[0]), self._shape(node)
        before, after = ([d for d, n in enumerate(s) if not _is_one(n)] for s in (of, to))
        if known is None or [of[d] for d in before] != [to[d] for d in after]:
            return None
        return _with_moved_dims(known, dict(zip(before, after, strict=True)), len(to))

    def permute(self, node: Node) -> IndexFunction | None:
        known, rank = self(node.args[0]), len(self._shape(node))
        name = node.op._schema.name
        order = list(range(rank))
        if name == "aten::permute":
            order = [d % rank for d in node.args[1]]
        elif rank > 1:
            a, b = (0, 1) if name == "aten::t" else (d % rank for d in node.args[1:3])
            order[a], order[b] = order[b], order[a]
        return None if known is None else _with_moved_dims(known, {d: i for i, d in enumerate(order)}, rank)

    def expand(self, node: Node) -> IndexFunction | None:
        return self._broadcast(node.args[0], node)

    def slice(self, node: Node) -> IndexFunction | None:
        known, of = self(node.args[0]), self.graph.shape(node.args[0])
        dim, start, step = node.argument("dim") % len(of), node.argument("start") or 0, node.argument("step")
        if known is None or isinstance(start, Size) or (start < 0 and isinstance(of[dim], Size)):
            return None
        start = max(0, start + of[dim]) if start < 0 else start
        if isinstance(known, LinearIndex):
            steps = (*known.steps[:dim], known.steps[dim] * step, *known.steps[dim + 1 :])
            return LinearIndex(steps, known.start + known.steps[dim] * start if known.steps[dim] else known.start)
        if dim not in (known.row, known.column):
            return known
        shift = start if dim == known.row else -start
        return known._replace(ends=tuple(e + shift for e in known.ends)) if step == 1 else None

    def triangle(self, node: Node) -> IndexFunction | None:
        known, shape, diagonal = self(node.args[0]), self._shape(node), node.argument("diagonal")
        rank = len(shape)
        if isinstance(known, LinearIndex) and known.is_constant:
            known = DiagonalBands(rank, rank - 2, rank - 1, (), (known.start,))
        if not isinstance(known, DiagonalBands) or (known.row, known.column) != (rank - 2, rank - 1):
            return None
        if isinstance(diagonal, Size):
            return None
        lower = node.op._schema.name == "aten::tril"
        border = diagonal + 1 if lower else diagonal
        ends = sorted({*known.ends, border})
        values = [known.at(d) if (d < border) == lower else type(known.values[0])(0) for d in [ends[0] - 1, *ends]]
        return known._replace(ends=tuple(ends), values=tuple(values))

    def index(self, node: Node) -> IndexFunction | None:
        """A linear value indexed by linear values."""
        known, picked = (
            self(node.args[0]),
            [self._broadcast(x, node) if isinstance(x, Ref) else None for x in node.args[1]],
        )
        if not isinstance(known, LinearIndex) or len(picked) != len(known.steps) or None in picked:
            return None
        if known.is_constant:
            return self._constant(node, known.start)
        made = self._constant(node, known.start)
        for step, at in zip(known.steps, picked, strict=True):
            if not isinstance(at, LinearIndex) or at.start < 0 or min(at.steps, default=0) < 0:
                return None  # negative ones count from the end
            made = _add_linear(made, at, step)
        return made

    def cumsum(self, node: Node) -> IndexFunction | None:
        known, rank = self(node.args[0]), len(self._shape(node))
        if not isinstance(known, LinearIndex) or not known.is_constant or isinstance(known.start, float) or not rank:
            return None
        dim = node.argument("dim") % rank
        return LinearIndex(tuple(int(known.start) * (d == dim) for d in range(rank)), int(known.start))

    def diff(self, node: Node) -> IndexFunction | None:
        """The constant step, if a prepended value is one step before the first."""
        known, rank = self(node.args[0]), len(self._shape(node))
        prepend = node.argument("prepend")
        if not isinstance(known, LinearIndex) or node.argument("n") != 1 or node.argument("append") is not None:
            return None
        dim = node.argument("dim") % rank
        step = known.steps[dim]
        if prepend is not None:
            before, shape = self(prepend), self.graph.shape(prepend)
            if not isinstance(before, LinearIndex) or not _is_one(shape[dim]) or before.start != known.start - step:
                return None
            if any(a != b for d, (a, b) in enumerate(zip(known.steps, before.steps, strict=True)) if d != dim):
                return None
        return self._constant(node, step)


_INDEX_RULES: dict[str, Callable[[PositionAnalysis, Node], IndexFunction | None]] = {
    "full": PositionAnalysis.full,
    "full_like": PositionAnalysis.full,
    "new_full": PositionAnalysis.full,
    "arange": PositionAnalysis.arange,
    **dict.fromkeys(("reshape", "view", "unsqueeze", "squeeze"), PositionAnalysis.reshape),
    **dict.fromkeys(("permute", "transpose", "t"), PositionAnalysis.permute),
    "expand": PositionAnalysis.expand,
    "slice": PositionAnalysis.slice,
    **dict.fromkeys(("tril", "triu"), PositionAnalysis.triangle),
    "index": PositionAnalysis.index,
    "cumsum": PositionAnalysis.cumsum,
    "diff": PositionAnalysis.diff,
}


def _is_integral(known: LinearIndex) -> bool:
    return all(isinstance(x, int) for x in (*known.steps, known.start))


def _is_one(n: int) -> bool:
    return not isinstance(n, Size) and n == 1


def _simplified(known: IndexFunction, shape: Sequence[int]) -> IndexFunction:
    """Simplified: no steps along dims of length 1, equal or empty stripes merged."""
    if isinstance(known, LinearIndex):
        return LinearIndex(tuple(0 if _is_one(n) else s for s, n in zip(known.steps, shape, strict=True)), known.start)
    lengths = shape[known.row], shape[known.column]
    ends, values = list(known.ends), list(known.values)
    if not any(isinstance(n, Size) for n in lengths):
        while ends and ends[0] <= 1 - lengths[0]:
            del ends[0], values[0]
        while ends and ends[-1] >= lengths[1]:
            del ends[-1], values[-1]
    kept = [k for k, (a, b) in enumerate(itertools.pairwise(values)) if a != b]
    ends, values = [ends[k] for k in kept], [values[0], *(values[k + 1] for k in kept)]
    return known._replace(ends=tuple(ends), values=tuple(values)) if ends else LinearIndex((0,) * len(shape), values[0])


def _with_moved_dims(known: IndexFunction, places: dict[int, int], rank: int) -> IndexFunction | None:
    """With dim d at ``places[d]``; all other dims have length 1."""
    if isinstance(known, LinearIndex):
        steps = [0] * rank
        for d, place in places.items():
            steps[place] = known.steps[d]
        return LinearIndex(tuple(steps), known.start)
    if known.row not in places or known.column not in places:
        return None
    row, column = places[known.row], places[known.column]
    if row < column:
        return DiagonalBands(rank, row, column, known.ends, known.values)
    mirrored = tuple(1 - e for e in reversed(known.ends))
    return DiagonalBands(rank, column, row, mirrored, known.values[::-1])


def _pad_rank(known: IndexFunction | None, rank: int) -> LinearIndex | None:
    if not isinstance(known, LinearIndex):
        return None
    return LinearIndex((0,) * (rank - len(known.steps)) + known.steps, known.start)


def _add_linear(a: LinearIndex, b: LinearIndex, factor: int) -> LinearIndex:
    return LinearIndex(tuple(x + factor * y for x, y in zip(a.steps, b.steps, strict=True)), a.start + factor * b.start)


def _comparison_bands(
    linear: LinearIndex, shape: Sequence[int], holds: Callable[[int], bool], changes: Sequence[int]
) -> IndexFunction | None:
    """``holds`` of a linear integer; it changes only at, or one behind, the numbers ``changes``."""
    dims = [d for d, s in enumerate(linear.steps) if s]
    start, near = linear.start, [x + k for x in changes for k in (-1, 0, 1)]
    if not any(isinstance(shape[d], Size) for d in dims):
        far = [linear.steps[d] * (shape[d] - 1) for d in dims]
        low, high = start + sum(min(0, f) for f in far), start + sum(max(0, f) for f in far)
        found = {holds(max(low, min(high, x))) for x in (low, *near, high)}
        if len(found) == 1:
            return LinearIndex((0,) * len(shape), found.pop())
    if len(dims) != 2 or linear.steps[dims[0]] != -linear.steps[dims[1]]:
        return None
    row, column = dims
    step = linear.steps[column]
    ends = sorted({(x - start) // step + k for x in changes for k in (0, 1)})
    values = tuple(holds(start + step * d) for d in (ends[0] - 1, *ends))
    return DiagonalBands(len(shape), row, column, tuple(ends), values)

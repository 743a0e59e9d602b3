"""Abstract interpretation: values that are functions of indices, from ``arange`` and constants.
A value is tracked where it is piecewise affine in one linear form of the indices, as positions,
distances, causal masks and sliding windows are."""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from autoshard.aten import aten
from autoshard.passes.ir.graph import Graph, Node, Ref
from autoshard.passes.ir.patterns import op_name, permutation_of
from autoshard.passes.ir.sizes import Size

Piece = tuple[Any, Any]
"""(slope, offset): slope · L + offset"""


class IndexFunction(NamedTuple):
    """slope · L + offset where ends[k-1] ≤ L < ends[k], for L = Σ steps[d] · index[d].
    Steps have no common divisor, and the last is positive; a constant has none."""

    steps: tuple[int, ...]
    pieces: tuple[Piece, ...]
    ends: tuple[int, ...] = ()

    def at(self, form: int) -> Piece:
        """The piece at this value of L."""
        return self.pieces[bisect.bisect_right(self.ends, form)]

    @property
    def constant(self) -> Any:
        """The value, if it is the same everywhere, else None."""
        return None if any(self.steps) else self.pieces[0][1]

    @property
    def rates(self) -> tuple[Any, ...] | None:
        """What a step along each dim adds; None if there are several pieces."""
        return None if self.ends else tuple(self.pieces[0][0] * s for s in self.steps)

    @property
    def values(self) -> tuple[Any, ...] | None:
        """The constants of all pieces; None if one is no constant."""
        return None if any(slope for slope, _ in self.pieces) else tuple(offset for _, offset in self.pieces)

    @property
    def is_diagonal(self) -> bool:
        """Whether L is column - row, for the last two dims."""
        return len(self.steps) > 1 and self.steps == (*(0,) * (len(self.steps) - 2), -1, 1)


_COMPARISONS = {name: getattr(operator, name) for name in ("le", "lt", "ge", "gt", "eq", "ne")}
_UNTAGGED_POINTWISE = {"__and__", "__or__", "where", "_to_copy"}
"""pointwise ops without torch's tag"""
_CONSTANT_FILLS = {"ones": 1, "zeros": 0, "new_ones": 1, "new_zeros": 0, "ones_like": 1, "zeros_like": 0}
_VALUE_COPIES = {"clone", "detach", "alias", "lift_fresh_copy", "expand_as", "expand"}
_INEXACT = (torch.bool, torch.float16, torch.bfloat16)
"""dtypes in which large integers are not exact"""


class PositionAnalysis:
    """Computes the function of each value of a graph, lazily; None: unknown."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.found: dict[str, IndexFunction | None] = {}

    def __call__(self, value: Any) -> IndexFunction | None:
        """The function of a value; numbers are constants."""
        if not isinstance(value, Ref):
            return _constant(value, 0) if isinstance(value, int | float) and not isinstance(value, Size) else None
        if value.name not in self.found:
            node = self.graph.producers.get(value.name)
            self.found[value.name] = None
            if node is not None and not self.graph.types[value.name].grad:
                known = self._of(node)
                self.found[value.name] = None if known is None else _simplified(known, self.graph.shape(value))
        return self.found[value.name]

    def _of(self, node: Node) -> IndexFunction | None:
        name = op_name(node.op)
        if node.op.namespace != "aten" or len(node.outputs) != 1:
            return None
        if (rule := _INDEX_RULES.get(name)) is not None:
            return rule(self, node)
        if name in _VALUE_COPIES:
            return self._broadcast(node.args[0], node)
        if name in _CONSTANT_FILLS:
            return self._filled(node, _CONSTANT_FILLS[name])
        if torch.Tag.pointwise in node.op.tags or name in _UNTAGGED_POINTWISE:
            return self._pointwise(node, name)
        return None

    def _filled(self, node: Node, value: Any) -> IndexFunction | None:
        if not isinstance(value, int | float | bool) or isinstance(value, Size):
            return None
        return _constant(torch.tensor(value, dtype=self._dtype(node)).item(), len(self._shape(node)))

    def _shape(self, node: Node) -> tuple[int, ...]:
        return self.graph.shape(node.outputs[0])

    def _dtype(self, node: Node) -> torch.dtype:
        return self.graph.types[node.outputs[0]].dtype

    def _broadcast(self, value: Any, node: Node) -> IndexFunction | None:
        """The function of an operand, of the indices of the result."""
        known = self(value)
        more = len(self._shape(node)) - len(known.steps) if known is not None else 0
        return None if known is None else known._replace(steps=(0,) * more + known.steps)

    # --- elementwise ---

    def _pointwise(self, node: Node, name: str) -> IndexFunction | None:
        operands = {ref: self._broadcast(ref, node) for ref in map(Ref, node.inputs)}
        known = [k for k in operands.values() if k is not None]
        if not operands or len(known) < len(operands):
            return None
        forms = {k.steps for k in known if any(k.steps)}
        if all(k.values is not None for k in known) and len(forms) < 2:
            return _joined(known, lambda form: (0, self._value(node, operands, form)))
        sides = [self._broadcast(x, node) for x in node.args]
        if name == "_to_copy":
            numbers = itertools.chain(*known[0].pieces)
            exact = self._dtype(node).is_floating_point or all(isinstance(x, int) for x in numbers)
            return known[0] if exact and self._dtype(node) not in _INEXACT else None
        if name in ("neg", "abs"):
            return _scaled(known[0], -1) if name == "neg" else _by_sign(known[0], _absolute)
        if len(sides) != 2 or None in sides or set(node.kwargs) - {"alpha"}:
            return None
        a, b = sides
        if name in ("add", "sub"):
            alpha = node.kwargs.get("alpha", 1) * (1 if name == "add" else -1)
            return _sum(a, b, alpha) if isinstance(alpha, int) else None  # type: ignore[arg-type]
        if name == "mul" and None in (factors := [s.constant for s in sides]) != [None, None]:  # type: ignore[union-attr]
            return _scaled(b, factors[0]) if factors[1] is None else _scaled(a, factors[1])  # type: ignore[arg-type]
        if name in _COMPARISONS and self._is_whole(node):
            difference = _sum(a, b, -1)  # type: ignore[arg-type]
            return difference and _by_sign(difference, lambda piece, sign: (0, bool(_COMPARISONS[name](sign, 0))))
        return None

    def _value(self, node: Node, operands: dict[Ref, IndexFunction | None], form: int) -> Any:
        """The op applied to the values of its operands at one value of the form."""

        def scalar(x: Any) -> Any:
            known = operands[x] if isinstance(x, Ref) else None
            return x if known is None else torch.tensor(known.at(form)[1], dtype=self.graph.types[x.name].dtype)

        args, kwargs = map(scalar, node.args), {k: scalar(v) for k, v in node.kwargs.items()}
        return node.op(*args, **kwargs).item()

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
        whole = all(isinstance(x, int) and not isinstance(x, Size) for x in (start, step))
        return _linear((step,), start) if whole and self._dtype(node) not in _INEXACT else None

    def reshape(self, node: Node) -> IndexFunction | None:
        """A reshape that only adds or removes dims of length 1."""
        known, of, to = self(node.args[0]), self.graph.shape(node.args[0]), self._shape(node)
        before, after = ([d for d, n in enumerate(s) if not _is_one(n)] for s in (of, to))
        if known is None or [of[d] for d in before] != [to[d] for d in after]:
            return None
        places = dict(zip(after, before, strict=True))
        return _normal([known.steps[places[d]] if d in places else 0 for d in range(len(to))], known.pieces, known.ends)

    def permute(self, node: Node) -> IndexFunction | None:
        known, order = self(node.args[0]), permutation_of(node, self.graph) or ()
        return known and _normal([known.steps[d] for d in order], known.pieces, known.ends)

    def slice(self, node: Node) -> IndexFunction | None:
        known, of = self(node.args[0]), self.graph.shape(node.args[0])
        dim, start, step = node.argument("dim") % len(of), node.argument("start") or 0, node.argument("step")
        if known is None or isinstance(start, Size) or (start < 0 and isinstance(of[dim], Size)):
            return None
        start = max(0, start + of[dim]) if start < 0 else start
        return _picked(known, dim, start, step) if known.steps[dim] else known

    def triangle(self, node: Node) -> IndexFunction | None:
        known, diagonal, rank = self(node.args[0]), node.argument("diagonal"), len(self._shape(node))
        if known is None or isinstance(diagonal, Size) or not (known.is_diagonal or not any(known.steps)):
            return None
        lower = node.op is aten.tril.default
        border = diagonal + 1 if lower else diagonal
        steps, ends = (*(0,) * (rank - 2), -1, 1), sorted({*known.ends, border})
        zero = (0, type(known.pieces[0][1])(0))
        pieces = [known.at(d) if (d < border) == lower else zero for d in [ends[0] - 1, *ends]]
        return IndexFunction(steps, tuple(pieces), tuple(ends))

    def index(self, node: Node) -> IndexFunction | None:
        """A linear value indexed by linear values."""
        known, rank = self(node.args[0]), len(self._shape(node))
        picked = [self._broadcast(x, node) if isinstance(x, Ref) else None for x in node.args[1]]
        if known is None or known.rates is None or len(picked) != len(known.steps):
            return None
        made: IndexFunction | None = _constant(known.pieces[0][1], rank)
        for step, at in zip(known.rates, picked, strict=True):
            if at is None or at.rates is None or min(at.pieces[0][1], *at.rates, 0) < 0:
                return None  # negative ones count from the end
            made = made and _sum(made, at, step)
        return made

    def cumsum(self, node: Node) -> IndexFunction | None:
        known, rank = self(node.args[0]), len(self._shape(node))
        if known is None or known.constant is None or isinstance(known.constant, float) or not rank:
            return None
        dim, each = node.argument("dim") % rank, int(known.constant)
        return _linear([each * (d == dim) for d in range(rank)], each)

    def diff(self, node: Node) -> IndexFunction | None:
        """The constant step, if a prepended value is one step before the first."""
        known, rank, prepend = self(node.args[0]), len(self._shape(node)), node.argument("prepend")
        if known is None or known.rates is None or node.argument("n") != 1 or node.argument("append") is not None:
            return None
        dim, rates = node.argument("dim") % rank, known.rates
        if prepend is not None:
            before, shape = self(prepend), self.graph.shape(prepend)
            if before is None or before.rates is None or not _is_one(shape[dim]):
                return None
            if any(a != b for d, (a, b) in enumerate(zip(rates, before.rates, strict=True)) if d != dim):
                return None
            if before.pieces[0][1] != known.pieces[0][1] - rates[dim]:
                return None
        return _constant(rates[dim], rank)


_INDEX_RULES: dict[str, Callable[[PositionAnalysis, Node], IndexFunction | None]] = {
    **dict.fromkeys(("full", "full_like", "new_full"), PositionAnalysis.full),
    "arange": PositionAnalysis.arange,
    **dict.fromkeys(("reshape", "view", "unsqueeze", "squeeze"), PositionAnalysis.reshape),
    **dict.fromkeys(("permute", "transpose", "t"), PositionAnalysis.permute),
    "slice": PositionAnalysis.slice,
    **dict.fromkeys(("tril", "triu"), PositionAnalysis.triangle),
    "index": PositionAnalysis.index,
    "cumsum": PositionAnalysis.cumsum,
    "diff": PositionAnalysis.diff,
}


# --- functions of indices ---


def _is_one(n: int) -> bool:
    return not isinstance(n, Size) and n == 1


def _constant(value: Any, rank: int) -> IndexFunction:
    return IndexFunction((0,) * rank, ((0, value),))


def _linear(rates: Sequence[Any], start: Any) -> IndexFunction | None:
    """Σ rates[d] · index[d] + start."""
    return _normal(rates, ((1, start),), ())


def _normal(steps: Sequence[Any], pieces: Sequence[Piece], ends: Sequence[int]) -> IndexFunction | None:
    """The function of the form with these steps; None where they are no integers."""
    if any(s != int(s) for s in steps):
        return None
    whole = [int(s) for s in steps]
    by = math.gcd(*whole) * (-1 if next((s for s in reversed(whole) if s), 1) < 0 else 1)
    if not by:
        slope_offset = pieces[bisect.bisect_right(ends, 0)]
        return _constant(slope_offset[1], len(whole))
    ends, pieces = [-(-e // by) if by > 0 else e // by + 1 for e in ends], [(slope * by, x) for slope, x in pieces]
    if by < 0:
        ends, pieces = ends[::-1], pieces[::-1]
    return IndexFunction(tuple(s // by for s in whole), tuple(pieces), tuple(ends))


def _picked(known: IndexFunction, dim: int, start: int, step: int) -> IndexFunction | None:
    """Indices start + step · index of a dim."""
    shift, steps = known.steps[dim] * start, list(known.steps)
    steps[dim] *= step
    pieces = [(slope, offset + slope * shift if slope else offset) for slope, offset in known.pieces]
    return _normal(steps, pieces, [e - shift for e in known.ends])


def _joined(
    functions: Sequence[IndexFunction], piece: Callable[[int], Piece], more: Sequence[int] = ()
) -> IndexFunction:
    """A function of ``functions``' form; ``piece``: at a value of the form; ``more``: ends."""
    steps = next((k.steps for k in functions if any(k.steps)), functions[0].steps)
    ends = sorted({*more, *itertools.chain(*(k.ends for k in functions))})
    return IndexFunction(steps, tuple(piece(form) for form in [ends[0] - 1 if ends else 0, *ends]), tuple(ends))


def _scaled(known: IndexFunction, factor: Any) -> IndexFunction:
    return known._replace(pieces=tuple((slope and slope * factor, offset * factor) for slope, offset in known.pieces))


def _sum(a: IndexFunction, b: IndexFunction, factor: Any) -> IndexFunction | None:
    rank = max(len(a.steps), len(b.steps))
    a, b = (k._replace(steps=(0,) * (rank - len(k.steps)) + k.steps) for k in (a, b))
    if len({k.steps for k in (a, b) if any(k.steps)}) < 2:

        def piece(form: int) -> Piece:
            one, other = a.at(form), b.at(form)
            return one[0] + factor * other[0], one[1] + factor * other[1]

        return _joined((a, b), piece)
    if a.rates is None or b.rates is None:
        return None
    rates = [x + factor * y for x, y in zip(a.rates, b.rates, strict=True)]
    return _linear(rates, a.pieces[0][1] + factor * b.pieces[0][1])


def _by_sign(known: IndexFunction, piece: Callable[[Piece, int], Piece]) -> IndexFunction:
    """``piece`` of the pieces of ``known`` and the signs of their values."""

    def at(form: int) -> Piece:
        slope, offset = known.at(form)
        value = slope * form + offset
        return piece((slope, offset), (value > 0) - (value < 0))

    # The form at which a value is 0, and the one behind.
    roots = [(-(offset // slope), -offset // slope + 1) for slope, offset in known.pieces if slope]
    return _joined((known,), at, [int(end) for pair in roots for end in pair])


def _absolute(piece: Piece, sign: int) -> Piece:
    return (-piece[0], -piece[1]) if sign < 0 else piece


def _simplified(known: IndexFunction, shape: Sequence[int]) -> IndexFunction | None:
    """Simplified: no steps along dims of length 1, equal or empty pieces merged."""
    steps = [0 if _is_one(n) else s for s, n in zip(known.steps, shape, strict=True)]
    moved = _normal(steps, known.pieces, known.ends)
    if moved is None or not moved.ends:
        return moved
    along = [(s, n) for s, n in zip(moved.steps, shape, strict=True) if s]
    ends, pieces = list(moved.ends), list(moved.pieces)
    if not any(isinstance(n, Size) for _, n in along):
        low, high = (sum(pick(0, s * (n - 1)) for s, n in along) for pick in (min, max))
        while ends and ends[0] <= low:
            del ends[0], pieces[0]
        while ends and ends[-1] > high:
            del ends[-1], pieces[-1]
    kept = [k for k, (a, b) in enumerate(itertools.pairwise(pieces)) if a != b]
    ends, pieces = [ends[k] for k in kept], [pieces[0], *(pieces[k + 1] for k in kept)]
    if not ends and not pieces[0][0]:
        return _constant(pieces[0][1], len(shape))
    return moved._replace(pieces=tuple(pieces), ends=tuple(ends))

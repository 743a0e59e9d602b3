"""Dynamic lengths of inputs (export's backed symbols): requested, named and translated."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import sympy  # type: ignore[import-untyped,unused-ignore]
import torch
from torch.export import Dim, ShapesCollection

from autoshard.errors import CaptureError, HintError, PlanError, RuleError
from autoshard.passes.ir.graph import Symbol, Symbols
from autoshard.passes.ir.names import TAKEN, identifier
from autoshard.passes.ir.names import is_plain as is_plain_name
from autoshard.passes.ir.sizes import Size, is_sure, size, symbol
from autoshard.passes.ir.symbols import conditions, is_plain

Dynamic = bool | Mapping[str, Mapping[int, str]]
"""True: all lengths of all inputs; or input → dim → name, or a multiple such as ``"4*batch"``"""

T = TypeVar("T")

_DECLARED = re.compile(r"\s*(?:(\d+)\s*\*\s*)?(\w+)\s*")


_COMMON = ("batch", "seq")
"""default names of the first dims"""


@dataclass(frozen=True)
class Open:
    """A tensor of the example and its dynamic dims."""

    path: str
    """argument name, such as ``labels`` or ``args[0]``"""
    tensor: torch.Tensor
    dims: Mapping[int, tuple[int, str]]
    """dim → (multiple, name); the name is "" if the user gave none"""


def fixed_if_refused(dynamic: Dynamic, do: Callable[[Dynamic], T]) -> T:
    """``do(dynamic)``; if that is refused, ``do(False)`` (the example's lengths) and a warning."""
    if dynamic:
        try:
            return do(dynamic)
        except (CaptureError, PlanError, RuleError) as error:
            logging.getLogger("autoshard").warning(
                "no program with symbolic lengths, compiling for these shapes alone: %s", error
            )
    return do(False)


def opened(tensors: Mapping[str, torch.Tensor], dynamic: Dynamic) -> dict[str, Open]:
    """Argument → tensor of the example and its dynamic dims. Raises :class:`HintError`."""
    if not isinstance(dynamic, Mapping):
        return {path: Open(path, x, dict.fromkeys(range(x.ndim), (1, ""))) for path, x in tensors.items()}
    for path, dims in dynamic.items():
        if path not in tensors:
            raise HintError(f"dynamic: there is no tensor argument {path!r}; there are {', '.join(tensors)}")
        if not isinstance(dims, Mapping):
            raise HintError(f"dynamic: {path!r} is {dims!r}: give {{dim: name}}, such as {{0: 'batch'}}")
        if wrong := [d for d in dims if not isinstance(d, int) or not 0 <= d < tensors[path].ndim]:
            raise HintError(f"dynamic: {path!r} has {tensors[path].ndim} dims, no dim {wrong[0]!r}")
    return {
        path: Open(path, x, {d: _declared(path, d, text) for d, text in dynamic.get(path, {}).items()})
        for path, x in tensors.items()
    }


def _declared(path: str, dim: int, text: str) -> tuple[int, str]:
    found = _DECLARED.fullmatch(str(text))
    if found is None or not is_plain_name(found[2]) or found[2] in TAKEN or found[1] == "0":
        raise HintError(f"dynamic: {path!r}, dim {dim}: {text!r} is neither a name nor a multiple such as '4*batch'")
    return int(found[1] or 1), found[2]


def shapes_for_export(inputs: Iterable[Open]) -> ShapesCollection:
    """``dynamic_shapes`` for ``torch.export``: dims that it may keep dynamic."""
    shapes = ShapesCollection()
    for x in inputs:
        shapes[x.tensor] = {d: Dim.AUTO if d in x.dims else Dim.STATIC for d in range(x.tensor.ndim)}
    return shapes


class Lengths:
    """Export's symbols as expressions of our own symbols.

    Equal lengths at the same dim of two inputs share one symbol unless the user names them: ids and
    labels have one batch. A call with different lengths there is compiled separately.
    """

    def __init__(self, inputs: Mapping[str, tuple[Open, torch.Tensor]]) -> None:
        """``inputs``: name in the graph → (the example's tensor, export's fake tensor)."""
        self.meaning: dict[sympy.Symbol, sympy.Expr] = {}
        self.example: dict[sympy.Symbol, int] = {}
        self.read: list[Symbol] = []
        self.fixed: list[str] = []
        self._by_place: dict[Any, sympy.Symbol] = {}
        self._arguments = {re.match(r"\w*", x.path)[0] for x, _ in inputs.values()}  # type: ignore[index]
        lengths: list[Any] = [n for _, fake in inputs.values() for n in fake.shape]
        self._environment = next((n.node.shape_env for n in lengths if _expr(n) is not None), None)
        for theirs, ours in _constants(self._environment):
            self.meaning[theirs] = ours
        for name, (x, fake) in inputs.items():
            for dim, n in enumerate(fake.shape):
                self._meet(name, x, dim, n)
        for name, (_, fake) in inputs.items():
            for dim, n in enumerate(fake.shape):
                self._solve(name, dim, n)
        self._simpler = dict(self._equalities())

    def _meet(self, name: str, x: Open, dim: int, n: Any) -> None:
        """Name the symbol of a dim's length."""
        expr = _expr(n)
        if expr is None or not self._known(expr).free_symbols:
            if dim in x.dims:
                why = (
                    "no other length follows from an example of 0 or 1"
                    if x.tensor.shape[dim] < 2
                    else "fixed by the model"
                )
                self.fixed.append(f"{x.path} dim {dim} = {x.tensor.shape[dim]} ({why})")
            return
        if expr in self.meaning or not expr.is_Symbol:
            return
        multiple, wanted = x.dims[dim]
        length = x.tensor.shape[dim]
        if length % multiple:  # the example breaks the promise: allow any length
            multiple = 1
        place = wanted or (dim, length)
        if place not in self._by_place:
            own = symbol(wanted or self._fresh(_COMMON[dim] if dim < 2 else f"{x.path}_{dim}"))
            self._by_place[place] = own
            self.example[own] = length // multiple
            self.read.append(Symbol(str(own), name, dim, multiple))
        own = self._by_place[place]
        if self.example[own] * multiple != length:
            raise CaptureError(f"dynamic: {x.path!r}, dim {dim} is {length} in the example, and {own} elsewhere "
                               f"is {self.example[own]}")  # fmt: skip
        self.meaning[expr] = multiple * own

    def _equalities(self) -> Iterator[tuple[sympy.Expr, sympy.Expr]]:
        """(replaced, replacement): lengths that guards make equal, the simpler one second."""
        for guard in self._environment.guards if self._environment is not None else ():
            if isinstance(guard.expr, sympy.Eq) and guard.expr.free_symbols <= self.meaning.keys():
                sides = sorted(map(self._ours, guard.expr.args), key=sympy.count_ops)
                if sides[0] != sides[1] and not sides[1].is_Integer:
                    yield sides[1], sides[0]

    def _known(self, expr: Any) -> Any:
        return expr.xreplace(self.meaning)

    def _fresh(self, wanted: str) -> str:
        stem, number = identifier(wanted), 1
        name = stem
        while name in self._arguments or any(str(s) == name for s in self.example):
            number += 1
            name = f"{stem}_{number}"
        return name

    def _solve(self, name: str, dim: int, n: Any) -> None:
        """Solve for export's s: if the model requires an even length, export writes it as 2·s."""
        expr = _expr(n)
        unknown = [s for s in expr.free_symbols if s not in self.meaning] if expr is not None else []
        if expr is None or not unknown:
            return
        factor, offset = expr.coeff(unknown[0]), expr.subs(unknown[0], 0)
        if len(expr.free_symbols) != 1 or not (factor.is_Integer and factor > 0 and offset.is_Integer):
            raise CaptureError(f"dynamic: dim {dim} of an input is {expr}, which no length can be read from")
        own = symbol(self._fresh(f"{_COMMON[dim] if dim < 2 else f'size_{dim}'}_part"))
        hint = int(n.node.shape_env.backed_var_to_val[unknown[0]])
        self.meaning[unknown[0]], self.example[own] = own, hint
        self.read.append(Symbol(str(own), name, dim, int(factor), int(offset)))

    def of(self, n: Any) -> int:
        """A length of a traced tensor or graph number as an int or a :class:`Size`."""
        expr = _expr(n)
        if expr is None:
            return int(n)
        ours = self._ours(expr)
        found = size(self._simpler.get(ours, ours), self.example)
        if isinstance(found, Size) and not is_plain(str(found), self.read):
            raise CaptureError(f"dynamic: the length {expr} is more than Python's own arithmetic on lengths")
        return found

    def _ours(self, expr: Any) -> Any:
        if missing := [s for s in expr.free_symbols if s not in self.meaning]:
            raise CaptureError(f"dynamic: the length {expr} depends on {missing[0]}, which is no length of an input")
        return expr.xreplace(self.meaning)

    def symbols(self) -> Symbols:
        """The symbols, and the conditions under which the graph is valid."""
        return Symbols(tuple(self.read), conditions(self._demanded(), self.read), tuple(self.fixed))

    def _demanded(self) -> Iterator[sympy.Basic]:
        if self._environment is None:
            return
        ranges = self._environment.var_to_range
        for theirs, ours in self.meaning.items():
            if ours.is_Integer:
                continue
            low, high = ranges[theirs].lower, ranges[theirs].upper
            if low.is_Integer and not is_sure(ours, low):
                yield sympy.Ge(ours, low)
            if high.is_Integer:
                yield sympy.Le(ours, high)
        asserted = [a for many in self._environment.deferred_runtime_asserts.values() for a in many]
        for guard in (*self._environment.guards, *asserted):
            expr = self._environment.simplify(guard.expr)
            if expr.free_symbols <= self.meaning.keys():
                yield self._ours(expr)


def _constants(environment: Any) -> Iterator[tuple[sympy.Symbol, sympy.Integer]]:
    """(symbol, value) of export's symbols that guards fix and export did not substitute."""
    for guard in environment.guards if environment is not None else ():
        if isinstance(guard.expr, sympy.Eq) and guard.expr.lhs.is_Symbol and guard.expr.rhs.is_Integer:
            yield guard.expr.lhs, guard.expr.rhs


def _expr(n: Any) -> Any:
    """The expression of a dynamic length, else None."""
    if not isinstance(n, torch.SymInt):
        return None
    return n.node.expr if n.node.expr.free_symbols else None

"""Symbolic sizes: ints with a sympy expression of the input lengths.

A :class:`Size` is the int of the example, which costs and choices read. Its sympy expression of
dynamic lengths is what generated code computes; arithmetic keeps both. Equality compares both:
``Size(8, batch) == 8`` is False, and so is ``batch % 2 == 0`` while nothing is known of ``batch``.
A comparison that the expressions leave open is decided as in the example, and recorded as a
condition of the program (:func:`noting`).
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import sympy  # type: ignore[import-untyped,unused-ignore]
from torch.utils._sympy.functions import FloorDiv, PythonMod
from torch.utils._sympy.printers import PythonPrinter

from autoshard.passes.ir.walk import walk

ENDLESS = 2**62
"""a slice end of at least this value means the end of the dim"""

_noted: ContextVar[dict[sympy.Basic, None] | None] = ContextVar("noted", default=None)


@contextmanager
def noting() -> Iterator[dict[sympy.Basic, None]]:
    """Collect the conditions (guards) under which comparisons inside the block hold."""
    found: dict[sympy.Basic, None] = {}
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


def _note(condition: sympy.Basic) -> None:
    found = _noted.get()
    if found is not None:
        found[condition] = None


def symbol(name: str) -> sympy.Symbol:
    """The sympy symbol of a dynamic length: an integer ≥ 1."""
    return sympy.Symbol(name, integer=True, positive=True)


class Size(int):
    """A symbolic length: its int in the example, and its expression, as which it prints."""

    expr: sympy.Expr
    example: Mapping[sympy.Symbol, int]
    """symbol → value in the example"""

    def __new__(cls, value: int, expr: sympy.Expr, example: Mapping[sympy.Symbol, int]) -> Size:
        self = super().__new__(cls, value)
        self.expr, self.example = expr, example
        return self

    def __getnewargs__(self) -> Any:
        return int(self), self.expr, self.example

    def __repr__(self) -> str:
        return text_of(self.expr)

    __str__ = __repr__

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and int.__eq__(self, other) and _same(self.expr, expression(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return not _same(self.expr, sympy.S.Zero)

    def __lt__(self, other: int) -> bool:
        return _is_more(other, self)

    def __gt__(self, other: int) -> bool:
        return _is_more(self, other)

    def __le__(self, other: int) -> bool:
        return not _is_more(self, other)

    def __ge__(self, other: int) -> bool:
        return not _is_more(other, self)

    def __neg__(self) -> int:
        return size(-self.expr, self.example)

    def __float__(self) -> float:
        _note(sympy.Eq(self.expr, int(self)))
        return float(int(self))

    def __truediv__(self, other: Any) -> float:
        return float(self) / float(other)

    def __rtruediv__(self, other: Any) -> float:
        return float(other) / float(self)

    def __add__(self, other: Any) -> Any:
        return _computed(self, other, sympy.Add)

    def __sub__(self, other: Any) -> Any:
        return _computed(self, other, operator.sub)

    def __rsub__(self, other: Any) -> Any:
        return _computed(self, other, operator.sub, turned=True)

    def __mul__(self, other: Any) -> Any:
        return _computed(self, other, sympy.Mul)

    def __floordiv__(self, other: Any) -> Any:
        return _computed(self, other, FloorDiv)

    def __rfloordiv__(self, other: Any) -> Any:
        return _computed(self, other, FloorDiv, turned=True)

    def __mod__(self, other: Any) -> Any:
        return _computed(self, other, PythonMod)

    def __rmod__(self, other: Any) -> Any:
        return _computed(self, other, PythonMod, turned=True)

    __radd__, __rmul__ = __add__, __mul__


def size(expr: sympy.Expr, example: Mapping[sympy.Symbol, int]) -> int:
    """The length ``expr``: a :class:`Size`, or an int where ``expr`` is a number."""
    return int(expr) if expr.is_number else Size(_value(expr, tuple(example.items())), expr, example)


def expression(n: int) -> sympy.Expr:
    """A length as a sympy expression."""
    return n.expr if isinstance(n, Size) else sympy.Integer(n)


def gcd(a: int, b: int) -> int:
    """The greatest common divisor of ``a`` and ``b`` that holds in every call."""
    symbolic = next((n for n in (a, b) if isinstance(n, Size)), None)
    if symbolic is None:
        return math.gcd(a, b)
    return size(sympy.gcd(expression(a), expression(b)), symbolic.example)


def reaches(end: int, n: int) -> bool:
    """Whether ``end`` ≥ ``n`` is certain in every call."""
    return int(end) >= ENDLESS or is_sure(expression(end), expression(n))


def is_sure(a: sympy.Expr, least: sympy.Expr) -> bool:
    """Whether ``a`` ≥ ``least`` is certain for all symbols ≥ 1."""
    return _sign(a, least) in ("+", "0", "0+")


def _computed(a: Size, b: Any, compute: Callable[[sympy.Expr, sympy.Expr], sympy.Expr], turned: bool = False) -> Any:
    """``compute(a, b)``; ``turned``: ``compute(b, a)``."""
    if isinstance(b, float):
        _note(sympy.Eq(a.expr, int(a)))
    if not isinstance(b, int):
        return NotImplemented
    sides = (expression(b), a.expr) if turned else (a.expr, expression(b))
    return size(_apply(compute, *sides), a.example)


def _is_more(a: int, b: int) -> bool:
    """``a > b``; where the expressions leave it open, decided as in the example and recorded."""
    if max(int(a), int(b)) >= ENDLESS:
        return int(a) > int(b)
    left, right = expression(a), expression(b)
    sign = _sign(left, right)
    if sign in ("+", "-", "0", "0-"):
        return sign == "+"
    more = int(a) > int(b)
    _note(sympy.Gt(left, right) if more else sympy.Le(left, right))
    return more


# --- cached, because sympy is slow and models repeat the same questions ---


@lru_cache(maxsize=1 << 14)
def _apply(compute: Callable[[sympy.Expr, sympy.Expr], sympy.Expr], a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    return compute(a, b)


@lru_cache(maxsize=1 << 14)
def _same(a: sympy.Expr, b: sympy.Expr) -> bool:
    return bool(a == b or sympy.expand(a - b) == 0)


@lru_cache(maxsize=1 << 14)
def _value(expr: sympy.Expr, example: tuple[tuple[sympy.Symbol, int], ...]) -> int:
    return int(expr.xreplace({s: sympy.Integer(n) for s, n in example}))


@lru_cache(maxsize=1 << 14)
def _sign(a: sympy.Expr, b: sympy.Expr) -> str:
    """The sign of ``a - b`` for all symbols ≥ 1: "+", "-", "0", "0+", "0-", or "": unknown.

    A polynomial in (symbol - 1) ≥ 0 has the sign of its coefficients, if all have the same.
    """
    difference = sympy.expand(a - b)
    shifted = sympy.expand(difference.xreplace({s: s + 1 for s in difference.free_symbols}))
    terms = shifted.as_coefficients_dict()
    if not all(term.is_number or term.is_polynomial(*term.free_symbols) for term in terms):
        return ""
    constant = shifted.as_coeff_Add()[0]
    if all(c >= 0 for c in terms.values()):
        return "+" if constant > 0 else "0+" if terms != {} and shifted != 0 else "0"
    if all(c <= 0 for c in terms.values()):
        return "-" if constant < 0 else "0-"
    return ""


class _Printer(PythonPrinter):
    """Prints Python as ruff format spaces it: positive terms first, a number last."""

    def _print_Add(self, expr: sympy.Add, order: str | None = None) -> str:  # noqa: N802  sympy looks for it
        number, rest = expr.as_coeff_Add()
        terms = sorted(sympy.Add.make_args(rest), key=lambda t: (bool(t.as_coeff_Mul()[0] < 0), str(t)))
        text = ""
        for term in [*terms, *([number] if number else [])]:
            negative = term.as_coeff_Mul()[0] < 0
            sign = (" - " if negative else " + ") if text else ("-" if negative else "")
            text += sign + self.parenthesize(-term if negative else term, 40)
        return text

    def _print_Mul(self, expr: sympy.Mul) -> str:  # noqa: N802  sympy looks for it
        number, rest = expr.as_coeff_Mul()
        factors = [self.parenthesize(f, 50) for f in sympy.Mul.make_args(rest)]
        if abs(number) != 1:
            factors.insert(0, str(abs(number)))
        return ("-" if number < 0 else "") + " * ".join(factors)

    def _print_Pow(self, expr: sympy.Pow) -> str:  # noqa: N802  sympy looks for it
        return f"{self.parenthesize(expr.base, 70)}**{self.parenthesize(expr.exp, 70)}"

    def _print_FloorDiv(self, expr: sympy.Expr) -> str:  # noqa: N802  sympy looks for it
        return " // ".join(self.parenthesize(x, 60) for x in expr.args)

    def _print_PythonMod(self, expr: sympy.Expr) -> str:  # noqa: N802  sympy looks for it
        return " % ".join(self.parenthesize(x, 60) for x in expr.args)

    _print_Mod = _print_PythonMod  # noqa: N815


@lru_cache(maxsize=1 << 14)
def text_of(expr: sympy.Basic) -> str:
    """An expression or a condition as Python."""
    return str(_Printer().doprint(expr))


def free_symbols(tree: Any) -> set[str]:
    """Names of the symbols in nested arguments and calls, global sizes of locals included."""
    lengths = (getattr(item, "size", item) for item in walk(tree))
    return {str(s) for n in lengths if isinstance(n, Size) for s in n.expr.free_symbols}


def is_compound(text: str) -> bool:
    """Whether an expression needs parentheses as an operand."""
    return not re.fullmatch(r"\w+(\([^()]*\))?", text)

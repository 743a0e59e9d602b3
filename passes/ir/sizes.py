"""Symbolic sizes: ints with a sympy expression, and the conditions a program needs of a call.
A :class:`Size` is the int of the example, which costs and choices read, with a sympy expression
of the input lengths that may differ between calls, which generated code computes. Arithmetic
keeps both. Equality compares both: ``Size(8, batch) == 8`` is False, because it need not hold in
another call, and ``batch % 2 == 0`` is False while nothing is known about ``batch``. A comparison
that the expressions leave open is decided as in the example, and recorded as a condition of the
program (:func:`noting`), which each call checks."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from typing import Any

import sympy  # type: ignore[import-untyped,unused-ignore]

from autoshard.errors import CaptureError
from autoshard.passes.ir.graph import Symbol, Symbols, TensorType, walk
from autoshard.torch_private.symbolic import FloorDiv, PythonMod, PythonPrinter

ENDLESS = 2**62
"""a slice end of at least this value means the end of the dim"""

_open_conditions: ContextVar[dict[sympy.Basic, None] | None] = ContextVar("noted", default=None)


@contextmanager
def record_conditions() -> Iterator[dict[sympy.Basic, None]]:
    """Collect the conditions (guards) under which comparisons inside the block hold."""
    found: dict[sympy.Basic, None] = {}
    token = _open_conditions.set(found)
    try:
        yield found
    finally:
        _open_conditions.reset(token)


def _record_condition(condition: sympy.Basic) -> None:
    found = _open_conditions.get()
    if found is not None:
        found[condition] = None


def length_symbol(name: str) -> sympy.Symbol:
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
        return python_text(self.expr)

    __str__ = __repr__

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, int)
            and int.__eq__(self, other)
            and _are_equal_expressions(self.expr, sympy_expression(other))
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return not _are_equal_expressions(self.expr, sympy.S.Zero)

    def __lt__(self, other: int) -> bool:
        return _is_greater(other, self)

    def __gt__(self, other: int) -> bool:
        return _is_greater(self, other)

    def __le__(self, other: int) -> bool:
        return not _is_greater(self, other)

    def __ge__(self, other: int) -> bool:
        return not _is_greater(other, self)

    def __neg__(self) -> int:
        return make_size(-self.expr, self.example)

    def __float__(self) -> float:
        _record_condition(sympy.Eq(self.expr, int(self)))
        return float(int(self))

    def __truediv__(self, other: Any) -> float:
        return float(self) / float(other)

    def __rtruediv__(self, other: Any) -> float:
        return float(other) / float(self)

    def __add__(self, other: Any) -> Any:
        return _symbolic_result(self, other, sympy.Add)

    def __sub__(self, other: Any) -> Any:
        return _symbolic_result(self, other, operator.sub)

    def __rsub__(self, other: Any) -> Any:
        return _symbolic_result(self, other, operator.sub, reflected=True)

    def __mul__(self, other: Any) -> Any:
        return _symbolic_result(self, other, sympy.Mul)

    def __floordiv__(self, other: Any) -> Any:
        return _symbolic_result(self, other, FloorDiv)

    def __rfloordiv__(self, other: Any) -> Any:
        return _symbolic_result(self, other, FloorDiv, reflected=True)

    def __mod__(self, other: Any) -> Any:
        return _symbolic_result(self, other, PythonMod)

    def __rmod__(self, other: Any) -> Any:
        return _symbolic_result(self, other, PythonMod, reflected=True)

    __radd__, __rmul__ = __add__, __mul__


def make_size(expr: sympy.Expr, example: Mapping[sympy.Symbol, int]) -> int:
    """The length ``expr``: a :class:`Size`, or an int where ``expr`` is a number."""
    return int(expr) if expr.is_number else Size(_example_value(expr, tuple(example.items())), expr, example)


def sympy_expression(n: int) -> sympy.Expr:
    return n.expr if isinstance(n, Size) else sympy.Integer(n)


def gcd(a: int, b: int) -> int:
    """The greatest common divisor of ``a`` and ``b`` that holds in every call."""
    symbolic = next((n for n in (a, b) if isinstance(n, Size)), None)
    if symbolic is None:
        return math.gcd(a, b)
    return make_size(sympy.gcd(sympy_expression(a), sympy_expression(b)), symbolic.example)


def always_reaches(end: int, n: int) -> bool:
    """Whether ``end`` ≥ ``n`` is certain in every call."""
    return int(end) >= ENDLESS or is_always_at_least(sympy_expression(end), sympy_expression(n))


def is_always_at_least(a: sympy.Expr, least: sympy.Expr) -> bool:
    """Whether ``a`` ≥ ``least`` is certain for all symbols ≥ 1."""
    return _sign_of_difference(a, least) in ("+", "0", "0+")


def _symbolic_result(
    a: Size, b: Any, compute: Callable[[sympy.Expr, sympy.Expr], sympy.Expr], reflected: bool = False
) -> Any:
    if isinstance(b, float):
        _record_condition(sympy.Eq(a.expr, int(a)))
    if not isinstance(b, int):
        return NotImplemented
    sides = (sympy_expression(b), a.expr) if reflected else (a.expr, sympy_expression(b))
    return make_size(_apply_cached(compute, *sides), a.example)


def _is_greater(a: int, b: int) -> bool:
    """``a > b``; where the expressions leave it open, decided as in the example and recorded."""
    if max(int(a), int(b)) >= ENDLESS:
        return int(a) > int(b)
    left, right = sympy_expression(a), sympy_expression(b)
    sign = _sign_of_difference(left, right)
    if sign in ("+", "-", "0", "0-"):
        return sign == "+"
    more = int(a) > int(b)
    _record_condition(sympy.Gt(left, right) if more else sympy.Le(left, right))
    return more


# --- cached, because sympy is slow and models repeat the same questions ---


@lru_cache(maxsize=1 << 14)
def _apply_cached(compute: Callable[[sympy.Expr, sympy.Expr], sympy.Expr], a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    return compute(a, b)


@lru_cache(maxsize=1 << 14)
def _are_equal_expressions(a: sympy.Expr, b: sympy.Expr) -> bool:
    return bool(a == b or sympy.expand(a - b) == 0)


@lru_cache(maxsize=1 << 14)
def _example_value(expr: sympy.Expr, example: tuple[tuple[sympy.Symbol, int], ...]) -> int:
    return int(expr.xreplace({s: sympy.Integer(n) for s, n in example}))


@lru_cache(maxsize=1 << 14)
def _sign_of_difference(a: sympy.Expr, b: sympy.Expr) -> str:
    """The sign of ``a - b`` for all symbols ≥ 1: "+", "-", "0", "0+", "0-", or "": unknown. A
    polynomial in (symbol - 1) ≥ 0 has the sign that all its coefficients have."""
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


class _SizePrinter(PythonPrinter):
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
def python_text(expr: sympy.Basic) -> str:
    """An expression or a condition as Python."""
    return str(_SizePrinter().doprint(expr))


def free_symbols(tree: Any) -> set[str]:
    """Names of the symbols in nested arguments and calls, global sizes of locals included."""
    lengths = (getattr(item, "size", item) for item in walk(tree))
    return {str(s) for n in lengths if isinstance(n, Size) for s in n.expr.free_symbols}


def is_compound(text: str) -> bool:
    """Whether an expression needs parentheses as an operand."""
    return not re.fullmatch(r"\w+(\([^()]*\))?", text)


_SAFE_BUILTINS = {"max": max, "min": min}


def add_conditions(symbols: Symbols, noted: Iterable[sympy.Basic]) -> Symbols:
    """``symbols`` with further conditions, which lowering recorded; implied ones are left out."""
    least = {length_symbol(s.name): 2 if f"{s.name} >= 2" in symbols.conditions else 1 for s in symbols.read}
    shift = {s: s + (n - 1) for s, n in least.items()}
    open_ = [
        c
        for c in noted
        if not (isinstance(c, sympy.Gt) and is_always_at_least(c.lhs.xreplace(shift), c.rhs.xreplace(shift) + 1))
    ]
    return replace(symbols, conditions=(*symbols.conditions, *condition_texts(open_, symbols.read)))


def shape_mismatch(types: Mapping[str, TensorType], symbols: Symbols, shapes: Mapping[str, Sequence[int]]) -> str:
    """Why a program does not fit inputs of these ``shapes`` (by input name); "" if it does."""
    values = solve_symbols(symbols, shapes)
    for s in symbols.read:
        if s.name not in values:
            return f"dim {s.dim} of {s.value} is {shapes[s.value][s.dim]}, not a multiple of {s.factor}"
    for name, shape in shapes.items():
        for dim, (n, length) in enumerate(zip(types[name].shape, shape, strict=True)):
            if evaluate_length(n, values) != length:
                return f"dim {dim} of {name} is {length}, not {n}"
    known = ", ".join(f"{name} = {n}" for name, n in values.items())
    return next((f"{c} does not hold for {known}" for c in symbols.conditions if not _evaluate_text(c, values)), "")


def solve_symbols(symbols: Symbols, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Symbol → value for inputs of these shapes; fractional values are left out."""
    found = {}
    for s in symbols.read:
        value, rest = divmod(shapes[s.value][s.dim] - s.offset, s.factor)
        if not rest:
            found[s.name] = value
    return found


def evaluate_length(n: int, values: Mapping[str, int]) -> int:
    return int(_evaluate_text(str(n), values)) if isinstance(n, Size) else n


InputShapes = Sequence[Sequence[int]]


def shape_checker(
    types: Mapping[str, TensorType], symbols: Symbols, names: Sequence[str]
) -> Callable[[InputShapes], bool]:
    """A compiled guard: shapes of inputs ``names`` → whether :func:`shape_mismatch` is empty."""
    at = {name: f"shapes[{i}]" for i, name in enumerate(names)}
    whole = [f"not ({at[s.value]}[{s.dim}] - {s.offset}) % {s.factor}" for s in symbols.read if s.factor > 1]
    same = [f"{at[name]} == {_shape_source(types[name].shape)}" for name in names]
    return _compile_shape_function(" and ".join((*whole, *same, *symbols.conditions)) or "True", symbols, names)


def shape_function(
    shapes: Sequence[Sequence[int] | None], symbols: Symbols, names: Sequence[str]
) -> Callable[[InputShapes], Any]:
    """A compiled function: shapes of inputs ``names`` → ``shapes`` (None stays None)."""
    return _compile_shape_function(
        f"[{', '.join('None' if s is None else _shape_source(s) for s in shapes)}]", symbols, names
    )


def _shape_source(shape: Sequence[int]) -> str:
    return f"({''.join(f'{n}, ' for n in shape)})"


def _compile_shape_function(text: str, symbols: Symbols, names: Sequence[str]) -> Callable[[InputShapes], Any]:
    """Compile ``text``, an expression of the symbols, as a function of the inputs' shapes."""
    at = {name: i for i, name in enumerate(names)}
    read = [f"    {s.name} = (shapes[{at[s.value]}][{s.dim}] - {s.offset}) // {s.factor}\n" for s in symbols.read]
    space: dict[str, Any] = {"__builtins__": {}, **_SAFE_BUILTINS}
    exec(compile(f"def found(shapes):\n{''.join(read)}    return {text}\n", "<lengths>", "exec"), space)
    return space["found"]


def _evaluate_text(text: str, values: Mapping[str, int]) -> Any:
    return eval(_compiled_expression(text), {"__builtins__": {}, **_SAFE_BUILTINS}, dict(values))


@lru_cache(maxsize=1 << 12)
def _compiled_expression(text: str) -> Any:
    return compile(text, "<length>", "eval")


def condition_texts(found: Iterable[sympy.Basic], read: Sequence[Symbol]) -> tuple[str, ...]:
    """Conditions as Python, without tautologies. Raises :class:`CaptureError` where impossible."""
    texts = dict.fromkeys(python_text(c) for c in found if c not in (sympy.true, True))
    for text in texts:
        if not is_checkable(text, read):
            raise CaptureError(f"dynamic: the program holds only where {text}, which cannot be checked")
    return tuple(texts)


def is_checkable(text: str, read: Sequence[Symbol]) -> bool:
    """Whether the expression reads only the symbols, ``min`` and ``max``."""
    names = {x.id for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Name)}
    return names <= _SAFE_BUILTINS.keys() | {s.name for s in read}

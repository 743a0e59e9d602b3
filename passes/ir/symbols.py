"""Dynamic lengths of inputs: conditions that a program needs, checked in every call."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import sympy  # type: ignore[import-untyped,unused-ignore]

from autoshard.errors import CaptureError
from autoshard.passes.ir.graph import Symbol, Symbols, TensorType
from autoshard.passes.ir.sizes import Size, is_sure, symbol, text_of

_FUNCTIONS = {"max": max, "min": min}


def narrower(symbols: Symbols, noted: Iterable[sympy.Basic]) -> Symbols:
    """``symbols`` with further conditions, which lowering recorded; implied ones are left out."""
    least = {symbol(s.name): 2 if f"{s.name} >= 2" in symbols.conditions else 1 for s in symbols.read}
    shift = {s: s + (n - 1) for s, n in least.items()}
    open_ = [
        c for c in noted if not (isinstance(c, sympy.Gt) and is_sure(c.lhs.xreplace(shift), c.rhs.xreplace(shift) + 1))
    ]
    return replace(symbols, conditions=(*symbols.conditions, *conditions(open_, symbols.read)))


def mismatch(types: Mapping[str, TensorType], symbols: Symbols, shapes: Mapping[str, Sequence[int]]) -> str:
    """Why a program does not fit inputs of these ``shapes`` (by input name); "" if it does."""
    values = bind(symbols, shapes)
    for s in symbols.read:
        if s.name not in values:
            return f"dim {s.dim} of {s.value} is {shapes[s.value][s.dim]}, no multiple of {s.factor}"
    for name, shape in shapes.items():
        for dim, (n, length) in enumerate(zip(types[name].shape, shape, strict=True)):
            if evaluate(n, values) != length:
                return f"dim {dim} of {name} is {length}, not {n}"
    known = ", ".join(f"{name} = {n}" for name, n in values.items())
    return next((f"{c} does not hold for {known}" for c in symbols.conditions if not _run(c, values)), "")


def bind(symbols: Symbols, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Symbol → value for inputs of these shapes; fractional values are left out."""
    found = {}
    for s in symbols.read:
        value, rest = divmod(shapes[s.value][s.dim] - s.offset, s.factor)
        if not rest:
            found[s.name] = value
    return found


def evaluate(n: int, values: Mapping[str, int]) -> int:
    """Length ``n`` with these ``values`` of the symbols."""
    return int(_run(str(n), values)) if isinstance(n, Size) else n


Shapes = Sequence[Sequence[int]]


def check(types: Mapping[str, TensorType], symbols: Symbols, names: Sequence[str]) -> Callable[[Shapes], bool]:
    """A compiled guard: shapes of inputs ``names`` → whether :func:`mismatch` is empty."""
    at = {name: f"shapes[{i}]" for i, name in enumerate(names)}
    whole = [f"not ({at[s.value]}[{s.dim}] - {s.offset}) % {s.factor}" for s in symbols.read if s.factor > 1]
    same = [f"{at[name]} == {_shape(types[name].shape)}" for name in names]
    return _function(" and ".join((*whole, *same, *symbols.conditions)) or "True", symbols, names)


def shapes_of(
    shapes: Sequence[Sequence[int] | None], symbols: Symbols, names: Sequence[str]
) -> Callable[[Shapes], Any]:
    """A compiled function: shapes of inputs ``names`` → ``shapes`` (None stays None)."""
    return _function(f"[{', '.join('None' if s is None else _shape(s) for s in shapes)}]", symbols, names)


def _shape(shape: Sequence[int]) -> str:
    return f"({''.join(f'{n}, ' for n in shape)})"


def _function(text: str, symbols: Symbols, names: Sequence[str]) -> Callable[[Shapes], Any]:
    """Compile ``text``, an expression of the symbols, as a function of the inputs' shapes."""
    at = {name: i for i, name in enumerate(names)}
    read = [f"    {s.name} = (shapes[{at[s.value]}][{s.dim}] - {s.offset}) // {s.factor}\n" for s in symbols.read]
    space: dict[str, Any] = {"__builtins__": {}, **_FUNCTIONS}
    exec(compile(f"def found(shapes):\n{''.join(read)}    return {text}\n", "<lengths>", "exec"), space)
    found: Callable[[Shapes], Any] = space["found"]
    return found


def _run(text: str, values: Mapping[str, int]) -> Any:
    return eval(_code(text), {"__builtins__": {}, **_FUNCTIONS}, dict(values))


@lru_cache(maxsize=1 << 12)
def _code(text: str) -> Any:
    return compile(text, "<length>", "eval")


def conditions(found: Iterable[sympy.Basic], read: Sequence[Symbol]) -> tuple[str, ...]:
    """Conditions as Python, without tautologies. Raises :class:`CaptureError` where impossible."""
    texts = dict.fromkeys(text_of(c) for c in found if c not in (sympy.true, True))
    for text in texts:
        if not is_plain(text, read):
            raise CaptureError(f"dynamic: the program holds only where {text}, which cannot be checked")
    return tuple(texts)


def is_plain(text: str, read: Sequence[Symbol]) -> bool:
    """Whether the expression reads only the symbols, ``min`` and ``max``."""
    names = {x.id for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Name)}
    return names <= _FUNCTIONS.keys() | {s.name for s in read}

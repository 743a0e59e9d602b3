"""Print calls as Python source, in public spelling, wrapped as ruff format wraps it."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from autoshard.aten import aten
from autoshard.passes.ir.graph import Ref
from autoshard.passes.ir.names import attribute, is_plain
from autoshard.passes.ir.program import Call, Local, Offset, spell
from autoshard.passes.ir.sizes import ENDLESS, Size, is_compound

WIDTH = 88
"""ruff's default line length"""

Names = Mapping[str, str]

_BINARY = {"add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">"}
_BINARY |= {"ge": ">=", "__and__": "&", "bitwise_and": "&", "__or__": "|", "bitwise_or": "|", "matmul": "@", "mm": "@"}
_BINARY |= {"bmm": "@", "pow": "**", "floordiv": "//"}
_UNARY = {"neg": "-", "bitwise_not": "~"}
_METHODS = frozenset(
    "transpose permute unsqueeze squeeze expand sum mean amax amin masked_fill split unbind flatten "
    "item nonzero masked_select".split()
)
_TORCH = frozenset(
    "rsqrt sqrt exp log sin cos tanh sigmoid relu abs where cumsum tril triu topk sort argmax argmin outer "
    "gather index_select scatter_add clamp reciprocal square erf log1p bernoulli baddbmm addmm logsumexp isnan".split()
)
_FUNCTIONAL = frozenset("linear silu gelu mish softplus leaky_relu hardswish conv1d conv2d conv3d".split())
_FACTORIES = frozenset(
    "arange zeros ones full empty rand randn randint randperm scalar_tensor eye linspace tril_indices".split()
)
_REDUCTIONS = ('"none"', '"mean"', '"sum"')


def expression(call: Call, names: Names, mesh_sizes: Mapping[str, int]) -> Expression:
    """``call`` as source. ``names``: local name → identifier; ``mesh_sizes``: ranks per axis."""
    return _Printer(names, mesh_sizes).call(call)


def length(n: int, axes: Sequence[str], mesh_sizes: Mapping[str, int]) -> str:
    """Source of this rank's length of a dim of global length ``n``, sharded along ``axes``."""
    return _Printer({}, mesh_sizes).length(Local(n, tuple(axes))).flat if axes else str(n)


class Expression:
    """Text of an expression; calls, lists and tuples keep their parts, for wrapping."""

    def __init__(self, head: str, parts: Sequence[Expression] | None = None, close: str = "") -> None:
        self.head, self.parts, self.close = head, parts, close

    @property
    def flat(self) -> str:
        if self.parts is None:
            return self.head
        inner = ", ".join(p.flat for p in self.parts)
        if self._is_tuple and len(self.parts) == 1:
            inner += ","
        return self.head + inner + self.close

    @property
    def _is_tuple(self) -> bool:
        """Whether it is a tuple: on its own, behind a keyword, or in a dict."""
        return self.close == ")" and (self.head == "(" or self.head.endswith(("=(", ": (")))

    def lines(self, prefix: str, indent: str, suffix: str = "") -> list[str]:
        """``indent + prefix + expression + suffix``, wrapped beyond :data:`WIDTH` columns."""
        one = indent + prefix + self.flat + suffix
        if len(one) <= WIDTH or not self.parts:
            return [one]
        inner = indent + "    "
        body = inner + ", ".join(p.flat for p in self.parts)
        if len(body) <= WIDTH and self.close == ")" and not self._is_tuple:
            return [indent + prefix + self.head, body, indent + self.close + suffix]
        lines = [indent + prefix + self.head]
        for part in self.parts:
            lines += part.lines("", inner, ",")
        return [*lines, indent + self.close + suffix]


class Operation(Expression):
    """``left sign right``; wrapped in parentheses, then at the sign."""

    def __init__(self, left: str, sign: str, right: str) -> None:
        super().__init__(f"{left}{sign}{right}")
        self.left, self.right = left, f"{sign.lstrip()}{right}"

    def lines(self, prefix: str, indent: str, suffix: str = "") -> list[str]:
        """See :meth:`Expression.lines`."""
        one, inner = f"{indent}{prefix}{self.head}{suffix}", f"{indent}    "
        if len(one) <= WIDTH:
            return [one]
        body = [inner + self.head] if len(inner + self.head) <= WIDTH else [inner + self.left, inner + self.right]
        return [f"{indent}{prefix}(", *body, f"{indent}){suffix}"]


def atom(text: str) -> Expression:
    """An expression that is never wrapped."""
    return Expression(text)


class _Printer:
    def __init__(self, names: Names, mesh_sizes: Mapping[str, int]) -> None:
        self.names, self.mesh_sizes = names, mesh_sizes

    def call(self, call: Call) -> Expression:
        if isinstance(call.fn, str):
            return self.function(f"runtime.{call.fn}", call.args, call.kwargs)
        name = call.fn._schema.name.rpartition("::")[2]
        special = _SPECIAL.get(name)
        if special is not None and call.fn.namespace in ("aten", "prim"):
            printed = special(self, call)
            if printed is not None:
                return printed
        return self.operator(name, call.fn, list(call.args), dict(call.kwargs))

    def operator(self, name: str, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Expression:
        """An aten op by its public spelling, or as ``aten.name.overload``."""
        plain = op.namespace == "aten"
        if plain and name in _BINARY and len(args) == 2 and not kwargs:
            sign = _BINARY[name] if name == "pow" else f" {_BINARY[name]} "
            return Operation(self.operand(args[0]), sign, self.operand(args[1]))
        if plain and name in _UNARY and len(args) == 1:
            return atom(f"{_UNARY[name]}{self.operand(args[0])}")
        if plain and name in _METHODS and args and isinstance(args[0], Ref):
            return self.function(f"{self.value(args[0]).flat}.{name}", args[1:], kwargs)
        if plain and name in _FUNCTIONAL:
            return self.function(f"F.{name}", args, kwargs)
        if plain and name in _TORCH:
            return self.function(f"torch.{name}", args, kwargs)
        if plain and name in _FACTORIES:
            return self.function(f"torch.{name}", args, {**kwargs, "device": Verbatim("runtime.device()")})
        space = "aten" if plain else attribute("torch.ops", op.namespace)
        return self.function(attribute(attribute(space, name), op._overloadname), args, kwargs)

    def function(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Expression:
        parts = [self.value(a) for a in args]
        for key, value in kwargs.items():
            if is_plain(key):
                printed = self.value(value)
                parts.append(Expression(f"{key}={printed.head}", printed.parts, printed.close))
            else:  # as the ``from`` of an op may be
                parts.append(Expression("**{", [self.entry(key, value)], "}"))
        return Expression(f"{name}(", parts, ")")

    def value(self, value: Any) -> Expression:
        if isinstance(value, Ref):
            return atom(self.names[value.name])
        if isinstance(value, Call):
            printed = self.call(value)
            compound = printed.parts is None and (" " in printed.head or printed.head[:1] in "-~")
            return atom(f"({printed.head})") if compound else printed
        if isinstance(value, Local):
            return self.length(value)
        if isinstance(value, Offset):
            return self.function("runtime.offset", (value.size, spell(value.axes)), {})
        if isinstance(value, Mapping):
            return Expression("{", [self.entry(k, v) for k, v in value.items()], "}")
        if isinstance(value, tuple | list):
            opening, closing = ("[", "]") if isinstance(value, list) else ("(", ")")
            return Expression(opening, [self.value(v) for v in value], closing)
        return atom(literal(value))

    def operand(self, value: Any) -> str:
        """Text of an operand of a sign; a compound symbolic length gets parentheses."""
        text = self.value(value).flat
        return f"({text})" if isinstance(value, Size) and is_compound(text) else text

    def entry(self, key: Any, value: Any) -> Expression:
        printed = self.value(value)
        return Expression(f"{literal(key)}: {printed.head}", printed.parts, printed.close)

    def length(self, value: Local) -> Expression:
        ranks = math.prod(self.mesh_sizes[a] for a in value.axes)
        if value.size % ranks == 0:
            return atom(str(value.size // ranks))
        return self.function("runtime.size", (value.size, spell(value.axes)), {})


class Verbatim(str):
    """Source text that is printed verbatim."""


def literal(value: Any) -> str:
    """A constant as Python source."""
    if isinstance(value, Verbatim):
        return str(value)
    if isinstance(value, str):
        quoted = repr(value)[1:-1]
        return f'"{quoted}"' if '"' not in quoted else repr(value)
    if isinstance(value, float | complex) and not cmath.isfinite(value):
        return f'{type(value).__name__}("{value}")'
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    return repr(value)


# --- ops whose public function takes other arguments than the aten op ---


def _reshape(p: _Printer, call: Call) -> Expression | None:
    if call.fn is aten.view.dtype:  # reinterprets the bytes
        return p.function(f"{p.value(call.args[0]).flat}.view", call.args[1:], {})
    return p.function(f"{p.value(call.args[0]).flat}.reshape", _separate(call.args[1]), {})


def _separate(sizes: Sequence[Any]) -> tuple[Any, ...]:
    """A list of ints as separate arguments; an empty one stays one argument."""
    return tuple(sizes) or ((),)


def _spread(method: str) -> Callable[[_Printer, Call], Expression | None]:
    """Printer of a method that takes its list of ints as separate arguments."""

    def printed(p: _Printer, call: Call) -> Expression | None:
        if len(call.args) != 2 or call.kwargs or not isinstance(call.args[1], tuple | list):
            return None
        return p.function(f"{p.value(call.args[0]).flat}.{method}", _separate(call.args[1]), {})

    return printed


def _slice(p: _Printer, call: Call) -> Expression | None:
    x, dim, start, end, step = (*call.args, *(0, None, None, 1)[len(call.args) - 1 :])[:5]
    if not isinstance(dim, int) or not all(isinstance(v, int | Ref | None) for v in (start, end, step)):
        return None
    low = "" if not start else p.value(start).flat
    high = "" if end is None or (isinstance(end, int) and int(end) >= ENDLESS) else p.value(end).flat
    colon = ":"
    if any(isinstance(v, Size) and is_compound(str(v)) for v in (start, end)):  # as ruff format spaces it
        colon = f"{' ' if low else ''}:{' ' if high else ''}"
    text = f"{low}{colon}{high}" + (f":{p.value(step).flat}" if step != 1 else "")
    index = f"..., {text}" if dim == -1 else ", ".join([":"] * dim + [text]) if dim >= 0 else None
    return atom(f"{p.value(x).flat}[{index}]") if index is not None else None


def _embedding(p: _Printer, call: Call) -> Expression | None:
    weight, indices, *rest = call.args
    return _EMBEDDING(p, Call(call.fn, (indices, weight, *rest), call.kwargs))


def _functional(
    name: str, operands: int, options: str, defaults: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[_Printer, Call], Expression | None]:
    """Printer of a function of ``F``: operands by position, non-default options by name."""

    def printed(p: _Printer, call: Call) -> Expression | None:
        given = dict(zip(options.split(), call.args[operands:], strict=False)) | dict(call.kwargs)
        if given.get("reduction") is not None:
            given["reduction"] = Verbatim(_REDUCTIONS[given["reduction"]])
        extra = {k: v for k, v in given.items() if v != defaults.get(k)}
        return p.function(f"F.{name}", call.args[:operands], extra)

    return printed


_EMBEDDING = _functional(
    "embedding",
    2,
    "padding_idx scale_grad_by_freq sparse",
    {"padding_idx": -1, "scale_grad_by_freq": False, "sparse": False},
)
_ATTENTION = _functional(
    "scaled_dot_product_attention",
    3,
    "attn_mask dropout_p is_causal",
    {"dropout_p": 0.0, "is_causal": False, "enable_gqa": False},
)
_CROSS_ENTROPY = _functional("cross_entropy", 2, "weight reduction ignore_index label_smoothing")


def _to(p: _Printer, call: Call) -> Expression | None:
    kwargs = {k: v for k, v in call.kwargs.items() if k == "dtype" and v is not None}
    if len(call.args) != 1 or not kwargs:
        return None
    return p.function(f"{p.value(call.args[0]).flat}.to", (kwargs["dtype"],), {})


def _softmax(p: _Printer, call: Call) -> Expression | None:
    if len(call.args) < 2:
        return None
    name = "log_softmax" if "log" in str(call.fn) else "softmax"
    dtype = call.args[2] if len(call.args) > 2 else None
    extra = {"dtype": dtype} if isinstance(dtype, torch.dtype) else dict(call.kwargs)
    return p.function(f"F.{name}", (call.args[0],), {"dim": call.args[1], **extra})


def _cat(p: _Printer, call: Call) -> Expression | None:
    dim = {"dim": call.args[1]} if len(call.args) > 1 else dict(call.kwargs)
    name = "torch.stack" if "stack" in str(call.fn) else "torch.cat"
    return p.function(name, (list(call.args[0]),), dim)


def _builtin(name: str) -> Callable[[_Printer, Call], Expression | None]:
    """Printer of a Python builtin for ops on numbers; not of the tensor op of the same name."""

    def printed(p: _Printer, call: Call) -> Expression | None:
        of_numbers = not isinstance(call.fn, str) and not any(
            "Tensor" in str(a.type) for a in call.fn._schema.arguments
        )
        return p.function(name, call.args, {}) if of_numbers else None

    return printed


_SPECIAL: dict[str, Callable[[_Printer, Call], Expression | None]] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), _reshape),
    **{method: _spread(method) for method in ("permute", "expand", "repeat")},
    **dict.fromkeys(
        ("contiguous", "clone"), lambda p, call: p.function(f"{p.value(call.args[0]).flat}.contiguous", (), {})
    ),
    "slice": _slice,
    "embedding": _embedding,
    "scaled_dot_product_attention": _ATTENTION,
    "layer_norm": lambda p, call: p.function("F.layer_norm", call.args[:5], {}),
    "cross_entropy_loss": _CROSS_ENTROPY,
    **{name: _functional(name, 2, "reduction") for name in ("mse_loss", "l1_loss")},
    "_to_copy": _to,
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax"), _softmax),
    "sym_size": lambda p, call: atom(f"{p.value(call.args[0]).flat}.shape[{call.args[1]}]"),
    "max": _builtin("max"),
    "min": _builtin("min"),
    "Float": _builtin("float"),
    "Int": _builtin("int"),
    "cat": _cat,
    "stack": _cat,
}

"""Python source text: calls, signatures, comments, identifiers, as ruff format wraps."""

from __future__ import annotations

import cmath
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from autoshard.aten import aten
from autoshard.frames import printable
from autoshard.layout import Layout, Shard
from autoshard.passes.ir.graph import Ref, Symbol, Symbols, TensorType
from autoshard.passes.ir.program import Local, LocalCall, Offset, Statement, axes_argument
from autoshard.passes.ir.sizes import ENDLESS, Size, is_compound
from autoshard.passes.ir.text import RESERVED_NAMES, attribute_source, identifier, is_attribute_name, is_number
from autoshard.runtime.programs.module import RankModule
from autoshard.torch_private.ops import OpOverload

LINE_WIDTH = 88
"""ruff's default line length"""

NameMap = Mapping[str, str]

_BINARY_SIGNS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
}
_BINARY_SIGNS |= {
    "ge": ">=",
    "__and__": "&",
    "bitwise_and": "&",
    "__or__": "|",
    "bitwise_or": "|",
    "matmul": "@",
    "mm": "@",
}
_BINARY_SIGNS |= {"bmm": "@", "pow": "**", "floordiv": "//"}
_UNARY_SIGNS = {"neg": "-", "bitwise_not": "~"}
_TENSOR_METHODS = frozenset(
    "transpose permute unsqueeze squeeze expand sum mean amax amin masked_fill split unbind flatten "
    "item nonzero masked_select".split()
)
_TORCH_FUNCTIONS = frozenset(
    "rsqrt sqrt exp log sin cos tanh sigmoid relu abs where cumsum tril triu topk sort argmax argmin outer "
    "gather index_select scatter_add clamp reciprocal square erf log1p bernoulli baddbmm addmm logsumexp isnan".split()
)
_NN_FUNCTIONS = frozenset("linear silu gelu mish softplus leaky_relu hardswish conv1d conv2d conv3d".split())
_FACTORY_FUNCTIONS = frozenset(
    "arange zeros ones full empty rand randn randint randperm scalar_tensor eye linspace tril_indices".split()
)
_REDUCTION_LITERALS = ('"none"', '"mean"', '"sum"')


def print_call(call: LocalCall, names: NameMap, mesh_sizes: Mapping[str, int]) -> Expression:
    """``call`` as source. ``names``: local name → identifier; ``mesh_sizes``: ranks per axis."""
    return _CallPrinter(names, mesh_sizes).call(call)


def local_length(n: int, axes: Sequence[str], mesh_sizes: Mapping[str, int]) -> str:
    """Source of this rank's length of a dim of global length ``n``, sharded along ``axes``."""
    return _CallPrinter({}, mesh_sizes).length(Local(n, tuple(axes))).flat if axes else str(n)


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
        """``indent + prefix + expression + suffix``, wrapped beyond :data:`LINE_WIDTH` columns."""
        one = indent + prefix + self.flat + suffix
        if len(one) <= LINE_WIDTH or not self.parts:
            return [one]
        inner = indent + "    "
        body = inner + ", ".join(p.flat for p in self.parts)
        if len(body) <= LINE_WIDTH and self.close == ")" and not self._is_tuple:
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
        if len(one) <= LINE_WIDTH:
            return [one]
        body = [inner + self.head] if len(inner + self.head) <= LINE_WIDTH else [inner + self.left, inner + self.right]
        return [f"{indent}{prefix}(", *body, f"{indent}){suffix}"]


def atom(text: str) -> Expression:
    """An expression that is never wrapped."""
    return Expression(text)


class _CallPrinter:
    def __init__(self, names: NameMap, mesh_sizes: Mapping[str, int]) -> None:
        self.names, self.mesh_sizes = names, mesh_sizes

    def call(self, call: LocalCall) -> Expression:
        if isinstance(call.fn, str):
            return self.function(f"runtime.{call.fn}", call.args, call.kwargs)
        name = call.fn._schema.name.rpartition("::")[2]
        special = _SPECIAL_PRINTERS.get(name)
        if special is not None and call.fn.namespace in ("aten", "prim"):
            printed = special(self, call)
            if printed is not None:
                return printed
        return self.operator(name, call.fn, list(call.args), dict(call.kwargs))

    def operator(self, name: str, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Expression:
        """An aten op by its public spelling, or as ``aten.name.overload``."""
        plain = op.namespace == "aten"
        if plain and name in _BINARY_SIGNS and len(args) == 2 and not kwargs:
            sign = _BINARY_SIGNS[name] if name == "pow" else f" {_BINARY_SIGNS[name]} "
            return Operation(self.operand(args[0]), sign, self.operand(args[1]))
        if plain and name in _UNARY_SIGNS and len(args) == 1:
            return atom(f"{_UNARY_SIGNS[name]}{self.operand(args[0])}")
        if plain and name in _TENSOR_METHODS and args and isinstance(args[0], Ref):
            return self.function(f"{self.value(args[0]).flat}.{name}", args[1:], kwargs)
        if plain and name in _NN_FUNCTIONS:
            return self.function(f"F.{name}", args, kwargs)
        if plain and name in _TORCH_FUNCTIONS:
            return self.function(f"torch.{name}", args, kwargs)
        if plain and name in _FACTORY_FUNCTIONS:
            return self.function(f"torch.{name}", args, {**kwargs, "device": Verbatim("runtime.device()")})
        space = "aten" if plain else attribute_source("torch.ops", op.namespace)
        return self.function(attribute_source(attribute_source(space, name), op._overloadname), args, kwargs)

    def function(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Expression:
        parts = [self.value(a) for a in args]
        for key, value in kwargs.items():
            if is_attribute_name(key):
                printed = self.value(value)
                parts.append(Expression(f"{key}={printed.head}", printed.parts, printed.close))
            else:  # as the ``from`` of an op may be
                parts.append(Expression("**{", [self.entry(key, value)], "}"))
        return Expression(f"{name}(", parts, ")")

    def value(self, value: Any) -> Expression:
        if isinstance(value, Ref):
            return atom(self.names[value.name])
        if isinstance(value, LocalCall):
            printed = self.call(value)
            compound = printed.parts is None and (" " in printed.head or printed.head[:1] in "-~")
            return atom(f"({printed.head})") if compound else printed
        if isinstance(value, Local):
            return self.length(value)
        if isinstance(value, Offset):
            return self.function("runtime.offset", (value.size, axes_argument(value.axes)), {})
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
        return self.function("runtime.size", (value.size, axes_argument(value.axes)), {})


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


def _print_reshape(p: _CallPrinter, call: LocalCall) -> Expression | None:
    if call.fn is aten.view.dtype:  # reinterprets the bytes
        return p.function(f"{p.value(call.args[0]).flat}.view", call.args[1:], {})
    return p.function(f"{p.value(call.args[0]).flat}.reshape", _unpacked_sizes(call.args[1]), {})


def _unpacked_sizes(sizes: Sequence[Any]) -> tuple[Any, ...]:
    """A list of ints as separate arguments; an empty one stays one argument."""
    return tuple(sizes) or ((),)


def _print_method(method: str) -> Callable[[_CallPrinter, LocalCall], Expression | None]:
    """Printer of a method that takes its list of ints as separate arguments."""

    def printed(p: _CallPrinter, call: LocalCall) -> Expression | None:
        if len(call.args) != 2 or call.kwargs or not isinstance(call.args[1], tuple | list):
            return None
        return p.function(f"{p.value(call.args[0]).flat}.{method}", _unpacked_sizes(call.args[1]), {})

    return printed


def _print_slice(p: _CallPrinter, call: LocalCall) -> Expression | None:
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


def _print_embedding(p: _CallPrinter, call: LocalCall) -> Expression | None:
    weight, indices, *rest = call.args
    return _PRINT_F_EMBEDDING(p, LocalCall(call.fn, (indices, weight, *rest), call.kwargs))


def _functional_printer(
    name: str, operands: int, options: str, defaults: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[_CallPrinter, LocalCall], Expression | None]:
    """Printer of a function of ``F``: operands by position, non-default options by name."""

    def printed(p: _CallPrinter, call: LocalCall) -> Expression | None:
        given = dict(zip(options.split(), call.args[operands:], strict=False)) | dict(call.kwargs)
        if given.get("reduction") is not None:
            given["reduction"] = Verbatim(_REDUCTION_LITERALS[given["reduction"]])
        extra = {k: v for k, v in given.items() if v != defaults.get(k)}
        return p.function(f"F.{name}", call.args[:operands], extra)

    return printed


_PRINT_F_EMBEDDING = _functional_printer(
    "embedding",
    2,
    "padding_idx scale_grad_by_freq sparse",
    {"padding_idx": -1, "scale_grad_by_freq": False, "sparse": False},
)
_PRINT_ATTENTION = _functional_printer(
    "scaled_dot_product_attention",
    3,
    "attn_mask dropout_p is_causal",
    {"dropout_p": 0.0, "is_causal": False, "enable_gqa": False},
)
_PRINT_CROSS_ENTROPY = _functional_printer("cross_entropy", 2, "weight reduction ignore_index label_smoothing")


def _print_to(p: _CallPrinter, call: LocalCall) -> Expression | None:
    kwargs = {k: v for k, v in call.kwargs.items() if k == "dtype" and v is not None}
    if len(call.args) != 1 or not kwargs:
        return None
    return p.function(f"{p.value(call.args[0]).flat}.to", (kwargs["dtype"],), {})


def _print_clone(p: _CallPrinter, call: LocalCall) -> Expression | None:
    copies = call.kwargs.get("memory_format") is torch.preserve_format  # an output that is no alias
    return p.function(f"{p.value(call.args[0]).flat}.{'clone' if copies else 'contiguous'}", (), {})


def _print_softmax(p: _CallPrinter, call: LocalCall) -> Expression | None:
    if len(call.args) < 2:
        return None
    name = "log_softmax" if "log" in str(call.fn) else "softmax"
    dtype = call.args[2] if len(call.args) > 2 else None
    extra = {"dtype": dtype} if isinstance(dtype, torch.dtype) else dict(call.kwargs)
    return p.function(f"F.{name}", (call.args[0],), {"dim": call.args[1], **extra})


def _print_cat(p: _CallPrinter, call: LocalCall) -> Expression | None:
    dim = {"dim": call.args[1]} if len(call.args) > 1 else dict(call.kwargs)
    name = "torch.stack" if "stack" in str(call.fn) else "torch.cat"
    return p.function(name, (list(call.args[0]),), dim)


def _builtin_printer(name: str) -> Callable[[_CallPrinter, LocalCall], Expression | None]:
    """Printer of a Python builtin for ops on numbers; not of the tensor op of the same name."""

    def printed(p: _CallPrinter, call: LocalCall) -> Expression | None:
        of_numbers = not isinstance(call.fn, str) and not any(
            "Tensor" in str(a.type) for a in call.fn._schema.arguments
        )
        return p.function(name, call.args, {}) if of_numbers else None

    return printed


_SPECIAL_PRINTERS: dict[str, Callable[[_CallPrinter, LocalCall], Expression | None]] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), _print_reshape),
    **{method: _print_method(method) for method in ("permute", "expand", "repeat")},
    **dict.fromkeys(("contiguous", "clone"), _print_clone),
    "slice": _print_slice,
    "embedding": _print_embedding,
    "scaled_dot_product_attention": _PRINT_ATTENTION,
    "layer_norm": lambda p, call: p.function("F.layer_norm", call.args[:5], {}),
    "cross_entropy_loss": _PRINT_CROSS_ENTROPY,
    **{name: _functional_printer(name, 2, "reduction") for name in ("mse_loss", "l1_loss")},
    "_to_copy": _print_to,
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax"), _print_softmax),
    "sym_size": lambda p, call: atom(f"{p.value(call.args[0]).flat}.shape[{call.args[1]}]"),
    "max": _builtin_printer("max"),
    "min": _builtin_printer("min"),
    "Float": _builtin_printer("float"),
    "Int": _builtin_printer("int"),
    "cat": _print_cat,
    "stack": _print_cat,
}


_RESERVED_ATTRIBUTES = frozenset(dir(RankModule)) | frozenset(vars(RankModule()))
"""attributes of the base classes of rank modules"""
_SHORT_OP_NAMES = {
    "scaled_dot_product_attention": "attention",
    "cross_entropy_loss": "loss",
    "binary_cross_entropy_with_logits": "loss",
    "native_dropout": "dropout",
    "to_copy": "cast",
    "pow": "power",
    "abs": "magnitude",
    "max": "largest",
    "min": "smallest",
    "sum": "total",
    "round": "rounded",
    "slice": "part",
    "split": "part",
    "chunk": "part",
}
"""op → a better name of its result"""


def shape_text(type_: TensorType, layout: Layout) -> str:
    """``[2, 16, 64/256]``: local/global lengths, the longest local one if ranks differ."""
    if type_.number is not None:
        return "a number"
    local = layout.max_local_shape(type_.shape)
    parts = []
    for d, (n, whole, text) in enumerate(zip(local, type_.shape, type_.lengths, strict=True)):
        ranks = layout.mesh.size_of(layout.cutting(d))
        symbolic = f"{f'({text})' if is_compound(text) else text}/{ranks}"
        parts.append(text if not layout.cutting(d) else symbolic if isinstance(whole, Size) else f"{n}/{text}")
    return "[" + ", ".join(parts) + "]"


def symbol_lines(symbols: Sequence[Symbol], names: Mapping[str, str], shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Lines that assign the symbols from shapes of inputs. ``shapes``: input → global shape."""
    lines = []
    for value in dict.fromkeys(s.value for s in symbols):
        mine = [s for s in symbols if s.value == value]
        x = names[value]
        if len(mine) > 1 and all(s.factor == 1 and not s.offset for s in mine):
            named = {s.dim: s.name for s in mine}
            lines.append(f"        {', '.join(named.get(d, '_') for d in range(len(shapes[value])))} = {x}.shape")
            continue
        for s in mine:
            length = f"({x}.shape[{s.dim}] - {s.offset})" if s.offset else f"{x}.shape[{s.dim}]"
            lines.append(f"        {s.name} = {length}" + (f" // {s.factor}" if s.factor > 1 else ""))
    return lines


def condition_lines(symbols: Symbols, names: Mapping[str, str], shapes: Mapping[str, Sequence[str]]) -> list[str]:
    """A ``runtime.require`` of lengths and guards. ``shapes``: input → local lengths, as source."""
    if not symbols.read:
        return []
    read = {(s.value, s.dim) for s in symbols.read if s.factor == 1 and not s.offset}
    given = {x: tuple(shape) for x, shape in shapes.items() if any((x, d) not in read for d in range(len(shape)))}
    found = [f"{names[x]}.shape == ({', '.join(n)}{',' * (len(n) == 1)})" for x, n in given.items()]
    return Expression("runtime.require(", [atom(text) for text in (*found, *symbols.conditions)], ")").lines(
        "", " " * 8
    )


def layout_text(layout: Layout) -> str:
    """Placements along the axes that shard the value or hold partial sums."""
    shown = [f"{layout[a]}@{a}" for a in layout.order if isinstance(layout[a], Shard) or str(layout[a])[0] == "P"]
    return " " + " ".join(shown) if shown else ""


def step_comment(s: Statement) -> str:
    """Comment of a redistribution: placements before and after, collective of the backward."""
    step = s.step
    if step is None or step.kind == "cast":
        return ""
    changed = [a for a in step.src.mesh.axes if step.src[a] != step.dst[a]]
    arrow = f"{' '.join(f'{step.src[a]}@{a}' for a in changed)} → {' '.join(f'{step.dst[a]}@{a}' for a in changed)}"
    if not changed:  # the same placements, nested in another order of axes
        arrow = f"{step.src} → {step.dst}"
    backward = f"    backward: {step.backward.replace('_', '-')}" if step.backward else ""
    stage = s.call.kwargs.get("zero")
    kept = f", kept (ZeRO-{stage})" if stage else ""
    return arrow + kept + backward


def op_name(name: str) -> str:
    """A node's name without its number."""
    plain = re.sub(r"(_\d+)+$", "", name.split("__")[0]).strip("_") or "x"
    return _SHORT_OP_NAMES.get(plain, plain)


def python_path(path: str) -> str:
    """``self.layers[0].mlp`` for ``layers.0.mlp``; components that are no attributes are items."""
    text = "self"
    for part in path.split("."):
        if is_number(part):
            text += f"[{part}]"
        else:
            text += f".{part}" if is_attribute_name(part) and part not in _RESERVED_ATTRIBUTES else f"[{literal(part)}]"
    return text


def singular_name(container: str) -> str:
    """Singular of a container's name: ``layer`` of ``model.layers``; "block" if there is none."""
    leaf = container.rpartition(".")[2]
    one = leaf[:-1] if leaf.endswith("s") and not leaf.endswith(("ss", "ies")) else ""
    return one if is_attribute_name(one) and one not in RESERVED_NAMES else "block"


def docstring(text: str) -> str:
    """``text`` of the user, escaped for a docstring."""
    return printable(text).replace("\\", "\\\\").replace('"', '\\"')


def literal_mesh(sizes: Mapping[str, int]) -> str:
    return "{" + ", ".join(f'"{a}": {n}' for a, n in sizes.items()) + "}"


def def_lines(name: str, arguments: Sequence[str]) -> list[str]:
    one = f"    def {name}({', '.join(arguments)}):"
    if len(one) <= LINE_WIDTH:
        return [one]
    inner = f"        {', '.join(arguments)}"
    if len(inner) <= LINE_WIDTH:
        return [f"    def {name}(", inner, "    ):"]
    return [f"    def {name}(", *(f"        {a}," for a in arguments), "    ):"]


def path_ranges(paths: Iterable[str]) -> list[tuple[str, range | None]]:
    """Paths grouped as (prefix, range of numbers), or (path, None)."""
    groups: list[tuple[str, range | None]] = []
    for path in paths:
        prefix, _, number = path.rpartition(".")
        last = groups[-1] if groups else None
        if not prefix:
            groups.append((path, None))
        elif last and last[0] == prefix and last[1] is not None and last[1].stop == int(number):
            groups[-1] = (prefix, range(last[1].start, int(number) + 1))
        else:
            groups.append((prefix, range(int(number), int(number) + 1)))
    return [
        (f"{prefix}.{numbers.start}", None) if numbers is not None and len(numbers) == 1 else (prefix, numbers)
        for prefix, numbers in groups
    ]


def path_tuple(name: str, paths: Sequence[str]) -> str:
    """``NAME = (…)``: the paths, those of a range in one expression."""
    parts = []
    for prefix, numbers in path_ranges(paths):
        each = literal(prefix.replace("{", "{{").replace("}", "}}") + ".{i}")
        loop = f"*(f{each} for i in {str(numbers).replace('(0, ', '(')})"
        parts.append(literal(prefix) if numbers is None else loop)
    return f"    {name} = ({', '.join(parts)},)"


def format_paths(paths: Sequence[str]) -> str:
    return ", ".join(
        prefix if numbers is None else f"{prefix}.{numbers.start} … {prefix}.{numbers.stop - 1}"
        for prefix, numbers in path_ranges(paths)
    )


def block_table(classes: Iterable[tuple[str, Sequence[str]]]) -> str:
    """``BLOCKS = {...}`` from (class name, paths of its blocks)."""
    parts = list[tuple[str, str]]()
    for name, paths in classes:
        for prefix, numbers in path_ranges(paths):
            if numbers is None:
                parts.append((literal(prefix), name))
            else:
                each = literal(prefix.replace("{", "{{").replace("}", "}}") + ".{i}")
                parts.append((f"f{each}", f"{name} for i in {str(numbers).replace('(0, ', '(')}"))
    entries = [f"{key}: {value}" for key, value in parts]
    loops = any(" for " in value for _, value in parts)
    one = f"    BLOCKS = {{{('} | {' if loops else ', ').join(entries)}}}"
    if len(one) <= LINE_WIDTH:
        return one
    if len(parts) == 1:
        return "\n".join(["    BLOCKS = {", f"        {entries[0]}", "    }"])
    return "\n".join(
        ["    BLOCKS = (", *(f"        {'| ' if i else ''}{{{e}}}" for i, e in enumerate(entries)), "    )"]
    )


class NameScope:
    """Identifiers of local names in one function; those of dead values are reused."""

    def __init__(self, fixed: Iterable[str] = ()) -> None:
        self.of: dict[str, str] = {}
        self.fixed = RESERVED_NAMES | set(fixed)
        self.holder: dict[str, str] = {}
        """identifier → the local name that it currently stands for"""
        self.dead: Callable[[str], bool] = lambda name: False
        """whether the value of a local name is dead"""

    def is_held(self, local: str) -> bool:
        """Whether it is a variable of the function, not an attribute of ``self``."""
        return self.of.get(local) in self.holder

    def is_free(self, name: str) -> bool:
        return name not in self.fixed and (name not in self.holder or self.dead(self.holder[name]))

    def fresh(self, local: str, *wanted: str, avoid: Collection[str] = ()) -> str:
        """The first of ``wanted`` that is free; if none is, the first one with a number."""
        names = [identifier(name) for name in wanted]
        free = (name for name in names if self.is_free(name) and name not in avoid)
        numbered = (f"{names[0]}_{n}" for n in itertools.count(1))
        name = next(free, None) or next(n for n in numbered if self.is_free(n) and n not in avoid)
        return self._hold(local, name)

    def reuse(self, local: str, old: str) -> str:
        """The identifier of ``old``, whose value is dead."""
        return self._hold(local, self.of[old])

    def _hold(self, local: str, name: str) -> str:
        self.of[local] = name
        self.holder[name] = local
        return name

"""Pieces of emitted source: comments, identifiers, signatures, tables of blocks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from autoshard.frames import printable
from autoshard.layout import Layout, Shard
from autoshard.passes.codegen.printing import WIDTH, Expression, atom, literal
from autoshard.passes.ir.graph import Symbol, Symbols, TensorType
from autoshard.passes.ir.names import TAKEN, identifier, is_number, is_plain
from autoshard.passes.ir.program import Statement
from autoshard.passes.ir.sizes import Size, is_compound
from autoshard.runtime.programs.module import RankModule

_NO_ATTRIBUTES = frozenset(dir(RankModule)) | frozenset(vars(RankModule()))
"""attributes of the base classes of rank modules"""
_SHORT = {
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
    return _SHORT.get(plain, plain)


def python_path(path: str) -> str:
    """``self.layers[0].mlp`` for ``layers.0.mlp``; components that are no attributes are items."""
    text = "self"
    for part in path.split("."):
        if is_number(part):
            text += f"[{part}]"
        else:
            text += f".{part}" if is_plain(part) and part not in _NO_ATTRIBUTES else f"[{literal(part)}]"
    return text


def one_of(container: str) -> str:
    """Singular of a container's name: ``layer`` of ``model.layers``; "block" if there is none."""
    leaf = container.rpartition(".")[2]
    one = leaf[:-1] if leaf.endswith("s") and not leaf.endswith(("ss", "ies")) else ""
    return one if is_plain(one) and one not in TAKEN else "block"


def docstring(text: str) -> str:
    """``text`` of the user, escaped for a docstring."""
    return printable(text).replace("\\", "\\\\").replace('"', '\\"')


def literal_mesh(sizes: Mapping[str, int]) -> str:
    return "{" + ", ".join(f'"{a}": {n}' for a, n in sizes.items()) + "}"


def def_lines(name: str, arguments: Sequence[str]) -> list[str]:
    one = f"    def {name}({', '.join(arguments)}):"
    if len(one) <= WIDTH:
        return [one]
    inner = f"        {', '.join(arguments)}"
    if len(inner) <= WIDTH:
        return [f"    def {name}(", inner, "    ):"]
    return [f"    def {name}(", *(f"        {a}," for a in arguments), "    ):"]


def ranges(paths: Iterable[str]) -> list[tuple[str, range | None]]:
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


def listed(paths: Sequence[str]) -> str:
    return ", ".join(
        prefix if numbers is None else f"{prefix}.{numbers.start} … {prefix}.{numbers.stop - 1}"
        for prefix, numbers in ranges(paths)
    )


def block_table(classes: Iterable[tuple[str, Sequence[str]]]) -> str:
    """``BLOCKS = {...}`` from (class name, paths of its blocks)."""
    parts = list[tuple[str, str]]()
    for name, paths in classes:
        for prefix, numbers in ranges(paths):
            if numbers is None:
                parts.append((literal(prefix), name))
            else:
                each = literal(prefix.replace("{", "{{").replace("}", "}}") + ".{i}")
                parts.append((f"f{each}", f"{name} for i in {str(numbers).replace('(0, ', '(')}"))
    entries = [f"{key}: {value}" for key, value in parts]
    loops = any(" for " in value for _, value in parts)
    one = f"    BLOCKS = {{{('} | {' if loops else ', ').join(entries)}}}"
    if len(one) <= WIDTH:
        return one
    if len(parts) == 1:
        return "\n".join(["    BLOCKS = {", f"        {entries[0]}", "    }"])
    return "\n".join(
        ["    BLOCKS = (", *(f"        {'| ' if i else ''}{{{e}}}" for i, e in enumerate(entries)), "    )"]
    )


class Names:
    """Identifiers of local names in one function; those of dead values are reused."""

    def __init__(self, fixed: Iterable[str] = ()) -> None:
        self.of: dict[str, str] = {}
        self.fixed = TAKEN | set(fixed)
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

"""Small pieces of emitted source: comments, names, signatures, lists of equal blocks."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping, Sequence

from autoshard.layout import Layout, Shard
from autoshard.passes.ir import TensorType
from autoshard.passes.lower import Statement
from autoshard.passes.printing import WIDTH, literal

_NO_ATTRIBUTES = frozenset(keyword.kwlist) | frozenset(
    "MESH BLOCKS TENSORS GATHERS block_path place scope tensor_names bind_tensors release_tensors".split()
)
"""names that Python or the base classes of rank modules have taken"""
_SHORT = {
    "scaled_dot_product_attention": "attention",
    "cross_entropy_loss": "loss",
    "binary_cross_entropy_with_logits": "loss",
}
"""ops whose results read better under another name"""


def shape_text(type_: TensorType, layout: Layout) -> str:
    """``[2, 16, 64/256]``: local/global lengths; rank 0's where they differ."""
    if type_.number is not None:
        return "a number"
    local = layout.max_local_shape(type_.shape)
    parts = [
        g if not layout.axes_of(d) else f"{n}/{g}" for d, (n, g) in enumerate(zip(local, type_.lengths, strict=True))
    ]
    return "[" + ", ".join(parts) + "]"


def layout_text(layout: Layout) -> str:
    """The axes that are not plainly whole."""
    shown = [f"{layout[a]}@{a}" for a in layout.order if isinstance(layout[a], Shard) or str(layout[a])[0] == "P"]
    return " " + " ".join(shown) if shown else ""


def step_comment(s: Statement) -> str:
    """What a redistribution does, and what its backward does."""
    step = s.step
    if step is None:
        return ""
    changed = [a for a in step.src.mesh.axes if step.src[a] != step.dst[a]]
    arrow = f"{' '.join(f'{step.src[a]}@{a}' for a in changed)} → {' '.join(f'{step.dst[a]}@{a}' for a in changed)}"
    if not changed:  # the same cuts, nested in another order
        arrow = f"{step.src} → {step.dst}"
    backward = f"    backward: {step.backward.replace('_', '-')}" if step.backward else ""
    return arrow + backward


def op_name(name: str) -> str:
    """A node's name without its number."""
    plain = re.sub(r"(_\d+)+$", "", name.split("__")[0]).strip("_") or "x"
    return _SHORT.get(plain, plain)


def python_path(path: str) -> str:
    """``self.layers[0].mlp`` for ``layers.0.mlp``; a part that is no identifier becomes an item as well."""
    text = "self"
    for part in path.split("."):
        if part.isdigit():
            text += f"[{part}]"
        else:
            text += f".{part}" if part.isidentifier() and part not in _NO_ATTRIBUTES else f"[{literal(part)}]"
    return text


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
    """Paths as (prefix, range of numbers), or (path, None)."""
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


def range_arguments(numbers: range) -> str:
    return str(numbers.stop) if numbers.start == 0 else f"{numbers.start}, {numbers.stop}"


def listed(paths: Sequence[str]) -> str:
    return ", ".join(
        prefix if numbers is None else f"{prefix}.{numbers.start} … {prefix}.{numbers.stop - 1}"
        for prefix, numbers in ranges(paths)
    )

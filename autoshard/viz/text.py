"""A plan as an indented text tree: modules, operations with layouts, collectives in place."""

from __future__ import annotations

from autoshard.frames import printable
from autoshard.passes.ir.units import show_bytes, show_seconds
from autoshard.report.record import Record
from autoshard.report.text import show_layout
from autoshard.viz.tree import Box, Item, drawing


def tree_text(plan: Record) -> str:
    """``plan`` as an indented tree; equal layers once, with ``×n``; control characters escaped."""
    lines: list[str] = []
    _box(drawing(plan).root, plan, "", lines)
    return "\n".join(lines) + "\n"


def item_text(item: Item, plan: Record) -> str:
    """One line for an operation, tensor or redistribution step."""
    if item.kind == "comm":
        return "  ".join(
            f"{'▼' if c.phase == 'forward' else '▲'} {c.kind}@{','.join(c.axes)} {show_bytes(c.bytes)} "
            f"{show_seconds(c.seconds)}"
            for c in (plan.collectives[i] for i in item.collectives)
        )
    if item.kind == "tensor":
        return f"{item.title} {list(plan.shapes[item.name])} {show_layout(plan.layouts[item.name])}"
    choice = plan.choices[item.name]
    made = ", ".join(f"{list(plan.shapes[o])} {show_layout(plan.layouts[o])}" for o in choice.outputs)
    note = "" if choice.has_rule else "  (replicated: no rule)"
    time = f"  {show_seconds(choice.seconds)}" if choice.seconds else ""
    return f"{item.title} → {made}{time}{note}"


def _box(box: Box, plan: Record, indent: str, lines: list[str]) -> None:
    count = f"  ×{len(box.members)}" if len(box.members) > 1 else ""
    name = f"  ({box.class_name})" if box.class_name and box.class_name != box.title else ""
    lines.append(printable(f"{box.title}{name}{count}"))
    for i, child in enumerate(box.children):
        last = i == len(box.children) - 1
        inner: list[str] = []
        if isinstance(child, Box):
            _box(child, plan, "", inner)
        else:
            inner.append(printable(_marked(child, plan)))
        for j, line in enumerate(inner):
            branch = ("└─ " if last else "├─ ") if j == 0 else ("   " if last else "│  ")
            lines.append(indent + branch + line)


def _marked(item: Item, plan: Record) -> str:
    mark = {"op": "", "tensor": "· ", "comm": "⬡ "}[item.kind]
    return mark + item_text(item, plan)

"""Graphviz DOT and SVG of a plan: module clusters, operation boxes, collective hexagons."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

from autoshard.errors import PlanError
from autoshard.frames import printable
from autoshard.passes.ir.units import show_bytes, show_seconds
from autoshard.report.record import Record
from autoshard.report.text import show_layout
from autoshard.viz.tree import Box, Item, drawing

# Fill colours of sharded tensors, partial sums and replicated tensors; labels have the layouts.
_CUT, _PARTIAL, _WHOLE = "#cfe2ff", "#ffdcb8", "#ffffff"


def dot(plan: Record) -> str:
    """The plan in the DOT language."""
    drawn = drawing(plan)
    title = f"{plan.title or 'model'} on {plan.mesh.hardware.name}, mesh {plan.mesh}"
    lines = [
        "digraph plan {",
        f"  label={quoted(title)};",
        '  graph [rankdir=TB, fontname="DejaVu Sans", labelloc=t, compound=true];',
        '  node [shape=box, style=filled, fontname="DejaVu Sans Mono", fontsize=10];',
        '  edge [color="#66748a", fontname="DejaVu Sans Mono", fontsize=9];',
    ]
    counter = iter(range(1 << 60))
    for child in drawn.root.children:
        _draw(child, plan, "  ", counter, lines)
    lines += [f"  n{a} -> n{b};" for a, b, _ in drawn.edges]
    return "\n".join([*lines, "}"]) + "\n"


def svg(plan: Record) -> str:
    """The plan drawn by Graphviz. Raises :class:`PlanError` if ``dot`` is missing or fails."""
    program = shutil.which("dot")
    if program is None:
        raise PlanError("an .svg needs Graphviz's `dot` program (apt-get install graphviz); .dot and .html do not")
    run = subprocess.run([program, "-Tsvg"], input=dot(plan), capture_output=True, text=True, encoding="utf-8")
    if run.returncode != 0:
        raise PlanError(f"Graphviz could not draw the plan: {run.stderr.strip()[:500]}")
    return run.stdout


def quoted(*lines: str) -> str:
    """A DOT string of centred lines, escaped."""
    escaped = (printable(line).replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return '"' + "\\n".join(escaped) + '"'


def _draw(child: Box | Item, plan: Record, indent: str, counter: Iterator[int], lines: list[str]) -> None:
    if isinstance(child, Item):
        lines.append(f"{indent}n{child.id} [{_attributes(child, plan)}];")
        return
    times = f" ×{len(child.members)}" if len(child.members) > 1 else ""
    lines.append(f"{indent}subgraph cluster_{next(counter)} {{")
    kind = f" ({child.class_name})" if child.class_name else ""
    label = quoted(f"{child.title}{times}{kind}")
    lines.append(f'{indent}  label={label}; style="rounded"; color="#98a2b0";')
    for inner in child.children:
        _draw(inner, plan, indent + "  ", counter, lines)
    lines.append(f"{indent}}}")


def _attributes(item: Item, plan: Record) -> str:
    if item.kind == "comm":
        parts = (plan.collectives[i] for i in item.collectives)
        text = [f"{c.kind}@{','.join(c.axes)} {c.phase} {show_bytes(c.bytes)} {show_seconds(c.seconds)}" for c in parts]
        return f'shape=hexagon, fillcolor="#fde8d4", label={quoted(*text)}'
    if item.kind == "tensor":
        return f'shape=ellipse, fillcolor="#fff9e6", label={quoted(item.title, *_value(plan, item.name))}'
    choice = plan.choices[item.name]
    values = [line for o in choice.outputs for line in _value(plan, o)]
    layout = plan.layouts[choice.outputs[0]] if choice.outputs else None
    color = _CUT if "S(" in str(layout) else _PARTIAL if "P@" in str(layout) else _WHOLE
    return f'fillcolor="{color}", label={quoted(item.title, *values)}'


def _value(plan: Record, name: str) -> tuple[str, str]:
    return str(list(plan.shapes[name])), show_layout(plan.layouts[name])

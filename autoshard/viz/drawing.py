"""The drawing of a plan, a tree of module boxes, and its renderings as Graphviz DOT and text. Equal
layers are one box, a module of one operation is that operation, long boxes are split."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autoshard.errors import PlanError
from autoshard.frames import printable
from autoshard.passes.ir.text import show_bytes, show_seconds
from autoshard.passes.rules.facts import is_view_named
from autoshard.report.record import Choice, Collective, Record
from autoshard.report.text import layer_glob, layer_numbers, short_op, show_layout

MOST_CHILDREN = 150
"""most children of a box; a longer box is split into parts"""


@dataclass
class Item:
    """A leaf: an operation, a parameter, buffer or input, or collectives of a redistribution."""

    id: int
    kind: str
    """op, tensor or comm"""
    title: str
    name: str
    """op: key of ``plan.choices``; tensor, comm: name of the value"""
    fqn: str
    collectives: tuple[int, ...] = ()
    """comm: positions in ``plan.collectives``; forward first"""
    times: int = 1
    """number of equal items that it stands for"""


@dataclass
class Box:
    """A module, or a part of a long one. ``members``: module paths that it stands for."""

    path: str
    title: str
    class_name: str
    members: tuple[str, ...]
    children: list[Box | Item] = field(default_factory=list)

    def items(self) -> Iterator[Item]:
        for child in self.children:
            if isinstance(child, Box):
                yield from child.items()
            else:
                yield child


@dataclass(frozen=True)
class Drawing:
    """A tree of boxes. ``edges``: (source item, target item, value) between drawn items."""

    plan: Record
    root: Box
    edges: tuple[tuple[int, int, str], ...]

    def representative(self, fqn: str) -> str:
        """``fqn`` in the layer drawn for it: ``blocks.7.mlp`` → ``blocks.1.mlp``."""
        box = self.root
        while True:
            inner = next((b for b in _boxes(box) if _member(b, fqn) is not None), None)
            if inner is None:
                return fqn
            fqn = inner.path + fqn[len(_member(inner, fqn) or "") :]
            box = inner


def _boxes(box: Box) -> Iterator[Box]:
    """Child modules of ``box``, also those inside its parts."""
    for child in box.children:
        if isinstance(child, Box):
            if child.path == box.path:
                yield from _boxes(child)
            else:
                yield child


def _member(box: Box, fqn: str) -> str | None:
    return next((m for m in box.members if fqn == m or fqn.startswith(m + ".")), None)


def drawing(plan: Record) -> Drawing:
    """The folded and simplified drawing of ``plan``."""
    builder = _Builder(plan)
    builder.run()
    stands_for: dict[int, int] = {}
    _fold_equal_layers(builder.root, plan, stands_for)
    _inline_single_operations(builder.root)
    _split_long_boxes(builder.root)
    drawn = {item.id: item for item in builder.root.items()}
    edges: dict[tuple[int, int], str] = {}
    for src, dst, value in builder.edges:
        a, b = stands_for.get(src, src), stands_for.get(dst, dst)
        # An edge between folded layers would point from the end of their box to its beginning.
        if (a < b or (a == src and b == dst)) and a != b and a in drawn and b in drawn:
            edges.setdefault((a, b), value)
    return Drawing(plan, builder.root, tuple((a, b, value) for (a, b), value in edges.items()))


def is_view_choice(choice: Choice) -> bool:
    """Whether the operation is a view of its operand."""
    return is_view_named(choice.op)


def layout_change(c: Collective) -> tuple[str, str]:
    """(source layout, target layout) of the first value of ``c``; empty for a sum inside an op."""
    found = re.fullmatch(r".*?: (.*) → (.*?)(?: \(.*\))?", c.reasons[0], re.DOTALL)
    return (found.group(1), found.group(2)) if found and c.op != c.value else ("", "")


class _Builder:
    def __init__(self, plan: Record) -> None:
        self.plan = plan
        self.root = Box("", plan.title or "model", plan.title, ("",))
        self.boxes = {"": self.root}
        self.modules = set(plan.modules) | {c.fqn for c in plan.choices.values()}
        self.source: dict[str, int] = {}
        """value → item that computes it"""
        self.made: dict[tuple[str, str], int] = {}
        """(value, layout) → collective that produces it"""
        self.tensors: dict[tuple[str, str], int] = {}
        self.edges: list[tuple[int, int, str]] = []
        self.count = 0
        self.steps = _drawn_redistributions(plan)

    def run(self) -> None:
        for name, kind in self.plan.kinds.items():
            if kind == "input":
                self.source[name] = self.add("", "tensor", name, name)
        for name, choice in self.plan.choices.items():
            operands = [self.operand(v, use, name, choice) for v, use in zip(choice.inputs, choice.uses, strict=True)]
            item = self.add(choice.fqn, "op", short_op(choice), name)
            self.edges += [(src, item, v) for src, v in zip(operands, choice.inputs, strict=True) if src is not None]
            for group in self.steps.get((name, name), ()):
                self.edges.append((item, self.comm(group, choice.fqn), name))
            for out in choice.outputs:
                self.source[out] = item
        for (value, op), groups in self.steps.items():
            if not op:
                self.chain(value, groups, self.source.get(value), "")

    def add(self, path: str, kind: str, title: str, name: str, collectives: tuple[int, ...] = ()) -> int:
        item = Item(self.count, kind, title, name, path, collectives)
        self.count += 1
        self.box(path).children.append(item)
        return item.id

    def box(self, path: str) -> Box:
        if path not in self.boxes:
            parent = path
            while parent:
                parent = parent.rpartition(".")[0]
                if parent in self.modules or parent in self.boxes:
                    break
            title = path[len(parent) + 1 :] if parent else path
            made = Box(path, title, self.plan.modules.get(path, ""), (path,))
            self.boxes[path] = made
            self.box(parent).children.append(made)
        return self.boxes[path]

    def operand(self, value: str, use: str, op: str, choice: Choice) -> int | None:
        """The item that an operation reads ``value`` from, after its collectives."""
        steps = self.steps.get((value, op), ())
        if (value, use) in self.made and not steps:
            return self.made[value, use]
        kind = self.plan.kinds.get(value, "value")
        source = self.source.get(value)
        if kind in ("parameter", "buffer", "constant"):
            key = (choice.fqn, value)
            if key not in self.tensors:
                title = value[len(choice.fqn) + 1 :] if value.startswith(choice.fqn + ".") else value
                self.tensors[key] = self.add(choice.fqn, "tensor", title, value)
            source = self.tensors[key]
        end = self.chain(value, steps, source, choice.fqn)
        if steps and end is not None:
            self.made[value, use] = end
        return end

    def chain(self, value: str, groups: Sequence[tuple[int, ...]], source: int | None, path: str) -> int | None:
        for group in groups:
            before, after = layout_change(self.plan.collectives[group[0]])
            item = self.comm(group, path)
            start = self.made.get((value, before), source)
            if start is not None:
                self.edges.append((start, item, value))
            self.made[value, after] = source = item
        return source

    def comm(self, group: tuple[int, ...], path: str) -> int:
        first = self.plan.collectives[group[0]]
        return self.add(path, "comm", first.kind_on_axes, first.value, group)


def _drawn_redistributions(plan: Record) -> dict[tuple[str, str], list[tuple[int, ...]]]:
    """(value, reader) → redistribution steps in order, each as positions of its collectives; all
    inside one local form are one step."""
    found: dict[tuple[str, str], dict[tuple[str, str], list[int]]] = {}
    forward = [i for i, c in enumerate(plan.collectives) if c.phase == "forward"]
    backward = [i for i, c in enumerate(plan.collectives) if c.phase != "forward"]
    for i in (*forward, *reversed(backward)):
        c = plan.collectives[i]
        before, after = layout_change(c)
        found.setdefault((c.value, c.op), {}).setdefault((before, after), []).append(i)
    return {key: _chained_steps(groups) for key, groups in found.items()}


def _chained_steps(groups: dict[tuple[str, str], list[int]]) -> list[tuple[int, ...]]:
    """Steps in order: each starts from the layout that an earlier one ends in."""
    left = dict(groups)
    result = []
    while left:
        ends = {after for before, after in left if before != after}
        key = next((k for k in left if not k[0] or k[0] not in ends), next(iter(left)))
        result.append(tuple(left.pop(key)))
    return result


# --- folding, inlining, splitting ---


def _signature(box: Box, plan: Record) -> object:
    """Key that is equal for boxes with equal contents."""
    return (box.class_name, tuple(_item_signature(c, plan, box.path) for c in box.children))


def _item_signature(child: Box | Item, plan: Record, path: str) -> object:
    if isinstance(child, Box):
        return (layer_glob(child.title), _signature(child, plan))
    if child.kind == "op":
        c = plan.choices[child.name]
        return (c.op, c.labels, c.uses, tuple((str(plan.layouts[o]), plan.shapes[o]) for o in c.outputs), c.has_rule)
    if child.kind == "comm":
        parts = (plan.collectives[i] for i in child.collectives)
        return tuple((c.kind, c.axes, c.phase, c.bytes, layout_change(c)) for c in parts)
    inside = child.name.removeprefix(path) if child.name.startswith(path) else child.name
    return (child.kind, layer_glob(inside), plan.shapes[child.name], str(plan.layouts[child.name]))


def _fold_equal_layers(box: Box, plan: Record, stands_for: dict[int, int]) -> None:
    """Fold neighbouring boxes that differ only in layer numbers."""
    kept: list[Box | Item] = []
    last: object = None
    for child in box.children:
        if not isinstance(child, Box):
            kept.append(child)
            last = None
            continue
        signature = (layer_glob(child.path), _signature(child, plan)) if layer_glob(child.path) != child.path else None
        first = kept[-1] if kept else None
        if signature is not None and signature == last and isinstance(first, Box):
            first.members += child.members
            for old, new in zip(child.items(), first.items(), strict=True):
                stands_for[old.id] = new.id
        else:
            kept.append(child)
            last = signature
    box.children = kept
    for child in box.children:
        if isinstance(child, Box):
            _fold_inside(child, plan, stands_for)


def _fold_inside(box: Box, plan: Record, stands_for: dict[int, int]) -> None:
    before = dict(stands_for)
    _fold_equal_layers(box, plan, stands_for)
    for old, new in before.items():  # an item of a folded layer may now be folded into a sibling's
        stands_for[old] = stands_for.get(new, new)
    if len(box.members) > 1:
        leaf = layer_glob(box.title).replace("*", "{" + layer_numbers(box.members) + "}", 1)
        box.title = leaf if "{" in leaf else box.title
        for item in box.items():
            item.times *= len(box.members)


def _inline_single_operations(box: Box) -> None:
    """Draw a module of one operation as that operation."""
    children: list[Box | Item] = []
    for child in box.children:
        if isinstance(child, Box):
            _inline_single_operations(child)
            items = [c for c in child.children if isinstance(c, Item)]
            single = len(items) == len(child.children) and sum(i.kind == "op" for i in items) == 1
            if single and len(child.members) == 1:
                for item in items:
                    item.title = f"{child.title}.{item.title}" if item.kind == "tensor" else item.title
                    item.title = f"{child.title}: {item.title}" if item.kind == "op" else item.title
                children += items
                continue
        children.append(child)
    box.children = children


def _split_long_boxes(box: Box) -> None:
    """Split long lists of children into parts."""
    for child in box.children:
        if isinstance(child, Box):
            _split_long_boxes(child)
    while len(box.children) > MOST_CHILDREN:
        size = max(MOST_CHILDREN // 2, -(-len(box.children) // MOST_CHILDREN))
        parts = [box.children[i : i + size] for i in range(0, len(box.children), size)]
        box.children = [
            Box(box.path, f"part {i + 1} of {len(parts)}", "", box.members, part) for i, part in enumerate(parts)
        ]


def tree_text(plan: Record) -> str:
    """``plan`` as an indented tree; equal layers once, with ``×n``; control characters escaped."""
    lines: list[str] = []
    _box_lines(drawing(plan).root, plan, "", lines)
    return "\n".join(lines) + "\n"


def item_text(item: Item, plan: Record) -> str:
    """One line for an operation, tensor or redistribution step."""
    if item.kind == "comm":
        return "  ".join(
            f"{'▼' if c.phase == 'forward' else '▲'} {c.kind_on_axes} {show_bytes(c.bytes)} {show_seconds(c.seconds)}"
            for c in (plan.collectives[i] for i in item.collectives)
        )
    if item.kind == "tensor":
        return f"{item.title} {list(plan.shapes[item.name])} {show_layout(plan.layouts[item.name])}"
    choice = plan.choices[item.name]
    made = ", ".join(f"{list(plan.shapes[o])} {show_layout(plan.layouts[o])}" for o in choice.outputs)
    note = "" if choice.has_rule else "  (replicated: no rule)"
    time = f"  {show_seconds(choice.seconds)}" if choice.seconds else ""
    return f"{item.title} → {made}{time}{note}"


def _box_lines(box: Box, plan: Record, indent: str, lines: list[str]) -> None:
    count = f"  ×{len(box.members)}" if len(box.members) > 1 else ""
    name = f"  ({box.class_name})" if box.class_name and box.class_name != box.title else ""
    lines.append(printable(f"{box.title}{name}{count}"))
    for i, child in enumerate(box.children):
        last = i == len(box.children) - 1
        inner: list[str] = []
        if isinstance(child, Box):
            _box_lines(child, plan, "", inner)
        else:
            inner.append(printable(_marked_item_text(child, plan)))
        for j, line in enumerate(inner):
            branch = ("└─ " if last else "├─ ") if j == 0 else ("   " if last else "│  ")
            lines.append(indent + branch + line)


def _marked_item_text(item: Item, plan: Record) -> str:
    mark = {"op": "", "tensor": "· ", "comm": "⬡ "}[item.kind]
    return mark + item_text(item, plan)


# Fill colours of sharded tensors, partial sums and replicated tensors; labels have the layouts.
_SHARDED_COLOR, _PARTIAL_COLOR, _REPLICATED_COLOR = "#cfe2ff", "#ffdcb8", "#ffffff"


def dot(plan: Record) -> str:
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
        _dot_lines(child, plan, "  ", counter, lines)
    lines += [f"  n{a} -> n{b};" for a, b, _ in drawn.edges]
    return "\n".join([*lines, "}"]) + "\n"


def svg(plan: Record) -> str:
    """The plan drawn by Graphviz. Raises :class:`PlanError` if ``dot`` is missing or fails."""
    program = shutil.which("dot")
    if program is None:
        raise PlanError("an .svg needs Graphviz's `dot` program (apt-get install graphviz), but .dot and .html do not")
    run = subprocess.run([program, "-Tsvg"], input=dot(plan), capture_output=True, text=True, encoding="utf-8")
    if run.returncode != 0:
        raise PlanError(f"Graphviz could not draw the plan: {run.stderr.strip()[:500]}")
    return run.stdout


def quoted(*lines: str) -> str:
    """A DOT string of centred lines, escaped."""
    escaped = (printable(line).replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return '"' + "\\n".join(escaped) + '"'


def _dot_lines(child: Box | Item, plan: Record, indent: str, counter: Iterator[int], lines: list[str]) -> None:
    if isinstance(child, Item):
        lines.append(f"{indent}n{child.id} [{_dot_attributes(child, plan)}];")
        return
    times = f" ×{len(child.members)}" if len(child.members) > 1 else ""
    lines.append(f"{indent}subgraph cluster_{next(counter)} {{")
    kind = f" ({child.class_name})" if child.class_name else ""
    label = quoted(f"{child.title}{times}{kind}")
    lines.append(f'{indent}  label={label}; style="rounded"; color="#98a2b0";')
    for inner in child.children:
        _dot_lines(inner, plan, indent + "  ", counter, lines)
    lines.append(f"{indent}}}")


def _dot_attributes(item: Item, plan: Record) -> str:
    if item.kind == "comm":
        parts = (plan.collectives[i] for i in item.collectives)
        text = [f"{c.kind_on_axes} {c.phase} {show_bytes(c.bytes)} {show_seconds(c.seconds)}" for c in parts]
        return f'shape=hexagon, fillcolor="#fde8d4", label={quoted(*text)}'
    if item.kind == "tensor":
        return f'shape=ellipse, fillcolor="#fff9e6", label={quoted(item.title, *_value_label(plan, item.name))}'
    choice = plan.choices[item.name]
    values = [line for o in choice.outputs for line in _value_label(plan, o)]
    layout = plan.layouts[choice.outputs[0]] if choice.outputs else None
    color = _SHARDED_COLOR if "S(" in str(layout) else _PARTIAL_COLOR if "P@" in str(layout) else _REPLICATED_COLOR
    return f'fillcolor="{color}", label={quoted(item.title, *values)}'


def _value_label(plan: Record, name: str) -> tuple[str, str]:
    return str(list(plan.shapes[name])), show_layout(plan.layouts[name])

"""A plan as a self-contained HTML page that needs no server and no network."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from typing import Any

from autoshard.layout import Layout
from autoshard.report.pipeline import stage_rows
from autoshard.report.record import Record, local_bytes
from autoshard.report.summary import setting_text, strategy_text, summary_rows, utilisation, what_if, work_seconds
from autoshard.report.text import (
    collective_rows,
    hot_spots,
    layer_glob,
    memory_parts,
    parameter_rows,
    short_op,
    show_layout,
    shown_labels,
)
from autoshard.viz.drawing import Box, Drawing, Item, drawing, is_view_choice
from autoshard.viz.trace import memory_over_time, pipeline_chart

_SCRIPTS = (
    *("dom.js", "layout.js", "graph.js", "details.js", "tables.js", "charts.js", "overview.js", "ranks.js"),
    *("pipeline.js", "app.js"),
)


def html(plan: Record, before: Record | None = None) -> str:
    """``plan`` as an HTML page; with ``before``, the two side by side. Text of the model is
    embedded as JSON and inserted as text nodes, never as markup."""
    data = [_Payload(p).build(name) for p, name in ((plan, "after"), (before, "before")) if p is not None]
    text = json.dumps({"plans": data}, ensure_ascii=True, separators=(",", ":"))
    safe = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    page = _asset("page.html").replace("/*style*/", _asset("style.css"))
    page = page.replace("/*script*/", "\n".join(_asset(name) for name in _SCRIPTS))
    return page.replace("/*data*/", safe)


@cache
def _asset(name: str) -> str:
    return files("autoshard.viz").joinpath(name).read_text("utf-8")


class _Payload:
    """JSON data for the page's script; layouts and values are numbered, so each is written once."""

    def __init__(self, plan: Record) -> None:
        self.plan = plan
        self.layouts: dict[str, int] = {}
        self.values: dict[str, int] = {}
        self.item_of_collective: dict[int, int] = {}

    def build(self, name: str) -> dict[str, Any]:
        plan, drawn = self.plan, drawing(self.plan)
        tree = self.box(drawn.root)
        mfu, hfu = utilisation(plan)
        return {
            "name": name,
            "title": plan.title or "model",
            "mesh": list(plan.mesh.sizes.items()),
            "setting": setting_text(plan),
            "strategy": strategy_text(plan),
            "summary": list(summary_rows(plan)),
            "compared": list(plan.known_compared),
            "complete": plan.strategies_are_compared,
            "whatIf": list(what_if(plan)),
            "capacity": plan.mesh.hardware.memory_bytes,
            "budget": plan.memory_budget,
            "work": work_seconds(plan),
            "holders": self.holders(),
            "cost": {**asdict(plan.cost), "mfu": mfu, "hfu": hfu},
            "notes": list(plan.notes),
            "tree": tree,
            "edges": [[a, b] for a, b, _ in drawn.edges],
            "collectives": self.collectives(drawn),
            "traffic": self.traffic(),
            "parameters": [self.value(n) for n, kind in plan.kinds.items() if kind != "value"],
            "values": [self.value_row(n) for n in self.values],
            "layouts": list(self.layouts),
            "memory": _thinned(memory_over_time(plan)),
            "memoryParts": list(memory_parts(plan).items()),
            "hot": hot_spots(plan, 14),
            "pipeline": pipeline_chart(plan),
            "stages": _stage_cells(plan),
        }

    def layout(self, layout: Layout | str) -> int:
        text = layout if isinstance(layout, str) else show_layout(layout)
        return self.layouts.setdefault(text, len(self.layouts))

    def value(self, name: str) -> int:
        if name not in self.values:
            self.values[name] = len(self.values)
            self.layout(self.plan.layouts[name])
        return self.values[name]

    def value_row(self, name: str) -> list[Any]:
        plan = self.plan
        layout, shape = plan.layouts[name], plan.shapes[name]
        local = list(layout.max_local_shape(shape))
        kind, dtype = plan.kinds.get(name, "value"), plan.dtypes.get(name, "")
        return [name, kind, list(shape), local, self.layout(layout), dtype, local_bytes(plan, name)]

    def box(self, box: Box) -> dict[str, Any]:
        seconds, sent, count = self.totals(box)
        return {
            "title": box.title,
            "path": box.path,
            "cls": box.class_name,
            "members": list(box.members),
            "seconds": seconds,
            "commSeconds": sent,
            "comms": count,
            "children": [self.box(c) if isinstance(c, Box) else self.item(c) for c in box.children],
        }

    def totals(self, box: Box) -> tuple[float, float, int]:
        """(compute seconds, communication seconds, collectives) of a box and its folded layers."""
        plan, compute, sent, count = self.plan, 0.0, 0.0, 0
        for item in box.items():
            if item.kind == "op":
                compute += item.times * plan.choices[item.name].seconds
            sent += item.times * sum(plan.collectives[i].seconds for i in item.collectives)
            count += item.times * len(item.collectives)
        return compute, sent, count

    def item(self, item: Item) -> dict[str, Any]:
        row = {"id": item.id, "kind": item.kind, "title": item.title, "fqn": item.fqn, "times": item.times}
        if item.kind == "op":
            return row | self.op(item.name)
        if item.kind == "comm":
            self.item_of_collective |= dict.fromkeys(item.collectives, item.id)
            return row | {"collectives": list(item.collectives)}
        return row | {"value": self.value(item.name)}

    def op(self, name: str) -> dict[str, Any]:
        c = self.plan.choices[name]
        return {
            "name": name,
            "op": c.op,
            "short": short_op(c),
            "source": c.source,
            "labels": shown_labels(c.labels),
            "flops": c.flops,
            "seconds": c.seconds,
            "view": is_view_choice(c),
            "rule": c.has_rule,
            "inputs": [[self.value(v), self.layout(use)] for v, use in zip(c.inputs, c.uses, strict=True)],
            "outputs": [self.value(o) for o in c.outputs],
            "others": [[shown_labels(labels), seconds] for labels, seconds in c.alternatives],
        }

    def collectives(self, drawn: Drawing) -> list[list[Any]]:
        """A row per collective; its last entry is the item that shows it (of the drawn layer)."""
        by_key = {self.key(i): at for i, at in self.item_of_collective.items()}
        rows: list[list[Any]] = []
        for i, c in enumerate(self.plan.collectives):
            at = self.item_of_collective.get(i, by_key.get(self.key(i, drawn.representative(c.fqn)), -1))
            rows.append([c.kind, list(c.axes), c.phase, c.bytes, c.seconds, c.fqn, c.value, c.reason, at])
        return rows

    def holders(self) -> list[list[Any]]:
        """Rows of (name, count, shape, layout, blocks, per rank the number of its block)."""
        found: list[list[Any]] = []
        for row in parameter_rows(self.plan):
            blocks: dict[str, int] = {}
            ranks = range(min(self.plan.mesh.size, 1024))  # the most that the grid shows
            held = [blocks.setdefault(_block_text(row.layout, row.shape, rank), len(blocks)) for rank in ranks]
            found.append([row.glob, len(row.names), list(row.shape), self.layout(row.layout), list(blocks), held])
        return found

    def traffic(self) -> list[list[Any]]:
        """Rows of collectives, layers folded; the last entry is the position of their first."""
        at = {id(c): i for i, c in enumerate(self.plan.collectives)}
        rows = collective_rows(self.plan.collectives)
        return [[t.where, t.reason, t.count, t.bytes, t.seconds, at[id(t.first)]] for t in rows]

    def key(self, i: int, fqn: str | None = None) -> Any:
        c = self.plan.collectives[i]
        return (
            c.kind,
            c.axes,
            c.phase,
            c.bytes,
            c.fqn if fqn is None else fqn,
            *(r.partition(": ")[2] for r in c.reasons),
        )


def _block_text(layout: Layout, shape: tuple[int, ...], rank: int) -> str:
    """What a rank holds of a tensor, as slices: ``[0:64, :]``."""
    dims = []
    for dim, size in enumerate(shape):
        chunks = layout.chunks_of(dim, size, rank)
        if not any(length for _, length in chunks) and size:
            return "nothing"
        ranges = [f"{start}:{start + length}" for start, length in chunks]
        dims.append(":" if chunks == ((0, size),) else " and ".join(ranges))
    return f"[{', '.join(dims)}]"


def _stage_cells(plan: Record) -> list[list[Any]]:
    """Per stage (number, rank, modules, forward s, backward s, bytes sent, in flight, peak)."""
    rows = []
    for stage in stage_rows(plan):
        batch, modules = stage.times.batch, dict.fromkeys(map(layer_glob, stage.modules))
        rows.append(
            [
                *(stage.number, stage.rank, ", ".join(modules), batch.forward, batch.backward),
                *(stage.sent, stage.flying, stage.memory.peak),
            ]
        )
    return rows


def _thinned(points: tuple[tuple[float, float], ...], limit: int = 1500) -> list[list[float]]:
    """At most about ``limit`` points: the maximum of each stretch."""
    size = -(-len(points) // limit)
    stretches = (points[i : i + size] for i in range(0, len(points), size))
    return [[t, b] for t, b in (max(s, key=lambda p: p[1]) for s in stretches)]

"""Pictures of plans and layouts: HTML, Graphviz, text, timelines, blocks per rank."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autoshard.errors import PlanError
from autoshard.layout import Layout, Partial, Shard
from autoshard.report.record import Record
from autoshard.viz.drawing import dot, svg, tree_text
from autoshard.viz.html import html
from autoshard.viz.trace import trace_json

__all__ = ["dot", "html", "svg", "trace_json", "tree_text", "visualize", "visualize_layout"]

_FORMATS: dict[str, Callable[[Record], str]] = {
    ".trace.json": trace_json,  # before .json, which it also ends in
    ".json": Record.to_json,
    ".html": html,
    ".dot": dot,
    ".svg": svg,
    ".txt": tree_text,
}


def visualize(what: Any, path: str | os.PathLike[str], *, before: Any = None) -> None:
    """Draw a plan into the file ``path``, in the format of its suffix.

    ``.html``: a self-contained page; ``.dot``, ``.svg``: Graphviz; ``.txt``: a tree; ``.json``: the
    plan (``plan.schema.json``); ``.trace.json``: the predicted timeline for Perfetto.

    Args:
        what: a :class:`Plan`, or an object with a ``plan``, such as a ``ShardedModule``.
        before: another plan, shown side by side; ``.html`` only.

    Raises :class:`PlanError` for another suffix, ``before`` in another format, or missing Graphviz.
    """
    name = str(os.fspath(path)).lower()
    suffix = next((s for s in _FORMATS if name.endswith(s)), None)
    if suffix is None:
        raise PlanError(f"cannot draw a plan into {str(path)!r}: the suffix must be one of {', '.join(_FORMATS)}")
    if before is not None and suffix != ".html":
        raise PlanError(f"two plans can be compared in .html only, not in {suffix}")
    plan = _plan_of(what)
    text = html(plan, _plan_of(before)) if before is not None else _FORMATS[suffix](plan)
    Path(path).write_text(text, encoding="utf-8")


def _plan_of(what: Any) -> Record:
    plan = what if isinstance(what, Record) else getattr(what, "plan", None)
    if not isinstance(plan, Record):
        raise PlanError(f"expected a Plan or a compiled module, got {type(what).__name__}")
    return plan


MOST_BLOCKS = 16
"""most blocks drawn per row and column; a note says if there are more"""


def visualize_layout(layout: Layout, shape: Sequence[int]) -> str:
    """``layout`` of a tensor as a text grid of blocks, each with its index ranges and ranks.

    Rows are the first sharded dim, columns the last; further sharded dims have one grid per block.
    Raises :class:`~autoshard.errors.LayoutError` if a sharded dim does not exist.

        >>> print(visualize_layout(Layout({"dp": 2, "tp": 2}, {"tp": Shard(1)}), [4, 6]))
        [4, 6]  S(1)@tp R@dp  over dp=2, tp=2
                ┌───────┬───────┐
                │ 0:3   │ 3:6   │  dim 1
                ├───────┼───────┤
                │ 0 2   │ 1 3   │
                └───────┴───────┘
        2 ranks hold every block
    """
    layout.check(shape)
    mesh = layout.mesh
    lines = [f"{list(shape)}  {layout}  over {mesh}"]
    cut = sorted({p.dim for p in layout.placements if isinstance(p, Shard)})
    blocks: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank in range(mesh.size):
        for block in itertools.product(*(layout.chunks_of(d, shape[d], rank) for d in cut)):
            blocks.setdefault(block, []).append(rank)
    row_dim = cut[0] if len(cut) > 1 else None
    column_dim = cut[-1] if cut else None
    others = [d for d in cut if d not in (row_dim, column_dim)]
    for fixed in sorted({tuple(key[cut.index(d)] for d in others) for key in blocks}):
        if others:
            lines.append(", ".join(f"dim {d} {_range_text(part)}" for d, part in zip(others, fixed, strict=True)))
        chosen = {
            (_range_along(key, cut, row_dim), _range_along(key, cut, column_dim)): ranks
            for key, ranks in blocks.items()
            if tuple(key[cut.index(d)] for d in others) == fixed
        }
        lines += _grid(chosen, row_dim, column_dim)
    return "\n".join(lines + _footer(layout, blocks))


BlockRange = tuple[int, int]
"""(start, length)"""


def _range_along(key: tuple[BlockRange, ...], cut: list[int], dim: int | None) -> BlockRange:
    return key[cut.index(dim)] if dim is not None else (0, 0)


def _range_text(part: BlockRange) -> str:
    return f"{part[0]}:{part[0] + part[1]}" if part[1] else "empty"


def _grid(
    blocks: dict[tuple[BlockRange, BlockRange], list[int]], row_dim: int | None, column_dim: int | None
) -> list[str]:
    rows, columns = sorted({r for r, _ in blocks}), sorted({c for _, c in blocks})
    drawn_rows, drawn_columns = rows[:MOST_BLOCKS], columns[:MOST_BLOCKS]
    head = [_range_text(c) if column_dim is not None else "all" for c in drawn_columns]
    left = [f"dim {row_dim} {_range_text(r)}" if row_dim is not None else "" for r in drawn_rows]
    cells = [[_ranks_text(blocks.get((r, c), [])) for c in drawn_columns] for r in drawn_rows]
    widths = [max(5, *(len(row[i]) for row in cells), len(head[i])) for i in range(len(head))]
    margin = max(7, *(len(x) for x in left))

    def rule(ends: str) -> str:
        return " " * (margin + 1) + ends[0] + ends[1].join("─" * (w + 2) for w in widths) + ends[2]

    def row(label: str, texts: list[str]) -> str:
        return f"{label:>{margin}} │ " + " │ ".join(f"{t:<{w}}" for t, w in zip(texts, widths, strict=True)) + " │"

    lines = [rule("┌┬┐"), row("", head) + (f"  dim {column_dim}" if column_dim is not None else "")]
    for label, texts in zip(left, cells, strict=True):
        lines += [rule("├┼┤"), row(label, texts)]
    lines.append(rule("└┴┘"))
    if len(rows) > MOST_BLOCKS or len(columns) > MOST_BLOCKS:
        lines.append(f"the first {len(drawn_rows)}×{len(drawn_columns)} of {len(rows)}×{len(columns)} blocks")
    return lines


def _ranks_text(ranks: list[int]) -> str:
    shown = " ".join(map(str, ranks[:8]))
    return shown + (f" … {ranks[-1]}" if len(ranks) > 8 else "")


def _footer(layout: Layout, blocks: dict[tuple[BlockRange, ...], list[int]]) -> list[str]:
    lines = []
    copies = max(len(ranks) for ranks in blocks.values())
    partial = layout.axes_with(Partial)
    if partial:
        lines.append(f"the value is the combination of what the ranks along {', '.join(partial)} hold")
    if copies > 1 and not partial:
        lines.append(f"{copies} ranks hold every block")
    return lines

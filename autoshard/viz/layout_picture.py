"""Text picture of a layout: which rank holds which block of a tensor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from autoshard.layout import Layout, Partial, Shard

WIDEST = 16
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
        every block lies on 2 ranks
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
            lines.append(", ".join(f"dim {d} {_span(part)}" for d, part in zip(others, fixed, strict=True)))
        chosen = {
            (_part(key, cut, row_dim), _part(key, cut, column_dim)): ranks
            for key, ranks in blocks.items()
            if tuple(key[cut.index(d)] for d in others) == fixed
        }
        lines += _grid(chosen, row_dim, column_dim)
    return "\n".join(lines + _footer(layout, blocks))


Part = tuple[int, int]
"""(start, length)"""


def _part(key: tuple[Part, ...], cut: list[int], dim: int | None) -> Part:
    return key[cut.index(dim)] if dim is not None else (0, 0)


def _span(part: Part) -> str:
    return f"{part[0]}:{part[0] + part[1]}" if part[1] else "empty"


def _grid(blocks: dict[tuple[Part, Part], list[int]], row_dim: int | None, column_dim: int | None) -> list[str]:
    rows, columns = sorted({r for r, _ in blocks}), sorted({c for _, c in blocks})
    drawn_rows, drawn_columns = rows[:WIDEST], columns[:WIDEST]
    head = [_span(c) if column_dim is not None else "all" for c in drawn_columns]
    left = [f"dim {row_dim} {_span(r)}" if row_dim is not None else "" for r in drawn_rows]
    cells = [[_ranks(blocks.get((r, c), [])) for c in drawn_columns] for r in drawn_rows]
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
    if len(rows) > WIDEST or len(columns) > WIDEST:
        lines.append(f"the first {len(drawn_rows)}×{len(drawn_columns)} of {len(rows)}×{len(columns)} blocks")
    return lines


def _ranks(ranks: list[int]) -> str:
    shown = " ".join(map(str, ranks[:8]))
    return shown + (f" … {ranks[-1]}" if len(ranks) > 8 else "")


def _footer(layout: Layout, blocks: dict[tuple[Part, ...], list[int]]) -> list[str]:
    lines = []
    copies = max(len(ranks) for ranks in blocks.values())
    partial = layout.axes_with(Partial)
    if partial:
        lines.append(f"the value is the combination of what the ranks along {', '.join(partial)} hold")
    if copies > 1 and not partial:
        lines.append(f"every block lies on {copies} ranks")
    return lines

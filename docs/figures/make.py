"""Figures of layouts, drawn from the library's own answer to "which elements does rank r hold".

python docs/figures/make.py     # writes placements.svg, meshes.svg and schemes.svg beside this file
"""

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

from autoshard import Invariant, Layout, Mesh, Partial, Replicate, Shard

ROWS = COLUMNS = 4
CELL, GAP, LABEL, LINE, HEAD = 12, 18, 190, 84, 46
COLOURS = ("#3f6fb5", "#c0792a", "#4b8f5a", "#8a5aa8")

Placements = Mapping[str, object]
Row = tuple[str, Mesh, Placements]


def panel(layout: Layout, rank: int, left: int, top: int) -> Iterator[str]:
    """The global tensor as a grid; what ``rank`` holds of it is filled: hatched where it is a summand."""
    (first, rows), (start, columns) = layout.chunk_of(0, ROWS, rank), layout.chunk_of(1, COLUMNS, rank)
    summand = any(isinstance(placement, Partial) for placement in layout.placements)
    fill = "url(#summand)" if summand else COLOURS[rank % 4]
    held = f'x="{left + start * CELL}" y="{top + first * CELL}" width="{columns * CELL}" height="{rows * CELL}"'
    width, height = COLUMNS * CELL, ROWS * CELL
    lines = [f"M{left} {top + i * CELL}h{width}" for i in range(ROWS + 1)]
    lines += [f"M{left + i * CELL} {top}v{height}" for i in range(COLUMNS + 1)]
    yield f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="#f3f3f3"/>'
    yield f'<rect {held} fill="{fill}"/>'
    yield f'<path d="{"".join(lines)}" stroke="#999" stroke-width=".5"/>'


def text(x: int, y: int, words: str, size: int = 12, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}">{escape(words)}</text>'


def figure(title: str, rows: list[Row], gradient: bool) -> str:
    """One line per layout: what each rank holds of the value and, if asked, of its gradient."""
    step, ranks = COLUMNS * CELL + GAP, rows[0][1].size
    groups = ("value", "gradient") if gradient else ("value",)
    width, height = LABEL + len(groups) * (ranks * step + GAP), HEAD + len(rows) * LINE
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif">',
        f"<title>{escape(title)}</title>",
        '<defs><pattern id="summand" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="6" height="6" fill="#fff"/><rect width="3" height="6" fill="#b0453f"/></pattern></defs>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for number, group in enumerate(groups):
        left = LABEL + number * (ranks * step + GAP)
        lines.append(text(left, 18, group, 13, "bold"))
        for rank in range(ranks):
            place = (
                "" if len(rows[0][1].axes) == 1 else f" ({rank // rows[0][1].shape[1]},{rank % rows[0][1].shape[1]})"
            )
            lines.append(text(left + rank * step, 36, f"rank {rank}{place}", 10))
        for line, (_, mesh, placements) in enumerate(rows):
            layout = Layout(mesh, placements)
            shown = layout if group == "value" else layout.gradient()
            for rank in range(ranks):
                lines += panel(shown, rank, left + rank * step, HEAD + line * LINE + 4)
    for line, (name, mesh, placements) in enumerate(rows):
        top = HEAD + line * LINE + 24
        lines += [text(8, top, str(Layout(mesh, placements)), 13, "bold"), text(8, top + 16, name, 11)]
    return "\n".join([*lines, "</svg>", ""])


def figures() -> dict[str, str]:
    """File name → SVG."""
    line, grid = Mesh({"tp": 4}), Mesh({"dp": 2, "tp": 2})
    placements = [
        ("sharded by rows", line, {"tp": Shard(0)}),
        ("sharded by columns", line, {"tp": Shard(1)}),
        ("replicated; gradient: partial", line, {"tp": Replicate()}),
        ("replicated; gradient too", line, {"tp": Invariant()}),
        ("partial: the sum is the value", line, {"tp": Partial()}),
    ]
    meshes = [
        ("rows over dp", grid, {"dp": Shard(0), "tp": Replicate()}),
        ("columns over tp", grid, {"dp": Replicate(), "tp": Shard(1)}),
        ("rows over dp, columns over tp", grid, {"dp": Shard(0), "tp": Shard(1)}),
        ("rows over both, dp first", grid, {"dp": Shard(0), "tp": Shard(0)}),
    ]
    schemes = [
        ("a weight under DDP", grid, {"dp": Invariant(), "tp": Invariant()}),
        ("a weight under FSDP, both axes", grid, {"dp": Shard(0), "tp": Shard(0)}),
        ("HSDP: shards on tp", grid, {"dp": Invariant(), "tp": Shard(0)}),
        ("Megatron, column-parallel", grid, {"dp": Invariant(), "tp": Shard(0)}),
        ("Megatron, row-parallel", grid, {"dp": Invariant(), "tp": Shard(1)}),
        ("FSDP on dp, row-parallel on tp", grid, {"dp": Shard(0), "tp": Shard(1)}),
    ]
    return {
        "placements.svg": figure("What each rank holds of a value and of its gradient", placements, gradient=True),
        "meshes.svg": figure("Layouts on a mesh of two axes", meshes, gradient=False),
        "schemes.svg": figure("Parameters under known schemes", schemes, gradient=False),
    }


if __name__ == "__main__":
    for name, svg in figures().items():
        (Path(__file__).parent / name).write_text(svg, encoding="utf-8")

"""What ranks hold of an array in a layout, written from the definitions."""

from __future__ import annotations

import numpy as np

from autoshard.layout import Layout, Partial

Chunks = list[np.ndarray]


def spread(layout: Layout, full: np.ndarray, rng: np.random.Generator) -> Chunks:
    """Chunks that hold ``full`` in ``layout``; Partial: random summands, or values that max and min ignore."""
    chunks = [full[box(layout, full.shape, r)].copy() for r in range(layout.mesh.size)]
    for axis, placement in zip(layout.mesh.axes, layout.placements, strict=True):
        if not isinstance(placement, Partial):
            continue
        for group in layout.mesh.groups(axis):
            noise = [rng.integers(0, 9, chunks[r].shape) for r in group[1:]]
            if placement.op == "sum":
                chunks[group[0]] = chunks[group[0]] - sum(noise)
            for r, x in zip(group[1:], noise, strict=True):
                chunks[r] = {"sum": x, "max": chunks[r] - x, "min": chunks[r] + x}[placement.op]
    return chunks


def box(layout: Layout, shape: tuple[int, ...], rank: int) -> tuple[slice, ...]:
    spans = [layout.chunk_of(d, n, rank) for d, n in enumerate(shape)]
    return tuple(slice(start, start + length) for start, length in spans)


def holds(layout: Layout, chunks: Chunks, full: np.ndarray) -> bool:
    """Whether the ranks hold ``full`` as ``layout`` says."""
    mesh, partial = layout.mesh, layout.axes_with(Partial)
    for rank in range(mesh.size):
        parts = [chunks[r] for r in (mesh.group(rank, partial) if partial else (rank,))]
        expected = full[box(layout, full.shape, rank)]
        if any(p.shape != expected.shape for p in parts):
            return False
        op = layout[partial[0]].op if partial else "sum"
        total = {"sum": sum, "max": np.maximum.reduce, "min": np.minimum.reduce}[op](parts)
        if not np.array_equal(total, expected):
            return False
    return True

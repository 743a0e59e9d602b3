"""Shards of a tensor: scatter it by a layout, and compare ranks' shards with the full tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoshard.errors import RuleError
from autoshard.layout import Layout, Partial

Tensors = list[torch.Tensor]


def scatter(value: torch.Tensor, layout: Layout, random: torch.Generator) -> Tensors:
    """Local tensors of all ranks for ``value`` in ``layout``; Partial axes get random summands."""
    summed = layout.axes_with(Partial)
    count = layout.mesh.size_of(summed) if summed else 1
    summands = [noise(value, random) for _ in range(count - 1)]
    rest = value.clone()
    for s in summands:
        rest = rest - s
    summands.append(rest)
    parts = [_cut(summands[layout.mesh.index_along(r, summed)], layout, r) for r in range(layout.mesh.size)]
    return [part.clone(memory_format=torch.contiguous_format) for part in parts]


def _cut(value: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    for d, n in enumerate(value.shape):
        chunks = layout.chunks_of(d, n, rank)
        if chunks != ((0, n),):
            value = torch.cat([value.narrow(d, *chunk) for chunk in chunks], d)
    return value


def noise(like: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Random tensor of the same shape, dtype and device; raises :class:`RuleError` for bool."""
    if like.is_floating_point() or like.is_complex():
        return torch.randn(like.shape, generator=random, dtype=like.dtype, device=random.device).to(like.device)
    if like.dtype == torch.bool:
        raise RuleError("a boolean tensor has no summands; leave Partial out of strategies for bool")
    return torch.randint(-9, 10, like.shape, generator=random, device=random.device).to(like)


def differs(parts: Tensors, layout: Layout, expected: torch.Tensor, tolerance: float) -> str | None:
    """Error text if the ranks' shards in ``layout`` do not form ``expected``; None if they do.

    ``tolerance`` is relative to the largest element. Replicas are compared each; summands are
    added.
    """
    mesh, summed = layout.mesh, layout.axes_with(Partial)
    for r, part in enumerate(parts):
        if tuple(part.shape) != layout.local_shape(expected.shape, r):
            want = list(layout.local_shape(expected.shape, r))
            return f"rank {r} holds shape {list(part.shape)}, should hold {want} of {list(expected.shape)}"
        if part.dtype != expected.dtype:
            return f"rank {r} holds {part.dtype}, should hold {expected.dtype}"
    for r in range(mesh.size):
        group = mesh.group(r, summed) if summed else (r,)
        found = parts[group[0]]
        for other in group[1:]:
            found = _combine(found, parts[other], layout, summed)
        wrong = _distance(found, _cut(expected, layout, r), tolerance)
        if wrong:
            what = f"combined over {', '.join(summed)}" if summed else "its part"
            return f"rank {r}, {what}: {wrong}"
    return None


def _combine(a: torch.Tensor, b: torch.Tensor, layout: Layout, axes: Sequence[str]) -> torch.Tensor:
    p = layout[axes[0]]
    op = p.op if isinstance(p, Partial) else "sum"
    return a + b if op == "sum" else torch.maximum(a, b) if op == "max" else torch.minimum(a, b)


def _distance(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str | None:
    if tolerance == float("inf") or not expected.numel():
        return None
    if not (expected.is_floating_point() or expected.is_complex()):
        bad = int((found != expected).sum())
        return f"{bad} of {expected.numel()} elements differ" if bad else None
    if torch.allclose(found, expected, rtol=0, atol=tolerance, equal_nan=True):  # the usual case
        return None
    scale = float(expected[expected.isfinite()].abs().max()) if bool(expected.isfinite().any()) else 0.0
    if torch.allclose(found, expected, rtol=0, atol=tolerance * max(scale, 1.0), equal_nan=True):
        return None
    error = float((found - expected).abs().nan_to_num(float("inf")).max())
    return f"largest error {error:.3g} (largest element {scale:.3g})"

"""A redistribution with its steps, and the runtime call of each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autoshard.layout import Layout, Partial, Placement, R, Shard
from autoshard.passes.ir.program import Local, Step, bytes_text, spell


@dataclass(frozen=True)
class Redistribution:
    """The cheapest sequence of steps from ``src`` to ``dst``. Bytes are ring bytes per rank."""

    src: Layout
    dst: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    steps: tuple[Step, ...]
    forward_bytes: float
    backward_bytes: float
    seconds: float
    """predicted seconds of all steps, with the backward if ``grad``"""
    peak_numel: int
    """elements of the largest local tensor, both ends included"""
    dst_shape: tuple[int, ...] | None = None
    """the global shape at the end, if reshaped"""
    minimal: bool = True
    """whether no cheaper sequence exists; unknown if more than five mesh axes change"""

    @property
    def gathered(self) -> tuple[str, ...]:
        """Axes sharded at both ends that no reshape can keep: gather, reshape, slice."""
        cut = [s.src for s in self.steps if s.kind == "reshape"]
        ends = [a for a in self.src.mesh.axes if isinstance(self.src[a], Shard) and isinstance(self.dst[a], Shard)]
        return tuple(a for a in ends if any(not isinstance(layout[a], Shard) for layout in cut))

    @property
    def bytes(self) -> float:
        """Ring bytes per rank, forward and, if ``grad``, backward."""
        return self.forward_bytes + self.backward_bytes

    def __str__(self) -> str:
        head = f"{self.src} → {self.dst}  {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        head += f" → {list(self.dst_shape)}" if self.dst_shape is not None else ""
        if not self.steps:
            return f"{head}: nothing to do"
        total = f"{bytes_text(self.forward_bytes)} forward"
        total += f", {bytes_text(self.backward_bytes)} backward" if self.grad else ""
        lines = [f"{head}: {total}, {self.seconds * 1e6:.3g} µs, peak {self.peak_numel} elements"]
        lines += [f"  {i}. {step}" for i, step in enumerate(self.steps, 1)]
        if not self.minimal:
            lines.append("  too many axes change at once for one search: planned in parts, perhaps not the cheapest")
        if self.gathered:
            lines.append(
                f"  gathered for the reshape, whose shapes have no factor to cut in common: {', '.join(self.gathered)}"
            )
        return "\n".join(lines)


def after_each_other(legs: Sequence[Redistribution], steps: tuple[Step, ...]) -> Redistribution:
    """Legs joined to one redistribution with these steps."""
    return replace(
        legs[0],
        dst=legs[-1].dst,
        steps=steps,
        forward_bytes=sum(leg.forward_bytes for leg in legs),
        backward_bytes=sum(leg.backward_bytes for leg in legs),
        seconds=sum(leg.seconds for leg in legs),
        peak_numel=max(leg.peak_numel for leg in legs),
    )


def emit(step: Step) -> tuple[str, tuple[Any, ...], Mapping[str, Any]]:
    """(function name, positional arguments after the tensor, keyword arguments) of a runtime call.

    Several axes are a tuple, one is its name. ``size`` is given for uneven shards: an int if no
    axis is left on the dim, else a :class:`Local`.
    """
    if step.kind == "reshape":
        cuts = [(n, step.dst.axes_of(d)) for d, n in enumerate(step.to_shape)]
        return step.kind, ([Local(n, cut) if cut else n for n, cut in cuts],), {}
    axes: Any = spell(step.axes)
    if step.kind in ("enter", "leave"):
        return step.kind, (axes,), {}
    if step.kind == "permute":
        # Uneven chunks: only one dim is renumbered, with its full nest.
        dims = [d for d in range(len(step.shape)) if step.src.axes_of(d) == step.axes]
        uneven = dims and step.shape[dims[0]] % step.src.mesh.size_of(step.axes)
        return step.kind, (axes, step.order), {"dim": dims[0], "size": step.shape[dims[0]]} if uneven else {}
    if step.kind == "reduce_scatter":
        return step.kind, (*step.dims, axes), {}
    if step.kind == "slice":
        return step.kind, (*step.dims, axes), {"of": _letter(step.src[step.axes[0]])}
    if step.kind == "partial":
        return step.kind, (axes,), {"of": _letter(step.src[step.axes[0]])}
    if step.kind == "all_reduce":
        source = step.src[step.axes[0]]
        op = source.op if isinstance(source, Partial) else "sum"
        extra = {} if op == "sum" else {"op": op}
        return step.kind, (axes,), {"to": _letter(step.dst[step.axes[0]]), **extra}
    kwargs: dict[str, Any] = {}
    if step.kind == "all_gather":
        kwargs["to"] = _letter(step.dst[step.axes[0]])
    dim = step.dims[0]
    if step.shape[dim] % step.src.mesh.size_of(step.src.axes_of(dim)):
        left = step.dst.axes_of(dim)
        kwargs["size"] = Local(step.shape[dim], left) if left else step.shape[dim]
    return step.kind, (*step.dims, axes), kwargs


def _letter(placement: Placement) -> str:
    return "R" if placement == R else "I"

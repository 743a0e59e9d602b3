"""Reading a node by the names of its op's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autoshard.passes.ir.graph import Node
from autoshard.passes.ir.program import Call, Internal
from autoshard.passes.rules.base import Site
from autoshard.passes.rules.factors import Dims, operands, tensor_arguments, with_arguments


def ops(names: str) -> tuple[torch._ops.OpOverload, ...]:
    """aten ops, as in ``"conv1d.default conv2d.default"``."""
    pairs = (name.split(".") for name in names.split())
    return tuple(getattr(getattr(torch.ops.aten, packet), overload) for packet, overload in pairs)


def positions(node: Node) -> dict[str, int]:
    """Argument name → where its tensor stands in ``node.inputs``; arguments without a tensor are left out."""
    names = tensor_arguments(node.op)
    return {names[slot]: i for i, slot in enumerate(operands(node))}


def inputs(node: Node, dims: Mapping[str, Dims]) -> tuple[Dims, ...]:
    """Factors per entry of ``node.inputs`` from factors per argument name."""
    return tuple(dims[name] for name in positions(node))


def axes_of(site: Site, name: str, dim: int) -> tuple[str, ...]:
    """Mesh axes that cut ``dim`` of the operand ``name``, outer to inner; none where the operand is absent."""
    position = positions(site.node).get(name)
    return () if position is None else site.inputs[position].axes_of(dim)


def spell(axes: Sequence[str]) -> str | tuple[str, ...]:
    """Mesh axes as generated code names them: one alone, several as a tuple."""
    return axes[0] if len(axes) == 1 else tuple(axes)


def unchanged(site: Site, **changes: Any) -> Call:
    """The same op, with some arguments replaced."""
    args, kwargs = with_arguments(site.node, **changes)
    return Call(site.node.op, args, kwargs)


def broadcast_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that tensors of these shapes broadcast to."""
    rank = max(map(len, shapes), default=0)
    padded = [(1,) * (rank - len(s)) + tuple(s) for s in shapes]
    return tuple(next((n for n in lengths if n != 1), 1) for lengths in zip(*padded, strict=True))


def wide_bytes(dtype: torch.dtype) -> int:
    """Bytes an element takes in sums: float32 at least."""
    return max(4, dtype.itemsize)


def local_shape(site: Site, name: str) -> tuple[int, ...]:
    """The shape of an operand on rank 0."""
    i = positions(site.node)[name]
    return site.inputs[i].max_local_shape(site.in_type(i).shape)


def reductions(
    site: Site, axes: tuple[str, ...], size: float, forward: Sequence[str], backward: Sequence[str]
) -> tuple[Internal, ...]:
    """All-reduces of ``size`` bytes each over ``axes``: what they reduce, forward, and backward if a gradient flows."""
    if site.mesh.size_of(axes) == 1:
        return ()
    gradient = backward if any(site.graph.types[name].grad for name in site.node.outputs) else ()
    phases = [("forward", what) for what in forward] + [("backward", what) for what in gradient]
    return tuple(Internal("all_reduce", axes, size, phase, what) for phase, what in phases)


def gathered(site: Site, axes: tuple[str, ...], size: float, what: str, to: str) -> tuple[Internal, ...]:
    """An all-gather of ``size`` bytes per rank over ``axes`` to I or R; to R, its backward reduce-scatters."""
    ranks = site.mesh.size_of(axes)
    if ranks == 1:
        return ()
    forward = Internal("all_gather", axes, ranks * size, "forward", what)
    if to == "I" or not any(site.graph.types[name].grad for name in site.node.outputs):
        return (forward,)
    return forward, Internal("reduce_scatter", axes, ranks * size, "backward", f"gradient of the {what}")

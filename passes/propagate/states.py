"""Candidate layouts of tensors kept between calls: parameters, and states such as KV caches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection

from autoshard.layout import Grouped, I, Owned, Placement, R, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Placements
from autoshard.passes.ir.graph import Graph, TensorType


def free_states(graph: Graph, given: Collection[str], constraints: Collection[str]) -> frozenset[str]:
    """Buffers kept between calls (KV cache) whose layout the search chooses; none of ``given``.

    In training, where they are running statistics, only hinted ones.
    """
    buffers = {i.fqn for i in graph.inputs if i.kind == "buffer"}
    states = {old for fqn, old in graph.states.items() if fqn in buffers and old not in given}
    return frozenset(n for n in states if not graph.training or n in constraints)


def placeable(type_: TensorType, mesh: Mesh, replicated: Placement | None = None) -> tuple[Placements, ...]:
    """All sharded placements with chunks for all ranks; else ``replicated`` (None: R or I)."""
    whole: tuple[Placement, ...] = (replicated,) if replicated is not None else (R, I) if type_.grad else (R,)
    per_axis = [
        (*whole, *(Shard(d) for d, n in enumerate(type_.shape) if ranks > 1 and int(n) >= ranks and not type_.unknown))
        for ranks in mesh.shape
    ]
    return tuple(p for p in itertools.product(*per_axis) if _leaves_chunks(type_.shape, p, mesh))


def fixed_states(type_: TensorType, mesh: Mesh) -> tuple[Placements, ...]:
    """Placements of a parameter that no conversion reaches: owned by one rank, or grouped."""
    return _owned(type_, mesh) + _grouped(type_, mesh)


def _owned(type_: TensorType, mesh: Mesh) -> tuple[Placements, ...]:
    """Table-wise placements: a table or an expert's matrix is owned along some axes.

    Other axes replicate it, or shard a matrix evenly: ranks without rows derive shapes from that.
    """
    if not type_.tables:
        return ()
    whole = I if type_.grad else R
    cuts = () if type_.looked_up else tuple(Shard(d) for d in range(len(type_.shape)))
    per_axis = [(whole, Owned(), *cuts) if ranks > 1 else (whole,) for ranks in mesh.shape]
    return tuple(
        p
        for p in itertools.product(*per_axis)
        if any(isinstance(x, Owned) for x in p)
        and all(int(n) % cut == 0 for n, cut in zip(type_.shape, _cuts(type_.shape, p, mesh), strict=True))
    )


def _grouped(type_: TensorType, mesh: Mesh) -> tuple[Placements, ...]:
    """Placements that shard every part of a fused dim along some axes, and no others shard it."""
    if type_.parts is None:
        return ()
    (dim, parts), whole = type_.parts, I if type_.grad else R
    others = tuple(Shard(d) for d in range(len(type_.shape)) if d != dim)
    per_axis = [(whole, *others, Grouped(dim, parts)) if ranks > 1 else (whole,) for ranks in mesh.shape]
    size = int(type_.shape[dim]) // sum(parts)
    return tuple(
        p
        for p in itertools.product(*per_axis)
        if any(isinstance(x, Grouped) for x in p)
        and size % math.prod(n for x, n in zip(p, mesh.shape, strict=True) if isinstance(x, Grouped)) == 0
        and _leaves_chunks(type_.shape, p, mesh)
    )


def _leaves_chunks(shape: tuple[int, ...], placements: Placements, mesh: Mesh) -> bool:
    return all(int(n) >= cut or cut == 1 for n, cut in zip(shape, _cuts(shape, placements, mesh), strict=True))


def _cuts(shape: tuple[int, ...], placements: Placements, mesh: Mesh) -> list[int]:
    """Chunks per dim."""
    pairs = list(zip(placements, mesh.shape, strict=True))
    return [math.prod(ranks for p, ranks in pairs if p == Shard(d)) for d in range(len(shape))]

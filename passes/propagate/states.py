"""What is kept between calls, parameters and states: which layouts it may have, and which of it may choose."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection

from autoshard.layout import I, Placement, R, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Placements
from autoshard.passes.ir.graph import Graph, TensorType


def free_states(graph: Graph, given: Collection[str], constraints: Collection[str]) -> frozenset[str]:
    """Buffers that the forward keeps between calls, such as keys and values, whose layout is to be chosen; none of ``given``.

    In training, where they are running statistics, only those that a hint asks for.
    """
    buffers = {i.fqn for i in graph.inputs if i.kind == "buffer"}
    states = {old for fqn, old in graph.states.items() if fqn in buffers and old not in given}
    return frozenset(n for n in states if not graph.training or n in constraints)


def placeable(type_: TensorType, mesh: Mesh, replicated: Placement | None = None) -> tuple[Placements, ...]:
    """Every assignment of shards that leaves each rank a chunk; whole axes are ``replicated`` (None: R and I)."""
    whole: tuple[Placement, ...] = (replicated,) if replicated is not None else (R, I) if type_.grad else (R,)
    per_axis = [
        (*whole, *(Shard(d) for d, n in enumerate(type_.shape) if ranks > 1 and int(n) >= ranks and not type_.unknown))
        for ranks in mesh.shape
    ]
    return tuple(p for p in itertools.product(*per_axis) if _leaves_chunks(type_.shape, p, mesh))


def _leaves_chunks(shape: tuple[int, ...], placements: Placements, mesh: Mesh) -> bool:
    ranks = (
        math.prod(r for p, r in zip(placements, mesh.shape, strict=True) if p == Shard(d)) for d in range(len(shape))
    )
    return all(int(n) >= cut or cut == 1 for n, cut in zip(shape, ranks, strict=True))

"""Packing and unpacking: copies around collectives on the compute stream, which nothing hides.

Shards of parameters are packed into flat buffers, gathered values are unpacked, and gradients
packed for reduction (:mod:`autoshard.runtime.parameters.flat_bucket`). Reduced gradients are views
of the buffer. A matrix alone in its bucket, sharded by rows, in its own dtype, is not copied. Other
values are copied before a sum, which overwrites them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from autoshard.layout import Invariant, Layout, Partial, Replicate, Shard
from autoshard.passes.ir.graph import Graph, TensorType
from autoshard.passes.ir.known import known_of_graph
from autoshard.passes.propagate.prices.cost import ideal, local_numel
from autoshard.passes.redistribute.pricing import ALONE, Shares, width
from autoshard.passes.search.network import Array

Bools = npt.NDArray[np.bool_]


def copied_seconds(
    type_: TensorType, sources: Sequence[Layout], targets: Sequence[Layout], parameter: bool, share: Shares = ALONE
) -> tuple[Array, Array]:
    """(forward, backward) seconds of copies from each source (row) to each target (column).

    ``parameter``: whether it goes in buckets at ``share`` of latency. On an ideal network copies
    are free; sparse gradients are not packed.
    """
    if not sources or not targets or type_.sparse or ideal(sources[0].mesh):
        none = np.zeros((len(sources), len(targets)))
        return none, none
    mesh = sources[0].mesh
    taken = mesh.hardware.traffic_seconds
    kept, moved = type_.kept.dtype.itemsize, type_.dtype.itemsize
    back = width(type_.dtype, type_.moves)
    own, whole = ([local_numel(type_, x.placements, mesh) for x in side] for side in (sources, targets))
    sums = _on_an_axis(sources, Partial, targets, Invariant | Replicate)
    sums_back = _on_an_axis(sources, Invariant | Partial, targets, Replicate) if back else np.zeros_like(sums)
    if not parameter:
        return (
            sums * np.array([taken(2 * moved * n) for n in whole]),
            sums_back * np.array([taken(2 * back * n) for n in whole]),
        )
    gathers = _on_an_axis(sources, Shard, targets, Invariant | Replicate)
    scatters = _on_an_axis(sources, Shard, targets, Replicate) if back else np.zeros_like(gathers)
    into = np.array([taken((kept + moved) * n) for n in own])[:, None]
    out_of, reduced = (np.array([taken(each * n) for n in whole]) for each in (2 * moved, moved + back))
    alone = share.gathers >= 1 and kept == moved
    rows = np.array([[alone and all(p.dim == 0 for p in x.placements if isinstance(p, Shard))] for x in sources])
    as_it_is = rows & (back in (0, moved))
    return gathers * ~rows * (into + out_of), (scatters & ~as_it_is | sums_back & ~scatters) * reduced


@known_of_graph
def copied_on_the_way(
    graph: Graph, type_: TensorType, src: Layout, dst: Layout, parameter: bool, share: Shares
) -> tuple[float, float]:
    """:func:`copied_seconds` of one pair, cached per graph for equal layers."""
    ahead, back = copied_seconds(type_, (src,), (dst,), parameter, share)
    return float(ahead[0, 0]), float(back[0, 0])


def _on_an_axis(sources: Sequence[Layout], given: object, targets: Sequence[Layout], asked: object) -> Bools:
    """Whether on some axis the source (row) is ``given`` and the target (column) ``asked``."""
    has, wants = (
        np.array([[isinstance(p, kind) for p in x.placements] for x in side])  # type: ignore[arg-type]
        for side, kind in ((sources, given), (targets, asked))
    )
    found: Bools = has @ wants.T
    return found

"""What the runtime copies before and after a collective, on the stream of the operations: nothing hides it.

Parameters travel in flat buffers: shards are copied in, what is gathered is copied out, and so are gradients into the buffer
that is reduced (:mod:`autoshard.runtime.parameters.flat_bucket`). What was reduced needs no copy: gradients are views of the
buffer. Nor does a matrix that fills a bucket by itself, is cut along its rows, and travels in its own dtype. Of other values
what is summed over ranks is copied first, because the sum overwrites it.
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
    """Seconds, forward and backward, of the copies for bringing a value from each source (row) to each target (column).

    ``parameter``: whether it goes in buckets, of whose latency it pays ``share``. Beside an ideal network copies are free, and
    sparse gradients travel as they are.
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
    """:func:`copied_seconds` from one layout to another, as ``graph`` has it often: in equal layers."""
    ahead, back = copied_seconds(type_, (src,), (dst,), parameter, share)
    return float(ahead[0, 0]), float(back[0, 0])


def _on_an_axis(sources: Sequence[Layout], given: object, targets: Sequence[Layout], asked: object) -> Bools:
    """Whether there is an axis on which the source (row) is ``given`` and the target (column) ``asked``."""
    has, wants = (
        np.array([[isinstance(p, kind) for p in x.placements] for x in side])  # type: ignore[arg-type]
        for side, kind in ((sources, given), (targets, asked))
    )
    found: Bools = has @ wants.T
    return found

"""Prices of all moves of a :class:`LayoutSpace` for one mesh, shape and dtype, as arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from autoshard.hardware import SMALL_ALL_REDUCE, Hardware
from autoshard.mesh import Mesh
from autoshard.passes.ir.graph import GradientTransfer, SparseRows
from autoshard.passes.ir.sizes import Size
from autoshard.passes.redistribute.layout_graph import Floats, Ints, LayoutSpace, LayoutState, layout_space
from autoshard.runtime.transport.move import COLLECTIVES

BUCKETED_KINDS = ("all_gather", "enter")
"""moves that parameters coalesce: gathers of shards, and gradient sums of replicas"""


COALESCED_KINDS = frozenset({"enter", "all_reduce", "reduce_scatter", "all_gather", "all_to_all"})
"""moves that activations coalesce (:mod:`autoshard.passes.lower.coalescing`)"""

SMALL_BYTES = 1 << 20
"""collectives of more bytes per rank gain nothing from coalescing: bandwidth-bound, and copied"""


class MessageShares(NamedTuple):
    """A tensor's shares of the latency of coalesced messages, and its overlap. Kinds of messages:
    :data:`BUCKETED_KINDS` and :data:`COALESCED_KINDS`."""

    gathers: float = 1.0
    sums: float = 1.0
    again: bool = True
    """whether the backward reads it or its bucket: then it is gathered again unless kept"""
    joined: float = 1.0
    beside: float = math.inf
    """forward seconds of compute that can hide its gather, at most"""
    waits: float = 0.0
    """seconds of synchronization skew before each of its messages; 0 if nothing waits for it"""


BoolArray = npt.NDArray[np.bool_]

UNSHARED_MESSAGES = MessageShares()
"""pays full latency"""

FORBIDDEN = 1 << 60
"""bytes of an impossible move: more than any real one, and sums of a few stay below 2**63"""


@dataclass(frozen=True, eq=False)
class Prices:
    """``bytes`` per move: ring bytes per rank times ranks (exact). ``numel`` per state: local."""

    bytes: Ints
    back: Ints
    """per move: bytes of the backward"""
    seconds: Floats
    numel: Ints
    space: LayoutSpace
    piece: Ints
    """per move: elements of the smaller chunk, the unit of volume"""
    mesh: Mesh
    itemsize: int
    grad: bool
    scalar: bool
    """whether the tensor has one element"""

    @cached_property
    def shares(self) -> Floats:
        """[11, moves]: parts of ``seconds``: launches, links between nodes; then for each kind in
        :data:`BUCKETED_KINDS` and for small :data:`COALESCED_KINDS` the part paid once per message: launches,
        latency of links in a node, latency of links between nodes."""
        graph = self.space
        crossing, launches, latency, kinds = _message_terms(self.mesh, graph.kinds, graph.base, self.grad, self.scalar)
        small = np.maximum(self.numel[graph.src], self.numel[graph.dst]) * self.itemsize <= SMALL_BYTES
        known = np.isfinite(self.seconds)
        rest = np.where(known, self.seconds, 0.0) - launches
        shares = [launches, np.where(crossing, rest, 0.0)]
        for merges in (*kinds[:-1], kinds[-1] & small):
            once = np.where(merges, launches, 0.0)
            links = np.where(merges, latency, 0.0) - once
            shares += [once, np.where(crossing, 0.0, links), np.where(crossing, links, 0.0)]
        return np.where(known, np.stack(shares), 0.0)

    @cached_property
    def symmetric_state(self) -> list[tuple[int, Ints | None]]:
        """Per state: (symmetric state one swap nearer to the first of its class, the swap or None).
        Swapping two dims or axes changes no price."""
        same = [
            states
            for states, moves in self.space.swaps
            if np.array_equal(self.seconds[moves], self.seconds) and np.array_equal(self.shares[:, moves], self.shares)
        ]
        found: list[tuple[int, Ints | None] | None] = [None] * len(self.space.states)
        for first in range(len(found)):
            if found[first] is None:
                found[first], waiting = (first, None), [first]
                for state in waiting:
                    for swap in same:
                        if found[other := int(swap[state])] is None:
                            found[other] = state, swap
                            waiting.append(other)
        return [x for x in found if x is not None]


def gradient_itemsize(dtype: torch.dtype, grad: GradientTransfer) -> int:
    """Bytes of a gradient element; 0: no gradient."""
    if isinstance(grad, SparseRows):
        return grad.dtype.itemsize
    return grad.itemsize if isinstance(grad, torch.dtype) else dtype.itemsize * grad


def sparse_gradient_rows(grad: GradientTransfer) -> int:
    """Most rows of a sparse gradient; 0: dense."""
    return grad.looked_up if isinstance(grad, SparseRows) else 0


@lru_cache(maxsize=64)
def price_moves(
    mesh: Mesh,
    shape: tuple[int, ...],
    itemsize: int,
    kinds: tuple[str, ...],
    back: int,
    base: LayoutState,
    closed: tuple[int, ...] = (),
    looked_up: int = 0,
) -> Prices:
    """Prices of all moves of ``layout_space(mesh.shape, kinds, base)`` for a tensor of global ``shape``.

    Forward plus backward; gradients have ``back`` bytes per element (0: none). No move may shard a
    dim in ``closed``.

    Uneven dims count by their largest chunk, so that a finer shard is never dearer. Per rank, with
    C elements of the largest chunk ((n-1)/n·B if even): all-gather and reduce-scatter send (n-1)·C,
    all-reduce 2(n-1)/n·B, all-to-all (n-1) pieces, a permute one chunk.

    ``looked_up``: most rows of a sparse gradient over all ranks. Each of n ranks receives the
    others' rows and numbers: (n-1) · k · (bytes of a row + 8), with k rows per rank.
    """
    graph = layout_space(mesh.shape, kinds, base)
    sizes = np.array(shape, np.int64)
    piece = (-(-sizes // graph.pieces)).prod(axis=1)[graph.piece]
    scalar = math.prod(shape) == 1
    latency, per_byte = _move_rates(mesh, kinds, 0.0 if looked_up else back / itemsize, base, scalar)
    gradients = _sparse_backward_bytes(graph, sizes, back, looked_up) if looked_up else graph.backward * back * piece
    total = graph.forward * itemsize * piece + gradients
    seconds = latency + per_byte * (piece * itemsize)
    if looked_up:
        seconds = seconds + _sparse_gather_seconds(mesh, graph, gradients)
    uneven = _uneven_dims(shape, graph)[graph.src] & graph.needs_even
    cut = (graph.cuts[graph.dst] > 1)[:, list(closed)]
    if uneven.any() or cut.any():
        forbidden = uneven.any(axis=1) | cut.any(axis=1)
        total[forbidden], seconds[forbidden] = FORBIDDEN, np.inf
    numel = (-(-sizes // graph.cuts)).prod(axis=1)
    return Prices(total, gradients, seconds, numel, graph, piece, mesh, itemsize, bool(back), scalar)


def prices_of(
    mesh: Mesh,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    grad: GradientTransfer,
    kinds: tuple[str, ...],
    base: LayoutState,
    closed: tuple[int, ...] = (),
) -> Prices:
    """:func:`price_moves` for a tensor of this dtype with this gradient."""
    back, rows = gradient_itemsize(dtype, grad), sparse_gradient_rows(grad)
    return price_moves(mesh.unnamed, shape, dtype.itemsize, kinds, back, base, closed, rows)


def _sparse_backward_bytes(graph: LayoutSpace, sizes: Ints, back: int, looked_up: int) -> Ints:
    """Backward bytes of every move of a sparse gradient."""
    found = np.zeros(len(graph.moves), np.int64)
    for i, move in enumerate(graph.moves):
        if graph.backward[i]:
            n = graph.count(move.group)
            sums = move.backward in ("all_reduce", "reduce_scatter")
            rows = min(int(sizes[0]), -(-looked_up // n) if sums else looked_up)
            rows, *rest = (-(-a // c) for a, c in zip((rows, *map(int, sizes[1:])), graph.cuts[move.dst], strict=True))
            found[i] = graph.ranks * (n - 1) * rows * (math.prod(map(int, rest)) * back + torch.int64.itemsize)
    return found


def _sparse_gather_seconds(mesh: Mesh, graph: LayoutSpace, gradients: Ints) -> Floats:
    """Seconds of gathers of a sparse gradient; the host waits for sizes first."""
    found = np.zeros(len(graph.moves))
    for i in np.flatnonzero(gradients):
        latency, per_byte = mesh.link([mesh.axes[a] for a in graph.moves[i].group]).rate("all_gather")
        # row counts, row numbers, rows
        found[i] = 3 * (latency + mesh.hardware.kernel_latency) + per_byte * gradients[i] / graph.ranks
    return found


@lru_cache(maxsize=64)
def _message_terms(
    mesh: Mesh, kinds: tuple[str, ...], base: LayoutState, grad: bool, scalar: bool
) -> tuple[BoolArray, Floats, Floats, tuple[BoolArray, ...]]:
    """Per move: whether it leaves a node, launch seconds, latency if it can coalesce; and masks per
    kind in :data:`BUCKETED_KINDS`, and of :data:`COALESCED_KINDS`."""
    graph = layout_space(mesh.shape, kinds, base)
    crosses = cache(lambda group: mesh.crosses([mesh.axes[a] for a in group]))
    crossing = np.array([crosses(m.group) for m in graph.moves], np.bool_)
    calls = (graph.forward > 0).astype(np.float64) + ((graph.backward > 0) if grad else 0)
    merging = [
        np.array([m.kind in of for m in graph.moves], np.bool_)
        for of in (*((k,) for k in BUCKETED_KINDS), COALESCED_KINDS)
    ]
    seconds = cache(lambda group, *of: message_latency(mesh, tuple(mesh.axes[a] for a in group), *of))
    latency = np.zeros(len(graph.moves))
    for i in np.flatnonzero(merging[-1]):
        move = graph.moves[i]
        latency[i] = seconds(move.group, move.kind, move.backward if grad else None, scalar)
    return crossing, calls * mesh.hardware.kernel_latency, latency, tuple(merging)


def message_latency(mesh: Mesh, axes: tuple[str, ...], forward: str, backward: str | None, scalar: bool) -> float:
    """Seconds of a move's collectives at 0 bytes, forward and backward; ``scalar``: one element."""
    found = [mesh.link(axes).rate(kind)[0] for kind in (_rated_kind(forward, scalar), backward) if kind in _RATED]
    return math.fsum(found)


_RATED = {*COLLECTIVES, SMALL_ALL_REDUCE}


def _rated_kind(forward: str, scalar: bool) -> str:
    """The kind that rates a forward collective (gradient sums: :attr:`Shares.sums`); FEW only for
    one element: else padded partial sums, which join no bucket, would win."""
    return SMALL_ALL_REDUCE if scalar and forward == "all_reduce" else forward


def _uneven_dims(shape: tuple[int, ...], graph: LayoutSpace) -> BoolArray:
    """Per state and dim: whether chunks may differ in length (dynamic: unless they divide)."""
    found: npt.NDArray[np.bool_] = np.array(shape, np.int64) % graph.cuts != 0
    for dim, n in enumerate(shape):
        if isinstance(n, Size):
            divides = {int(cut): not n % int(cut) for cut in np.unique(graph.cuts[:, dim])}
            found[:, dim] = [not divides[int(cut)] for cut in graph.cuts[:, dim]]
    return found


@lru_cache(maxsize=64)
def _move_rates(
    mesh: Mesh, kinds: tuple[str, ...], back: float, base: LayoutState, scalar: bool
) -> tuple[Floats, Floats]:
    """Per move: fixed seconds, seconds per byte of the smaller chunk (``back``: gradient bytes)."""
    graph = layout_space(mesh.shape, kinds, base)
    rate = cache(partial(_move_rate, mesh, graph, scalar))
    launch = mesh.hardware.kernel_latency
    calls = [(m.kind, m.backward if back else None, m.group, m.order, back) for m in graph.moves]
    pairs = np.array([rate(*call) for call in calls], np.float64)
    pairs.reshape(-1, 2)[:, 0] += [launch * _launch_count(m.kind, m.backward, bool(back)) for m in graph.moves]
    pairs = pairs.reshape(-1, 2)
    return pairs[:, 0].copy(), pairs[:, 1].copy()


def _move_rate(
    mesh: Mesh,
    graph: LayoutSpace,
    scalar: bool,
    forward: str,
    backward: str | None,
    group: tuple[int, ...],
    order: tuple[int, ...],
    back: float,
) -> tuple[float, float]:
    """(seconds, seconds per byte) of one move: α-β per collective, traffic per local copy."""
    link = mesh.link([mesh.axes[a] for a in group])
    fixed, rate = 1e-3 * mesh.hardware.kernel_latency + 1e-24, 0.0
    for kind, width, sent in ((forward, 1.0, _rated_kind(forward, scalar)), (backward, back, backward)):
        volume = graph.volume(kind, group, order) / graph.ranks
        if sent is not None and volume:
            latency, per_byte = link.rate(sent)
            fixed += latency
            rate += volume * per_byte * width
    written = {"slice": 1.0, "partial": 1.0, "pad": float(graph.count(group))}.get(forward, 0.0)
    return fixed, rate + (1 + written) * (written > 0) / _copy_bandwidth(mesh.hardware)


_KERNELS = {"slice": 1, "partial": 1, "pad": 2}
_KERNELS_BACK = {"slice": 2, "partial": 1, "pad": 1, "leave": 1, "all_gather": 1}
"""kernels launched by local steps, and by their local backward (copies, zero fills)

Without them a small gather would lose to an all-reduce of padded shards, faster on the wire.
"""


def _launch_count(forward: str, backward: str | None, grad: bool) -> int:
    return _KERNELS.get(forward, 0) + (_KERNELS_BACK.get(forward, 0) if grad and backward is None else 0)


def _copy_bandwidth(hardware: Hardware) -> float:
    """Bytes per second of a local copy; copies are free beside an ideal network (latency 0)."""
    if hardware.node.latency:
        return 1.0 / hardware.memory_seconds(1.0)
    return 1e9 * max(hardware.memory_bandwidth, hardware.node.bandwidth, hardware.network.bandwidth)

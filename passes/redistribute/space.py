"""The graph of layouts: every state one tensor can be in on a mesh, and every step between two states.

A state is a placement per mesh axis plus the nesting of the axes that cut one tensor dim. A step is one runtime call
on one group of axes (several axes: the flattened group). Only the ends of a nest can be touched: a group is gathered,
padded or moved from the inner end, and slicing or scattering adds at the inner end, so that every intermediate is
again a nested ``torch.chunk`` layout, also where sizes do not divide. The graph depends on the axis sizes and the
number of tensor dims only, not on the shape: it is built once and priced per shape with array arithmetic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autoshard.layout import I, Layout, P, Partial, Placement, R, Shard
from autoshard.mesh import Mesh
from autoshard.runtime.transport.move import COLLECTIVES, CONVERSIONS, dual, ring_volume

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Slots = tuple[tuple[int, ...], ...]

FREE = "*"
"""in a frame: an axis that may be placed anyhow"""
EXACT_AXES, MOST_AXES = 4, 5

UNSHARDED: dict[str, Placement] = {"R": R, "I": I, "P": P, "max": Partial("max"), "min": Partial("min")}
_LETTER = {placement: letter for letter, placement in UNSHARDED.items()}


class State(NamedTuple):
    """``kinds``: per axis "S" or a key of ``UNSHARDED``. ``nests``: per dim the axes that cut it, outer first."""

    kinds: tuple[str, ...]
    nests: tuple[tuple[int, ...], ...]

    def convert(self, group: tuple[int, ...], to: str, leave: int | None = None, join: int | None = None) -> State:
        """The axes of ``group`` become ``to``, leaving the inner end of dim ``leave``, joining that of dim ``join``."""
        kinds = tuple(to if a in group else k for a, k in enumerate(self.kinds))
        nests = list(self.nests)
        if leave is not None:
            nests[leave] = nests[leave][: -len(group)]
        if join is not None:
            nests[join] = nests[join] + group
        return State(kinds, tuple(nests))


class Move(NamedTuple):
    """One step between two states (by number) on the flattened ``group``, and the kind its backward is."""

    kind: str
    group: tuple[int, ...]
    src: int
    dst: int
    dims: tuple[int, ...] = ()
    """the tensor dim, or (from, to) for an all-to-all"""
    order: tuple[int, ...] = ()
    """of a permute"""
    backward: str | None = None


_STEPS: dict[tuple[str, str], tuple[str, str | None]] = {
    ends: (kind, back if (back := CONVERSIONS[dual(*ends)]) in COLLECTIVES else None)
    for ends, kind in CONVERSIONS.items()
} | {(op, "R"): ("all_reduce", None) for op in ("max", "min")}
"""(from, to) → (runtime function, the collective of its backward); "S" stands for any dim"""


def state_of(layout: Layout, ndim: int, *, grad: bool) -> State:
    """The state of ``layout``; without a gradient Invariant is Replicate."""
    kinds = tuple("S" if isinstance(p, Shard) else _LETTER[p] for p in layout.placements)
    if not grad:
        kinds = tuple("R" if k == "I" else k for k in kinds)
    index = {a: i for i, a in enumerate(layout.mesh.axes)}
    nests: list[list[int]] = [[] for _ in range(ndim)]
    for axis in layout.order:
        placement = layout.placements[index[axis]]
        if isinstance(placement, Shard):
            nests[placement.dim].append(index[axis])
    return State(kinds, tuple(map(tuple, nests)))


def layout_of(state: State, mesh: Mesh) -> Layout:
    """The inverse of :func:`state_of`."""
    dims = {a: d for d, nest in enumerate(state.nests) for a in nest}
    placements = [Shard(dims[a]) if k == "S" else UNSHARDED[k] for a, k in enumerate(state.kinds)]
    return Layout(mesh, placements, [mesh.axes[a] for nest in state.nests for a in nest])


class Space:
    """All states and moves for meshes of ``sizes`` and tensors of ``ndim`` dims, as arrays over moves.

    ``kinds`` are the unsharded placements that may occur. Axes that ``base`` does not mark as FREE stay as they are
    there. Moves are sorted by source; those of state ``s`` are ``first[s]:first[s+1]``.
    """

    def __init__(self, sizes: tuple[int, ...], ndim: int, kinds: tuple[str, ...], base: State) -> None:
        self.sizes, self.ndim, self.kinds, self.base = sizes, ndim, kinds, base
        self.ranks = math.prod(sizes)
        self.states = tuple(_states(base, kinds))
        self.index = {s: i for i, s in enumerate(self.states)}
        slots = [self._slots(s) for s in self.states]
        classes = self._permutable(slots)
        self.moves = tuple(
            m
            for i, s in enumerate(self.states)
            for m in itertools.chain(self._conversions(i, s), self._permutes(i, slots, classes))
        )
        self.cuts = np.array([[self.count(nest) for nest in s.nests] for s in self.states], np.int64)
        self.cuts = self.cuts.reshape(len(self.states), ndim)
        self.src = np.array([m.src for m in self.moves], np.intp)
        self.dst = np.array([m.dst for m in self.moves], np.intp)
        self.first = np.searchsorted(self.src, np.arange(len(self.states) + 1))
        self.leaving, self.begins, self.many = np.unique(self.src, return_index=True, return_counts=True)
        """states that moves lead from, the first of their moves, and how many they have"""
        # What one rank exchanges with another is the common part of both chunks: the finer cut of every dim.
        finer = np.maximum(self.cuts[self.src], self.cuts[self.dst])
        self.pieces, piece = np.unique(finer, axis=0, return_inverse=True)
        self.piece = piece.reshape(-1)
        volume = cache(self.volume)
        self.forward = np.array([volume(m.kind, m.group, m.order) for m in self.moves], np.int64)
        self.backward = np.array([volume(m.backward, m.group, m.order) for m in self.moves], np.int64)
        self.needs_even = np.zeros((len(self.moves), ndim), np.bool_)
        for number, m in enumerate(self.moves):
            if m.kind == "permute":
                self.needs_even[number] = self._needs_even(m)

    @cached_property
    def swaps(self) -> tuple[tuple[Ints, Ints], ...]:
        """Two dims, or two free axes of one size, in each other's place: what every state becomes, and every move."""
        kinds = np.unique([m.kind for m in self.moves], return_inverse=True)[1]
        order, found = np.lexsort((kinds, self.dst, self.src)), []
        for dims, axes in self._pairs():
            states = np.array([self.index[_swapped(s, dims, axes)] for s in self.states], np.intp)
            moves = np.empty_like(order)
            moves[np.lexsort((kinds, states[self.dst], states[self.src]))] = order
            found.append((states, moves))
        return tuple(found)

    def _pairs(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Dims, or axes, that :attr:`swaps` swaps: those that no axis which stays as it is tells apart."""
        dims, axes = [list(range(n)) for n in (self.ndim, len(self.sizes))]
        for d, e in itertools.combinations(dims, 2):
            if not self.base.nests[d] and not self.base.nests[e]:
                yield (*dims[:d], e, *dims[d + 1 : e], d, *dims[e + 1 :]), tuple(axes)
        for a, b in itertools.combinations(axes, 2):
            if self.sizes[a] == self.sizes[b] and self.base.kinds[a] == self.base.kinds[b] == FREE:
                yield tuple(dims), (*axes[:a], b, *axes[a + 1 : b], a, *axes[b + 1 :])

    def count(self, group: tuple[int, ...]) -> int:
        """Ranks of a flattened group."""
        return math.prod(self.sizes[a] for a in group)

    def volume(self, kind: str | None, group: tuple[int, ...], order: tuple[int, ...]) -> int:
        """Ring volume per rank, in elements of the smaller of both chunks times the number of ranks (an integer)."""
        if kind is None:
            return 0
        if kind == "permute":
            active = [[a for a in axes if self.sizes[a] > 1] for axes in (group, order)]
            return self.ranks if active[0] != active[1] else 0
        n = self.count(group)
        return ring_volume(kind, n) * (self.ranks // n)

    def _conversions(self, i: int, s: State) -> Iterator[Move]:
        def move(group: tuple[int, ...], frm: str, to: str, leave: int | None = None, join: int | None = None) -> Move:
            kind, backward = _STEPS[frm, to]
            dims = tuple(d for d in (leave, join) if d is not None)
            return Move(kind, group, i, self.index[s.convert(group, to, leave, join)], dims, (), backward)

        for frm in self.kinds:
            axes = [a for a, k in enumerate(s.kinds) if k == frm and self.base.kinds[a] == FREE]
            for length in range(1, len(axes) + 1):
                for group in itertools.combinations(axes, length):
                    yield from (move(group, frm, to) for to in self.kinds if (frm, to) in _STEPS)
                if (frm, "S") in _STEPS:
                    for group in itertools.permutations(axes, length):
                        yield from (move(group, frm, "S", join=d) for d in range(self.ndim))
        for d, nest in enumerate(s.nests):
            for start in range(len(self.base.nests[d]), len(nest)):
                yield from (move(nest[start:], "S", to, leave=d) for to in self.kinds if ("S", to) in _STEPS)
                yield from (move(nest[start:], "S", "S", leave=d, join=e) for e in range(self.ndim) if e != d)

    def _slots(self, s: State) -> Slots:
        """Where each axis is: per tensor dim its nest, per unsharded kind its axes in mesh order."""
        return s.nests + tuple(tuple(a for a, k in enumerate(s.kinds) if k == kind) for kind in self.kinds)

    def _permutable(self, slots: list[Slots]) -> dict[int, list[int]]:
        """Per state those with as many ranks in every slot: a permutation of the ranks leads from one to another."""
        classes: dict[tuple[int, ...], list[int]] = {}
        count = cache(self.count)
        for i, nests in enumerate(slots):
            classes.setdefault(tuple(map(count, nests)), []).append(i)
        return {j: members for members in classes.values() for j in members}

    def _permutes(self, i: int, slots: list[Slots], classes: dict[int, list[int]]) -> Iterator[Move]:
        for j in classes[i]:
            if i != j:
                pairs = [pair for pair in zip(slots[i], slots[j], strict=True) if pair[0] != pair[1]]
                group, order = (tuple(itertools.chain(*side)) for side in zip(*pairs, strict=True))
                yield Move("permute", group, i, j, (), order, "permute")

    def _needs_even(self, move: Move) -> list[bool]:
        """Per dim: whether its size must divide, because a permute gives a rank the chunk of another cut of the dim.

        Reordering one dim's nest is fine where the cuts have the same sizes one after another.
        """
        src, dst = self.states[move.src], self.states[move.dst]
        changed = [move.kind == "permute" and a != b for a, b in zip(src.nests, dst.nests, strict=True)]
        if sum(changed) == 1 and src.kinds == dst.kinds and self._effective(move.group) == self._effective(move.order):
            return [False] * self.ndim
        return changed

    def _effective(self, group: tuple[int, ...]) -> list[int]:
        """The sizes of a nest's cuts; an axis of size 1 cuts nothing."""
        return [self.sizes[a] for a in group if self.sizes[a] > 1]


def _swapped(s: State, dims: tuple[int, ...], axes: tuple[int, ...]) -> State:
    """The state in which dim and axis number i are those numbers there."""
    return State(tuple(s.kinds[a] for a in axes), tuple(tuple(axes[a] for a in s.nests[d]) for d in dims))


def _states(base: State, kinds: tuple[str, ...]) -> Iterator[State]:
    """Every assignment of kinds and dims to the free axes of ``base``, in every nesting order inside the fixed axes."""
    free = [a for a, k in enumerate(base.kinds) if k == FREE]
    for choice in itertools.product((*kinds, *range(len(base.nests))), repeat=len(free)):
        chosen = dict(zip(free, choice, strict=True))
        joined = [[a for a in free if chosen[a] == d] for d in range(len(base.nests))]
        letters = tuple(
            k if k != FREE else c if isinstance(c := chosen[a], str) else "S" for a, k in enumerate(base.kinds)
        )
        for inner in itertools.product(*(itertools.permutations(nest) for nest in joined)):
            yield State(letters, tuple(outer + nest for outer, nest in zip(base.nests, inner, strict=True)))


def everything(axes: int, ndim: int) -> State:
    """The frame in which every axis is free."""
    return State((FREE,) * axes, ((),) * ndim)


def frame(src: State, dst: State) -> State:
    """What two states have in common, all else FREE. Up to ``EXACT_AXES`` axes everything is.

    On a larger mesh an axis that both use alike, and that no axis to be changed encloses, stays out of the search.
    """
    axes = len(src.kinds)
    if axes <= EXACT_AXES:
        return everything(axes, len(src.nests))
    nests = tuple(
        tuple(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*pair, strict=False)))
        for pair in zip(src.nests, dst.nests, strict=True)
    )
    fixed = {a for nest in nests for a in nest}
    kinds = (
        k if a in fixed or k == o != "S" else FREE for a, (k, o) in enumerate(zip(src.kinds, dst.kinds, strict=True))
    )
    return State(tuple(kinds), nests)


def halfway(src: State, dst: State, common: State) -> State:
    """On the way between states that differ in too many axes for one graph: ``common`` is their frame.

    Up to ``EXACT_AXES`` inner axes of the source that are to change are made whole, or summed; once it has none, those of
    the target are left for later. Between whole values some axes change first.
    """
    free = [a for a, k in enumerate(common.kinds) if k == FREE]
    if all(x.kinds[a] in "RI" for x in (src, dst) for a in free):
        chosen = free[:EXACT_AXES]
        return src._replace(kinds=tuple(dst.kinds[a] if a in chosen else k for a, k in enumerate(src.kinds)))
    middle = src if any(src.kinds[a] not in "RI" for a in free) else dst
    for _ in range(EXACT_AXES):
        inner = {nest[-1] for nest in middle.nests if nest} | {a for a in free if middle.kinds[a] not in "SRI"}
        last = next((a for a in sorted(inner, reverse=True) if a in free), None)
        if last is None:
            break
        dim = next((d for d, nest in enumerate(middle.nests) if nest[-1:] == (last,)), None)
        middle = middle.convert((last,), "R", leave=dim)
    return middle


@lru_cache(maxsize=64)
def space(sizes: tuple[int, ...], kinds: tuple[str, ...], base: State) -> Space:
    """The graph for these axis sizes, built once; ``base`` leaves at most ``MOST_AXES`` free."""
    return Space(sizes, len(base.nests), kinds, base)

"""The layout graph: states of a tensor on a mesh, and the steps between them.
A state is a placement per mesh axis, and per tensor dim the nesting order of its axes. A step is
one runtime call on a group of axes (flattened). Steps touch inner ends of nests only: gather, pad
and move remove there, slice and scatter add there. So every intermediate is a nested
``torch.chunk`` layout, also with uneven sizes. The graph depends on axis sizes and the number of
dims alone: it is built once, and priced per shape with array arithmetic."""

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

FREE_AXIS = "*"
"""in a frame: an axis with any placement"""
EXACT_AXES, MAX_FREE_AXES = 4, 5

UNSHARDED: dict[str, Placement] = {"R": R, "I": I, "P": P, "max": Partial("max"), "min": Partial("min")}
_LETTER = {placement: letter for letter, placement in UNSHARDED.items()}


class LayoutState(NamedTuple):
    """``kinds``: "S" or a key of ``UNSHARDED`` per axis; ``nests``: per dim its axes, outer
    first."""

    kinds: tuple[str, ...]
    nests: tuple[tuple[int, ...], ...]

    def convert(
        self, group: tuple[int, ...], to: str, leave: int | None = None, join: int | None = None
    ) -> LayoutState:
        """Make axes of ``group`` ``to``: leave dim ``leave``'s inner end, join dim ``join``."""
        kinds = tuple(to if a in group else k for a, k in enumerate(self.kinds))
        nests = list(self.nests)
        if leave is not None:
            nests[leave] = nests[leave][: -len(group)]
        if join is not None:
            nests[join] = nests[join] + group
        return LayoutState(kinds, tuple(nests))


class LayoutMove(NamedTuple):
    """One step between two states (numbers) on the flattened ``group``, and its backward's kind."""

    kind: str
    group: tuple[int, ...]
    src: int
    dst: int
    dims: tuple[int, ...] = ()
    """the tensor dim, or (from, to) of an all-to-all"""
    order: tuple[int, ...] = ()
    """of a permute"""
    backward: str | None = None


_STEPS: dict[tuple[str, str], tuple[str, str | None]] = {
    ends: (kind, back if (back := CONVERSIONS[dual(*ends)]) in COLLECTIVES else None)
    for ends, kind in CONVERSIONS.items()
} | {(op, "R"): ("all_reduce", None) for op in ("max", "min")}
"""(from, to) → (runtime function, backward's collective); "S" stands for any dim"""


def state_of(layout: Layout, ndim: int, *, grad: bool) -> LayoutState:
    """The state of ``layout``; without gradient Invariant equals Replicate."""
    kinds = tuple("S" if isinstance(p, Shard) else _LETTER[p] for p in layout.placements)
    if not grad:
        kinds = tuple("R" if k == "I" else k for k in kinds)
    index = {a: i for i, a in enumerate(layout.mesh.axes)}
    nests: list[list[int]] = [[] for _ in range(ndim)]
    for axis in layout.order:
        placement = layout.placements[index[axis]]
        if isinstance(placement, Shard):
            nests[placement.dim].append(index[axis])
    return LayoutState(kinds, tuple(map(tuple, nests)))


def layout_of(state: LayoutState, mesh: Mesh) -> Layout:
    """The inverse of :func:`state_of`."""
    dims = {a: d for d, nest in enumerate(state.nests) for a in nest}
    placements = [Shard(dims[a]) if k == "S" else UNSHARDED[k] for a, k in enumerate(state.kinds)]
    return Layout(mesh, placements, [mesh.axes[a] for nest in state.nests for a in nest])


class LayoutSpace:
    """All states and moves for mesh ``sizes`` and tensors of ``ndim`` dims, as arrays over moves.
    ``kinds``: unsharded placements that may occur. Axes not FREE in ``base`` keep its placement.
    Moves are sorted by source; those of state ``s`` are ``first[s]:first[s+1]``."""

    def __init__(self, sizes: tuple[int, ...], ndim: int, kinds: tuple[str, ...], base: LayoutState) -> None:
        self.sizes, self.ndim, self.kinds, self.base = sizes, ndim, kinds, base
        self.ranks = math.prod(sizes)
        self.states = tuple(_enumerate_states(base, kinds))
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
        self.states_with_moves, self.begins, self.move_counts = np.unique(
            self.src, return_index=True, return_counts=True
        )
        """states with moves, the first of their moves, and how many"""
        # Two ranks exchange the common part of their chunks: the finer shard of every dim.
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
        """Symmetries: swaps of two dims or two free axes of equal size, as (states, moves)."""
        kinds = np.unique([m.kind for m in self.moves], return_inverse=True)[1]
        order, found = np.lexsort((kinds, self.dst, self.src)), []
        for dims, axes in self._pairs():
            states = np.array([self.index[_permuted_state(s, dims, axes)] for s in self.states], np.intp)
            moves = np.empty_like(order)
            moves[np.lexsort((kinds, states[self.dst], states[self.src]))] = order
            found.append((states, moves))
        return tuple(found)

    def _pairs(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Swaps of dims or axes that no fixed axis distinguishes."""
        dims, axes = [list(range(n)) for n in (self.ndim, len(self.sizes))]
        for d, e in itertools.combinations(dims, 2):
            if not self.base.nests[d] and not self.base.nests[e]:
                yield (*dims[:d], e, *dims[d + 1 : e], d, *dims[e + 1 :]), tuple(axes)
        for a, b in itertools.combinations(axes, 2):
            if self.sizes[a] == self.sizes[b] and self.base.kinds[a] == self.base.kinds[b] == FREE_AXIS:
                yield tuple(dims), (*axes[:a], b, *axes[a + 1 : b], a, *axes[b + 1 :])

    def count(self, group: tuple[int, ...]) -> int:
        """Ranks of a flattened group."""
        return math.prod(self.sizes[a] for a in group)

    def volume(self, kind: str | None, group: tuple[int, ...], order: tuple[int, ...]) -> int:
        """Ring volume per rank in elements of the smaller chunk, times ranks (an integer)."""
        if kind is None:
            return 0
        if kind == "permute":
            active = [[a for a in axes if self.sizes[a] > 1] for axes in (group, order)]
            return self.ranks if active[0] != active[1] else 0
        n = self.count(group)
        return ring_volume(kind, n) * (self.ranks // n)

    def _conversions(self, i: int, s: LayoutState) -> Iterator[LayoutMove]:
        def move(
            group: tuple[int, ...], frm: str, to: str, leave: int | None = None, join: int | None = None
        ) -> LayoutMove:
            kind, backward = _STEPS[frm, to]
            dims = tuple(d for d in (leave, join) if d is not None)
            return LayoutMove(kind, group, i, self.index[s.convert(group, to, leave, join)], dims, (), backward)

        for frm in self.kinds:
            axes = [a for a, k in enumerate(s.kinds) if k == frm and self.base.kinds[a] == FREE_AXIS]
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

    def _slots(self, s: LayoutState) -> Slots:
        """Places of axes: per dim its nest, per unsharded kind its axes in mesh order."""
        return s.nests + tuple(tuple(a for a, k in enumerate(s.kinds) if k == kind) for kind in self.kinds)

    def _permutable(self, slots: list[Slots]) -> dict[int, list[int]]:
        """Per state those with equal ranks per slot: permutations of ranks lead to them."""
        classes: dict[tuple[int, ...], list[int]] = {}
        count = cache(self.count)
        for i, nests in enumerate(slots):
            classes.setdefault(tuple(map(count, nests)), []).append(i)
        return {j: members for members in classes.values() for j in members}

    def _permutes(self, i: int, slots: list[Slots], classes: dict[int, list[int]]) -> Iterator[LayoutMove]:
        for j in classes[i]:
            if i != j:
                pairs = [pair for pair in zip(slots[i], slots[j], strict=True) if pair[0] != pair[1]]
                group, order = (tuple(itertools.chain(*side)) for side in zip(*pairs, strict=True))
                yield LayoutMove("permute", group, i, j, (), order, "permute")

    def _needs_even(self, move: LayoutMove) -> list[bool]:
        """Per dim: whether a permute needs an even size, as a rank gets another nest's chunk
        (unless axes' sizes keep order)."""
        src, dst = self.states[move.src], self.states[move.dst]
        changed = [move.kind == "permute" and a != b for a, b in zip(src.nests, dst.nests, strict=True)]
        if sum(changed) == 1 and src.kinds == dst.kinds and self._effective(move.group) == self._effective(move.order):
            return [False] * self.ndim
        return changed

    def _effective(self, group: tuple[int, ...]) -> list[int]:
        """Sizes of a nest's axes above 1."""
        return [self.sizes[a] for a in group if self.sizes[a] > 1]


def _permuted_state(s: LayoutState, dims: tuple[int, ...], axes: tuple[int, ...]) -> LayoutState:
    return LayoutState(tuple(s.kinds[a] for a in axes), tuple(tuple(axes[a] for a in s.nests[d]) for d in dims))


def _enumerate_states(base: LayoutState, kinds: tuple[str, ...]) -> Iterator[LayoutState]:
    """All kinds and dims for the free axes of ``base``, in all nesting orders inside fixed axes."""
    free = [a for a, k in enumerate(base.kinds) if k == FREE_AXIS]
    for choice in itertools.product((*kinds, *range(len(base.nests))), repeat=len(free)):
        chosen = dict(zip(free, choice, strict=True))
        joined = [[a for a in free if chosen[a] == d] for d in range(len(base.nests))]
        letters = tuple(
            k if k != FREE_AXIS else c if isinstance(c := chosen[a], str) else "S" for a, k in enumerate(base.kinds)
        )
        for inner in itertools.product(*(itertools.permutations(nest) for nest in joined)):
            yield LayoutState(letters, tuple(outer + nest for outer, nest in zip(base.nests, inner, strict=True)))


def free_frame(axes: int, ndim: int) -> LayoutState:
    return LayoutState((FREE_AXIS,) * axes, ((),) * ndim)


def common_frame(src: LayoutState, dst: LayoutState) -> LayoutState:
    """What two states have in common, else FREE. Up to ``EXACT_AXES`` axes all are FREE; on larger
    meshes an axis used alike, with no changing axis around it, stays fixed."""
    axes = len(src.kinds)
    if axes <= EXACT_AXES:
        return free_frame(axes, len(src.nests))
    nests = tuple(
        tuple(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*pair, strict=False)))
        for pair in zip(src.nests, dst.nests, strict=True)
    )
    fixed = {a for nest in nests for a in nest}
    kinds = (
        k if a in fixed or k == o != "S" else FREE_AXIS
        for a, (k, o) in enumerate(zip(src.kinds, dst.kinds, strict=True))
    )
    return LayoutState(tuple(kinds), nests)


def intermediate_state(src: LayoutState, dst: LayoutState, common: LayoutState) -> LayoutState:
    """An intermediate state if too many axes change. Up to ``EXACT_AXES`` changing inner axes of
    the source are gathered or reduced; else the target's are deferred. ``common``: the frame of
    both ends."""
    free = [a for a, k in enumerate(common.kinds) if k == FREE_AXIS]
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
def layout_space(sizes: tuple[int, ...], kinds: tuple[str, ...], base: LayoutState) -> LayoutSpace:
    """The cached layout graph; ``base`` has at most ``MAX_FREE_AXES`` free axes."""
    return LayoutSpace(sizes, len(base.nests), kinds, base)

"""The planner against an exhaustive Dijkstra that is written from the definitions alone.

Nothing here looks at the planner's graph. A state is what every rank owns (a box of the tensor, by recursive
``torch.chunk``) and how the ranks hold it; whether one collective leads from one state to another is decided by looking
at the boxes; the backward is the forward of the gradient's layouts (Replicate and Partial change places).
"""

from __future__ import annotations

import functools
import heapq
import importlib
import itertools
import math
import pkgutil
import random
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch

from autoshard.layout import I, Layout, P, R, Shard
from autoshard.mesh import Mesh
from autoshard.passes import redistribute
from autoshard.passes.redistribute import layout_graph, redistribution

DUAL = {"R": "P", "P": "R", "I": "I"}
PLACEMENT = {"R": R, "I": I, "P": P}


class World:
    """All states of one tensor on one mesh, and all transitions a single runtime call can make."""

    def __init__(self, sizes: tuple[int, ...], shape: tuple[int, ...], grad: bool) -> None:
        self.sizes, self.shape, self.grad = sizes, shape, grad
        self.coordinates = list(itertools.product(*map(range, sizes)))
        letters = "RIP" if grad else "RP"
        # A state: per axis a letter or (dim, depth): depth 0 is the outermost cut of that dim.
        self.states = [s for s in itertools.product(self._options(letters), repeat=len(sizes)) if self._nested(s)]
        self.boxes = {s: self._boxes(s) for s in self.states}
        self.edges = {s: self._transitions(s) for s in self.states}

    def _options(self, letters: str) -> list[object]:
        depths = itertools.product(range(len(self.shape)), range(len(self.sizes)))
        return [*letters, *depths]

    def _nested(self, state: tuple) -> bool:
        """The depths of every dim are 0, 1, 2, … without a gap or a repetition."""
        for d in range(len(self.shape)):
            depths = sorted(p[1] for p in state if isinstance(p, tuple) and p[0] == d)
            if depths != list(range(len(depths))):
                return False
        return True

    def _boxes(self, state: tuple) -> np.ndarray:
        """[rank, dim, (low, high)]."""
        boxes = []
        for at in self.coordinates:
            box = []
            for d, n in enumerate(self.shape):
                low, high = 0, n
                axes = sorted((p[1], a) for a, p in enumerate(state) if isinstance(p, tuple) and p[0] == d)
                for _, a in axes:
                    pieces = torch.chunk(torch.arange(low, high), self.sizes[a])
                    lengths = [len(p) for p in pieces] + [0] * (self.sizes[a] - len(pieces))
                    low += sum(lengths[: at[a]])
                    high = low + lengths[at[a]]
                box.append((low, high))
            boxes.append(box)
        return np.array(boxes).reshape(len(self.coordinates), len(self.shape), 2)

    def volume(self, state: tuple) -> int:
        """Elements of the largest local tensor."""
        boxes = self.boxes[state]
        return int((boxes[:, :, 1] - boxes[:, :, 0]).prod(axis=1).max())

    def groups(self, axes: tuple[int, ...]) -> list[list[int]]:
        """Ranks that agree on all other axes."""
        rest: dict[tuple, list[int]] = {}
        for rank, at in enumerate(self.coordinates):
            rest.setdefault(tuple(x for a, x in enumerate(at) if a not in axes), []).append(rank)
        return list(rest.values())

    def _transitions(self, s: tuple) -> list[tuple[tuple, Fraction]]:
        found = []
        for t in self.states:
            cost = self.one_call(s, t) if t != s else None
            if cost is not None and self.grad:
                # The gradient takes the same way back, through the gradient's layouts.
                back = self.one_call(dual(t), dual(s))
                assert back is not None, f"{s} -> {t} has no backward"
                cost += back
            if cost is not None:
                found.append((t, cost))
        return found

    @functools.cache  # noqa: B019  lives as long as the test
    def one_call(self, s: tuple, t: tuple) -> Fraction | None:
        """Ring volume per rank of the single call that turns ``s`` into ``t``, None where there is none."""
        costs = [c for c in (self._convert(s, t), self._permute(s, t)) if c is not None]
        return min(costs, default=None)

    def _convert(self, s: tuple, t: tuple) -> Fraction | None:
        axes = tuple(a for a in range(len(s)) if s[a] != t[a])
        before, after = ({p[0] if isinstance(p, tuple) else p for p in (x[a] for a in axes)} for x in (s, t))
        if len(before) != 1 or len(after) != 1:
            return None
        (frm,), (to,), n = before, after, math.prod(self.sizes[a] for a in axes)
        small = min(self.volume(s), self.volume(t))
        if isinstance(frm, str) and isinstance(to, str):
            reduce = frm == "P"
            return Fraction(2 * (n - 1) * small, n) if reduce else Fraction(0)
        if isinstance(frm, str):
            if not self._tiles(t, s, axes):
                return None
            return Fraction((n - 1) * small if frm == "P" else 0)
        if isinstance(to, str):
            return (Fraction(0) if to == "P" else Fraction((n - 1) * small)) if self._tiles(s, t, axes) else None
        return self._all_to_all(s, t, axes, frm, to) if frm != to else None

    def _tiles(self, fine: tuple, coarse: tuple, axes: tuple[int, ...]) -> bool:
        """In every group the boxes of ``fine`` lie side by side and fill the one box that all have in ``coarse``."""
        for group in self.groups(axes):
            small, big = self.boxes[fine][group], self.boxes[coarse][group]
            if (big != big[0]).any():
                return False
            if (small[:, :, 1] - small[:, :, 0]).prod(axis=1).sum() != (big[0, :, 1] - big[0, :, 0]).prod():
                return False
            real = small[(small[:, :, 1] > small[:, :, 0]).all(axis=1)]
            if (real[:, :, 0] < big[0, :, 0]).any() or (real[:, :, 1] > big[0, :, 1]).any():
                return False
        return True

    def _all_to_all(self, s: tuple, t: tuple, axes: tuple[int, ...], frm: int, to: int) -> Fraction | None:
        """Rank k of the group gives piece j of its chunk to rank j: both cuts must number the ranks alike."""
        worst = 0
        for group in self.groups(axes):
            a, b = self.boxes[s][group], self.boxes[t][group]
            others = [d for d in range(len(self.shape)) if d not in (frm, to)]
            if (a[:, others] != b[:, others]).any() or (a[:, to] != a[0, to]).any() or (b[:, frm] != b[0, frm]).any():
                return None
            by_chunk, by_piece = (np.subtract.outer(x, x) for x in (a[:, frm].sum(1), b[:, to].sum(1)))
            if (by_chunk * by_piece < 0).any():
                return None
            whole, cut = a[:, frm], b[:, to]
            if whole[:, 0].min() != b[0, frm, 0] or whole[:, 1].max() != b[0, frm, 1]:
                return None
            if cut[:, 0].min() != a[0, to, 0] or cut[:, 1].max() != a[0, to, 1]:
                return None
            piece = np.minimum(a[:, :, 1] - a[:, :, 0], b[:, :, 1] - b[:, :, 0]).prod(axis=1)
            worst = max(worst, int(piece.max()))
        return Fraction((math.prod(self.sizes[a] for a in axes) - 1) * worst)

    def _permute(self, s: tuple, t: tuple) -> Fraction | None:
        """The ranks hold the same chunks, dealt out in another way."""

        def holders(x: tuple, letter: str) -> int:
            return math.prod(n for n, p in zip(self.sizes, x, strict=True) if p == letter)

        if any(holders(s, k) != holders(t, k) for k in "RIP"):
            return None
        a, b = (sorted(map(tuple, self.boxes[x].reshape(len(self.coordinates), -1).tolist())) for x in (s, t))
        return Fraction(self.volume(s)) if a == b and (self._even(s) or self._renumbers_one_dim(s, t)) else None

    def _even(self, state: tuple) -> bool:
        lengths = self.boxes[state][:, :, 1] - self.boxes[state][:, :, 0]
        return bool((lengths == lengths[0]).all())

    def _renumbers_one_dim(self, s: tuple, t: tuple) -> bool:
        """A permute of unequal chunks must know their lengths: one dim, cut into the same sizes in the same order."""

        def cuts(x: tuple, dim: int) -> list[int]:
            axes = sorted((p[1], a) for a, p in enumerate(x) if isinstance(p, tuple) and p[0] == dim)
            return [self.sizes[a] for _, a in axes]

        changed = [a for a in range(len(s)) if s[a] != t[a]]
        dims = {x[a][0] if isinstance(x[a], tuple) else x[a] for a in changed for x in (s, t)}
        (dim,) = dims if len(dims) == 1 else (None,)
        return isinstance(dim, int) and cuts(s, dim) == cuts(t, dim)

    def distances(self, source: tuple) -> dict[tuple, Fraction]:
        """Dijkstra: the least volume from ``source`` to every state."""
        best: dict[tuple, Fraction] = {}
        queue: list[tuple[Fraction, int, tuple]] = [(Fraction(0), 0, source)]
        count = itertools.count(1)
        while queue:
            cost, _, state = heapq.heappop(queue)
            if state not in best:
                best[state] = cost
                for target, extra in self.edges[state]:
                    if target not in best:
                        heapq.heappush(queue, (cost + extra, next(count), target))
        return best

    def layout(self, mesh: Mesh, state: tuple) -> Layout:
        placements = {
            a: Shard(p[0]) if isinstance(p, tuple) else PLACEMENT[p] for a, p in zip(mesh.axes, state, strict=True)
        }
        depth = {a: p[1] if isinstance(p, tuple) else 0 for a, p in zip(mesh.axes, state, strict=True)}
        return Layout(mesh, placements, sorted(mesh.axes, key=depth.__getitem__))


def dual(state: tuple) -> tuple:
    """The gradient's state."""
    return tuple(p if isinstance(p, tuple) else DUAL[p] for p in state)


def compare(sizes: tuple[int, ...], shape: tuple[int, ...], grad: bool, pairs: int | None) -> tuple[int, list[str]]:
    """Number of pairs compared, and where the planner's bytes differ from the exhaustive optimum."""
    mesh, world, rng = Mesh(dict(zip("abc", sizes, strict=False))), World(sizes, shape, grad), random.Random(0)
    layouts = {s: world.layout(mesh, s) for s in world.states}
    count = max(1, pairs // 50) if pairs and pairs < len(world.states) ** 2 else len(world.states)
    wrong, seen = [], 0
    for source in rng.sample(world.states, min(count, len(world.states))):
        targets = world.states if count == len(world.states) else rng.sample(world.states, min(50, len(world.states)))
        best = world.distances(source)
        for target in targets:
            plan = redistribution(layouts[source], layouts[target], shape, mesh, torch.uint8, grad)
            seen += 1
            if abs(plan.bytes - float(best[target])) > 1e-9:
                wrong.append(f"{plan}\n  exhaustive: {float(best[target])}")
    return seen, wrong


MESHES = [(2, 2), (2, 4), (2, 2, 2), (2, 3, 4)]
SHAPES = [(48,), (48, 24), (24, 48, 72)]


@pytest.mark.slow_cases("*(2, 3, 4)-*", "(2, 2, 2)-rank3-*", "(2, 2, 2)-rank2-*", "*-inference")
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("shape", SHAPES, ids=["rank1", "rank2", "rank3"])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_equals_exhaustive_search(sizes: tuple[int, ...], shape: tuple[int, ...], grad: bool) -> None:
    seen, wrong = compare(sizes, shape, grad, pairs=800)
    assert seen >= 16
    assert not wrong, wrong[0]


# Sizes that do not divide, down to ranks without a row; a dim of length 0.
UNEVEN = [((2, 2), (7,)), ((2, 4), (5, 1)), ((2, 2), (10, 9)), ((2, 2, 2), (3,)), ((2, 3, 4), (5, 7)), ((2, 4), (0, 4))]


@pytest.mark.slow_cases("*(2, 3, 4)-*", "*-inference")
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(("sizes", "shape"), UNEVEN, ids=str)
def test_equals_exhaustive_search_where_uneven(sizes: tuple[int, ...], shape: tuple[int, ...], grad: bool) -> None:
    seen, wrong = compare(sizes, shape, grad, pairs=600)
    assert seen >= 100
    assert not wrong, wrong[0]


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing cached before, nothing left behind after."""
    modules = [
        importlib.import_module(f"{redistribute.__name__}.{m.name}")
        for m in pkgutil.iter_modules(redistribute.__path__)
    ]
    caches = [x for module in modules for x in vars(module).values() if hasattr(x, "cache_clear")]
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_the_search_sees_a_planner_without_permutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_graph.LayoutSpace, "_permutes", lambda *_: iter(()))
    assert compare((2, 2), (48, 24), False, pairs=None)[1]


@pytest.mark.usefixtures("fresh")
def test_the_search_sees_an_all_to_all_that_is_too_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    volume = layout_graph.LayoutSpace.volume
    monkeypatch.setattr(
        layout_graph.LayoutSpace,
        "volume",
        lambda self, kind, *rest: volume(self, kind, *rest) // (1 + (kind == "all_to_all")),
    )
    assert compare((2, 4), (48, 24), False, pairs=None)[1]


@pytest.mark.slow_cases("*(2, 3, 4)-*")
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("shape", SHAPES, ids=["rank1", "rank2", "rank3"])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_equals_exhaustive_search_on_all_pairs(sizes: tuple[int, ...], shape: tuple[int, ...], grad: bool) -> None:
    seen, wrong = compare(sizes, shape, grad, pairs=None)
    assert seen > 0
    assert not wrong, wrong[0]

"""Redistribution through a reshape: known plans, values and gradients, and an exhaustive search beside it."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
import torch
from harness import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from redistributed_values import holds, spread

import autoshard
from autoshard import runtime
from autoshard.errors import LayoutError
from autoshard.layout import I, Layout, P, R, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.program import Local
from autoshard.passes.redistribute import Redistribution, RedistributionStep, redistribution, runtime_call
from autoshard.passes.redistribute.resharding import refine

S0, S1, S2, S3 = map(Shard, range(4))
TP4, M24 = Mesh({"tp": 4}), Mesh({"a": 2, "b": 4})


def kinds(plan: Redistribution) -> list[str]:
    return [s.kind for s in plan.steps]


@pytest.mark.parametrize(
    ("src", "dst", "factors", "src_parts", "dst_parts"),
    [
        ((2, 12), (2, 3, 4), (2, 3, 4), ((0,), (1, 2)), ((0,), (1,), (2,))),
        ((4, 6), (2, 12), (2, 2, 6), ((0, 1), (2,)), ((0,), (1, 2))),
        ((6, 4), (4, 6), (2, 12), ((0,), ()), ((0,), ())),
        ((1, 4), (4,), (4,), ((), (0,)), ((0,),)),
        ((), (1, 1), (), (), ((), ())),
        ((0, 3), (3, 0), (0,), ((), ()), ((), ())),
        ((6, 10, 7), (4, 15, 7), (2, 30, 7), ((0,), (), (2,)), ((0,), (), (2,))),
    ],
)
def test_refine(src: tuple, dst: tuple, factors: tuple, src_parts: tuple, dst_parts: tuple) -> None:
    found = refine(src, dst)
    assert (found.shape, found.src, found.dst) == (factors, src_parts, dst_parts)


B, S, H, D = 2, 16, 8, 64
NAMED = [
    ("heads stay with their ranks", TP4, [S2], [S2], (B, S, H * D), (B, S, H, D), ["reshape"], 0),
    ("heads to positions", TP4, [S2], [S1], (B, S, H * D), (B, S, H, D), ["reshape", "all_to_all"], 3072),
    ("slice before the reshape", TP4, [R], [S3], (B, S, H * D), (B, S, H, D), ["reshape", "slice"], 0),
    ("on the factors", TP4, [S1], [S1], (8, 4 * 64), (32, 64), ["reshape", "all_to_all", "reshape"], 3 / 16 * 8 * 256),
    ("reduce-scatter", TP4, [P], [S0], (4, 8), (32,), ["reshape", "reduce_scatter"], 3 / 4 * 32),
    ("both axes on one dim", M24, [S0, S0], [S0, S1], (16, 4), (2, 8, 4), ["reshape"], 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("mesh", "src", "dst", "shape", "to", "steps", "size"), [c[1:] for c in NAMED], ids=[c[0] for c in NAMED]
)
def test_named(mesh: Mesh, src: list, dst: list, shape: tuple, to: tuple, steps: list[str], size: float) -> None:
    plan = redistribution(src, dst, shape, mesh, torch.uint8, dst_shape=to)
    assert sorted(kinds(plan)) == sorted(steps)
    assert plan.bytes == size
    assert plan.gathered == ()


def test_the_last_resort_is_reported() -> None:
    """Chunks of 5 rows are no chunks of 7 rows: the whole tensor is reshaped, and the plan says so."""
    plan = autoshard.redistribution({"tp": S0}, {"tp": S0}, (5, 7), {"tp": 4}, dst_shape=(7, 5))
    assert plan.gathered == ("tp",)
    assert str(plan).splitlines()[0].startswith("S(0)@tp → S(0)@tp  float32[5, 7] → [7, 5]: ")
    assert "reshape [5, 7] → [7, 5]: " in str(plan)
    assert str(plan).endswith("gathered for the reshape, because the shapes have no common factor to shard: tp")


def test_a_reshape_of_one_shape_is_none() -> None:
    assert (
        redistribution([S0], [S1], (8, 8), TP4, dst_shape=(8, 8)).steps == redistribution([S0], [S1], (8, 8), TP4).steps
    )


def test_errors() -> None:
    with pytest.raises(LayoutError, match=r"cannot reshape \[5, 7\] to \[6, 6\]: 35 elements to 36"):
        redistribution([S0], [S0], (5, 7), TP4, dst_shape=(6, 6))
    with pytest.raises(LayoutError, match="on a tensor of 1 dims"):
        redistribution([S0], [S1], (5, 7), TP4, dst_shape=(35,))
    with pytest.raises(LayoutError, match="at most 11 elements"):
        redistribution([S0], [S0], (5, 7), TP4, dst_shape=(7, 5), peak_limit=11)


# ---- values and gradients -------------------------------------------------------------------------------------------

MESHES = [(2,), (3,), (4,), (2, 2), (2, 3), (2, 1, 2)]
SHAPES = [
    ((4, 6), (4, 2, 3)), ((2, 12), (8, 3)), ((4, 6), (6, 4)), ((8, 4), (2, 4, 4)), ((2, 3, 4), (24,)), ((5, 4), (4, 5)),
    ((1, 8), (8, 1)), ((4, 4, 3), (16, 3)), ((3, 4), (12,)), ((0, 4), (4, 0)), ((8, 9), (12, 6)), ((7, 2, 2), (7, 4)),
]  # fmt: skip

Case = tuple[Layout, Layout, tuple[int, ...], tuple[int, ...], bool, int]


@st.composite
def cases(draw: Callable) -> Case:
    sizes, shapes = draw(st.sampled_from(MESHES)), draw(st.sampled_from(SHAPES))
    mesh = Mesh(dict(zip("abc", sizes, strict=False)))
    shape, to = shapes if draw(st.booleans()) else shapes[::-1]

    def layout(ndim: int) -> Layout:
        placements = st.sampled_from([R, I, P, *map(Shard, range(ndim))])
        return Layout(mesh, [draw(placements) for _ in sizes], draw(st.permutations(mesh.axes)))

    return layout(len(shape)), layout(len(to)), shape, to, draw(st.booleans()), draw(st.integers(0, 2**32 - 1))


def call(step: RedistributionStep, x: torch.Tensor) -> torch.Tensor:
    fn, args, kwargs = runtime_call(step)

    def local(value: object) -> object:
        if isinstance(value, list):
            return [local(v) for v in value]
        return runtime.size(value.size, value.axes) if isinstance(value, Local) else value

    return getattr(runtime, fn)(x, *map(local, args), **{k: local(v) for k, v in kwargs.items()})


@settings(max_examples=examples(200))
@given(cases())
def test_values_and_gradients(case: Case) -> None:
    src, dst, shape, to, grad, seed = case
    rng = np.random.default_rng(seed)
    full = rng.integers(-99, 99, shape)
    plan = redistribution(src, dst, shape, src.mesh, torch.float64, grad, dst_shape=to)
    leaves = [torch.tensor(c, dtype=torch.float64, requires_grad=grad) for c in spread(src, full, rng)]
    world = runtime.World(dict(zip(src.mesh.axes, src.mesh.shape, strict=True)))

    def rank_main(x: torch.Tensor) -> torch.Tensor:
        for step in plan.steps:
            x = call(step, x)
        return x

    outs = world.run(rank_main, [(x,) for x in leaves])
    assert holds(dst, [x.detach().numpy() for x in outs], full.reshape(to))
    if grad:
        gradient = rng.integers(-99, 99, to)
        grads = [torch.tensor(g, dtype=torch.float64) for g in spread(dst.gradient(), gradient, rng)]
        torch.autograd.backward(outs, grads)
        assert holds(src.gradient(), [x.grad.numpy() for x in leaves], gradient.reshape(shape))


def test_the_check_sees_a_wrong_plan() -> None:
    """Negative control: the same steps for another target layout do not hold it."""
    full = np.arange(24)
    plan = redistribution([S0], [S1], (4, 6), Mesh({"a": 2}), torch.float64, dst_shape=(4, 2, 3))
    world = runtime.World({"a": 2})
    leaves = [torch.tensor(c) for c in spread(plan.src, full.reshape(4, 6), np.random.default_rng(0))]
    outs = world.run(lambda x: call(plan.steps[-1], call(plan.steps[0], x)), [(x,) for x in leaves])
    assert holds(plan.dst, [x.numpy() for x in outs], full.reshape(4, 2, 3))
    assert not holds(Layout(plan.dst.mesh, [S0]), [x.numpy() for x in outs], full.reshape(4, 2, 3))


# ---- nothing is cheaper ---------------------------------------------------------------------------------------------


def chunks(layout: Layout, shape: tuple[int, ...]) -> tuple[object, ...]:
    """Which elements every rank holds, and what else the layout says: equal exactly where a reshape is local."""
    ids = np.arange(math.prod(shape)).reshape(shape)
    held = []
    for rank in range(layout.mesh.size):
        spans = [layout.chunk_of(d, n, rank) for d, n in enumerate(shape)]
        held.append(ids[tuple(slice(start, start + length) for start, length in spans)].tobytes())
    return (*held, *("S" if isinstance(p, Shard) else str(p) for p in layout.placements))


def all_layouts(mesh: Mesh, ndim: int) -> Iterator[Layout]:
    found = {
        Layout(mesh, p, order)
        for p in itertools.product([R, P, *map(Shard, range(ndim))], repeat=mesh.ndim)
        for order in itertools.permutations(mesh.axes)
    }
    return iter(sorted(found, key=str))


@cache
def between(src: Layout, dst: Layout, shape: tuple[int, ...]) -> float:
    return redistribution(src, dst, shape, src.mesh, torch.uint8).bytes


@pytest.mark.parametrize(("shape", "to"), [((4, 6), (4, 2, 3)), ((2, 12), (8, 3)), ((4, 6), (6, 4))])
@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
def test_nothing_is_cheaper(sizes: tuple[int, ...], shape: tuple, to: tuple) -> None:
    """Dijkstra over both shapes and their factors, joined wherever all ranks hold the same elements."""
    mesh = Mesh(dict(zip("ab", sizes, strict=False)))
    shapes = (shape, refine(shape, to).shape, to)
    layouts = [list(all_layouts(mesh, len(s))) for s in shapes]
    same: dict[object, list[tuple[int, Layout]]] = {}
    for i, s in enumerate(shapes):
        for layout in layouts[i]:
            same.setdefault(chunks(layout, s), []).append((i, layout))

    def least(src: Layout) -> dict[tuple[int, Layout], float]:
        queue, done = [(0.0, 0, (0, src))], {}
        count = itertools.count(1)
        while queue:
            spent, _, at = heapq.heappop(queue)
            if at in done:
                continue
            done[at] = spent
            i, layout = at
            for other in same[chunks(layout, shapes[i])]:
                heapq.heappush(queue, (spent, next(count), other))
            for other in layouts[i]:
                heapq.heappush(queue, (spent + between(layout, other, shapes[i]), next(count), (i, other)))
        return done

    for src in layouts[0][:: 1 if len(sizes) == 1 else 9]:
        found = least(src)
        for dst in layouts[2]:
            ours = redistribution(src, dst, shape, mesh, torch.uint8, dst_shape=to).bytes
            assert ours == pytest.approx(found[2, dst]), f"{src} → {dst}"

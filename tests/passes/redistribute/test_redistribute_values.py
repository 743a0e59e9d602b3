"""Redistribution on values: the steps give the exact shards and gradients, simulated and run by the runtime."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from harness import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from redistributed_values import Chunks, holds, spread

from autoshard import runtime
from autoshard.layout import I, Layout, P, Partial, R, Shard, chunk
from autoshard.mesh import Mesh
from autoshard.passes.ir.program import Local
from autoshard.passes.redistribute import RedistributionStep, redistribution, runtime_call

S0, S1 = Shard(0), Shard(1)


# ---- a simulator of the steps, from their definitions ---------------------------------------------------------------


def cut(x: np.ndarray, dim: int, sizes: list[int]) -> Chunks:
    """Nested torch.chunk, outer to inner, in rank order."""
    if not sizes:
        return [x]
    spans = [chunk(x.shape[dim], sizes[0], i) for i in range(sizes[0])]
    outer = [np.take(x, range(start, start + length), dim) for start, length in spans]
    return [piece for part in outer for piece in cut(part, dim, sizes[1:])]


def forward(step: RedistributionStep, parts: Chunks, sizes: list[int]) -> Chunks:
    """What one group holds after the step; ``parts`` in the group's order. ``sizes``: of the group's axes."""
    n, dims, zero = len(parts), step.dims, [np.zeros_like(p) for p in parts]
    if step.kind in ("enter", "leave"):
        return parts
    if step.kind == "partial":
        return [parts[0], *zero[1:]]
    if step.kind == "all_reduce":
        source = step.src[step.axes[0]]
        reduce = {"sum": sum, "max": np.maximum.reduce, "min": np.minimum.reduce}[source.op]
        return [reduce(parts)] * n
    if step.kind == "reduce_scatter":
        return cut(sum(parts), dims[0], sizes)
    if step.kind == "all_gather":
        return [np.concatenate(parts, dims[0])] * n
    if step.kind == "slice":
        return [cut(p, dims[0], sizes)[i] for i, p in enumerate(parts)]
    if step.kind == "pad":
        return [np.concatenate([*zero[:i], p, *zero[i + 1 :]], dims[0]) for i, p in enumerate(parts)]
    assert step.kind == "all_to_all"
    pieces = [cut(p, dims[1], sizes) for p in parts]
    return [np.concatenate([pieces[j][i] for j in range(n)], dims[0]) for i in range(n)]


def backward(step: RedistributionStep, grads: Chunks, before: Chunks, sizes: list[int]) -> Chunks:
    """The gradients before the step from those after it; ``before``: the values before it, for their shapes."""
    n, of = len(grads), step.src[step.axes[0]]
    to = step.dst[step.axes[0]]
    first_keeps = [grads[0], *(np.zeros_like(g) for g in grads[1:])]
    if step.kind == "enter" or (step.kind == "all_reduce" and to == R):
        return [sum(grads)] * n
    if step.kind == "leave" or (step.kind == "partial" and of == R):
        return first_keeps
    if step.kind in ("all_reduce", "partial"):
        return grads
    if step.kind == "all_to_all":
        pieces = [np.split(g, ends([b.shape[step.dims[0]] for b in before]), step.dims[0]) for g in grads]
        return [np.concatenate([pieces[j][i] for j in range(n)], step.dims[1]) for i in range(n)]
    dim = step.dims[0]
    if step.kind == "reduce_scatter" or (step.kind == "slice" and of == I):
        return [np.concatenate(grads, dim)] * n
    if step.kind == "slice":
        zero = [np.zeros_like(g) for g in grads]
        return [np.concatenate([*zero[:i], g, *zero[i + 1 :]], dim) for i, g in enumerate(grads)]
    whole = [sum(grads)] * n if step.kind == "all_gather" and to == R else grads
    return [np.split(g, ends([b.shape[dim] for b in before]), dim)[i] for i, g in enumerate(whole)]


def ends(lengths: list[int]) -> list[int]:
    return list(itertools.accumulate(lengths))[:-1]


def apply(step: RedistributionStep, chunks: Chunks) -> Chunks:
    """The chunks of all ranks after the step."""
    mesh, out = step.src.mesh, list(chunks)
    for group in mesh.groups(step.axes):
        if step.kind == "permute":
            new = [chunks[r] for r in group]
            for r, part in zip(mesh.group(group[0], step.order), new, strict=True):
                out[r] = part
            continue
        new = forward(step, [chunks[r] for r in group], [mesh.size_of(a) for a in step.axes])
        for r, part in zip(group, new, strict=True):
            out[r] = part
    return out


def unapply(step: RedistributionStep, grads: Chunks, before: Chunks) -> Chunks:
    """The gradients of all ranks before the step."""
    mesh, out = step.src.mesh, list(grads)
    for group in mesh.groups(step.axes):
        if step.kind == "permute":
            new = [grads[r] for r in mesh.group(group[0], step.order)]
        else:
            new = backward(
                step, [grads[r] for r in group], [before[r] for r in group], [mesh.size_of(a) for a in step.axes]
            )
        for r, part in zip(group, new, strict=True):
            out[r] = part
    return out


# ---- random cases ---------------------------------------------------------------------------------------------------


MESHES = [(2,), (3,), (2, 2), (2, 4), (3, 2), (1, 4), (2, 2, 2), (2, 3, 2), (2, 1, 3), (2, 2, 2, 2), (2, 1, 3, 2)]


@dataclasses.dataclass(frozen=True)
class Case:
    src: Layout
    dst: Layout
    shape: tuple[int, ...]
    grad: bool
    minimize: str
    seed: int

    @property
    def plan(self) -> tuple[RedistributionStep, ...]:
        mesh = self.src.mesh
        return redistribution(
            self.src, self.dst, self.shape, mesh, torch.int64, self.grad, minimize=self.minimize
        ).steps


@st.composite
def cases(
    draw: Callable, kinds: tuple = (R, I, P), grads: tuple[bool, ...] = (False, True), meshes: list = MESHES
) -> Case:
    sizes = draw(st.sampled_from(meshes))
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=2 if len(sizes) >= 4 else 3)))
    hardware = draw(st.sampled_from(["h100", "cpu", "ideal_network"]))
    mesh = Mesh(dict(zip("abcdefg", sizes, strict=False)), hardware)
    placements = st.sampled_from([*kinds, *map(Shard, range(len(shape)))])
    src, dst = (Layout(mesh, [draw(placements) for _ in sizes], draw(st.permutations(mesh.axes))) for _ in range(2))
    minimize = draw(st.sampled_from(["bytes", "seconds"]))
    return Case(src, dst, shape, draw(st.sampled_from(grads)), minimize, draw(st.integers(0, 2**32 - 1)))


def values(case: Case) -> tuple[np.ndarray, Chunks, np.random.Generator]:
    rng = np.random.default_rng(case.seed)
    full = rng.integers(-99, 99, case.shape)
    return full, spread(case.src, full, rng), rng


@pytest.mark.slow
@settings(max_examples=examples(300))
@given(cases())
def test_steps_give_the_exact_shards_and_gradients(case: Case) -> None:
    full, chunks, rng = values(case)
    history = [chunks]
    for step in case.plan:
        history.append(apply(step, history[-1]))
        assert holds(step.dst, history[-1], full), step
    assert holds(case.dst, history[-1], full)
    if case.grad:
        gradient = rng.integers(-99, 99, case.shape)
        grads = spread(case.dst.gradient(), gradient, rng)
        for step, before in zip(reversed(case.plan), reversed(history[:-1]), strict=True):
            grads = unapply(step, grads, before)
            assert holds(step.src.gradient(), grads, gradient), f"backward of {step}"
        assert holds(case.src.gradient(), grads, gradient)


@settings(max_examples=2)
@given(cases(meshes=[(2, 1, 2, 1, 2, 2)]))
def test_any_number_of_axes(case: Case) -> None:
    test_steps_give_the_exact_shards_and_gradients.hypothesis.inner_test(case)  # type: ignore[attr-defined]


@settings(max_examples=examples(80))
@given(cases(kinds=(R, Partial("max")), grads=(False,)))
def test_max_is_reduced_exactly(case: Case) -> None:
    new = {a: R for a in case.dst.axes_with(Partial) if case.src[a] != Partial("max")}
    case = dataclasses.replace(case, dst=case.dst.replace(new))
    full, chunks, _ = values(case)
    for step in case.plan:
        chunks = apply(step, chunks)
    assert holds(case.dst, chunks, full)


def test_the_check_sees_a_wrong_step() -> None:
    mesh = Mesh({"a": 2, "b": 2})
    src, dst = Layout(mesh, [S0, S0]), Layout(mesh, [S1, S1])
    (step,) = redistribution(src, dst, (4, 4), mesh).steps
    full = np.arange(16).reshape(4, 4)
    chunks = spread(src, full, np.random.default_rng(0))
    wrong = dataclasses.replace(step, axes=("b", "a"))
    assert holds(dst, apply(step, chunks), full)
    assert not holds(dst, apply(wrong, chunks), full)


# ---- the runtime carries the steps out ------------------------------------------------------------------------------


def call(step: RedistributionStep, x: torch.Tensor) -> torch.Tensor:
    name, args, kwargs = runtime_call(step)
    local = {k: runtime.size(v.size, v.axes) if isinstance(v, Local) else v for k, v in kwargs.items()}
    return getattr(runtime, name)(x, *args, **local)


@settings(max_examples=examples(150))
@given(cases())
def test_runtime_agrees(case: Case) -> None:
    full, chunks, rng = values(case)
    leaves = [torch.tensor(c, dtype=torch.float64, requires_grad=case.grad) for c in chunks]

    def rank_main(x: torch.Tensor) -> torch.Tensor:
        for step in case.plan:
            x = call(step, x)
        return x

    mesh = case.src.mesh
    world = runtime.World(dict(zip(mesh.axes, mesh.shape, strict=True)))
    outs = world.run(rank_main, [(x,) for x in leaves])
    assert holds(case.dst, [x.detach().numpy() for x in outs], full)
    if case.grad:
        gradient = rng.integers(-99, 99, case.shape)
        grads = [torch.tensor(g, dtype=torch.float64) for g in spread(case.dst.gradient(), gradient, rng)]
        torch.autograd.backward(outs, grads)
        assert holds(case.src.gradient(), [x.grad.numpy() for x in leaves], gradient)


@settings(max_examples=examples(80))
@given(cases())
def test_runtime_moves_the_predicted_bytes(case: Case) -> None:
    """What runs logs exactly the planned bytes, forward and backward, under the same axes; uneven sizes included."""
    mesh = case.src.mesh
    leaves = [torch.tensor(c, dtype=torch.float64, requires_grad=case.grad) for c in values(case)[1]]
    world = runtime.World(dict(zip(mesh.axes, mesh.shape, strict=True)))
    world.log = []
    steps = case.plan

    def rank_main(x: torch.Tensor) -> torch.Tensor:
        for step in steps:
            x = call(step, x)
        return x

    outs = world.run(rank_main, [(x,) for x in leaves])
    if case.grad:
        torch.autograd.backward(outs, [torch.zeros_like(x) for x in outs])
    planned = {
        "forward": [(s.kind, s.group, s.forward_bytes) for s in steps],
        "backward": [(s.backward, s.group, s.backward_bytes) for s in reversed(steps)],
    }
    for phase, calls in planned.items():
        executed = [(c.kind, c.axes, c.bytes) for c in world.log if c.phase == phase and c.bytes]
        assert executed == [(kind, axes, pytest.approx(n)) for kind, axes, n in calls if n]

"""The runtime on the in-process mesh: every function by its definition, and what happens when ranks go wrong."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import runtime_cases as rc
import torch

from autoshard import runtime
from autoshard.errors import LayoutError, MeshError, RuntimeMismatchError
from autoshard.runtime.transport.move import Move


def run_case(world: runtime.World, case: rc.Case, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    xs = [change(x).requires_grad_() for x in rc.inputs(case)]
    ys = world.run(case.call, [(x,) for x in xs])
    torch.autograd.backward(ys, [change(g) for g in rc.output_gradients(case)])
    rc.check(case, list(ys), [x.grad for x in xs if x.grad is not None])


@pytest.mark.slow_cases("*{'a': 2, 'b': 2}", "contiguous-{'a': 2, 'b': 3}", "scrambled-{'a': 2, 'b': 3}")
@pytest.mark.parametrize("mesh", rc.MESHES, ids=str)
@pytest.mark.parametrize("change", [torch.clone, rc.scrambled], ids=["contiguous", "scrambled"])
def test_values_and_gradients(mesh: dict[str, int], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    world = runtime.World(mesh)
    for case in rc.cases(mesh):
        run_case(world, case, change)


def test_what_no_gradient_reaches_has_none() -> None:
    """Not zeros: an optimizer with weight decay would step on these."""
    given = [[torch.ones(2, 3, requires_grad=True) for _ in "ab"] for _ in range(2)]
    sum(y.sum() for y in runtime.World({"a": 2}).run(rc.unasked, given)).backward()
    assert all(a.grad is not None and b.grad is None for a, b in given)


def test_a_backward_that_sums_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Move.backward
    monkeypatch.setattr(Move, "backward", lambda m: right(m)._replace(source="P") if m.source == "P" else right(m))
    case = next(c for c in rc.cases({"a": 2}) if c.name == "all_reduce" and c.target == "I")
    with pytest.raises(AssertionError, match="gradient on rank 0"):
        run_case(runtime.World({"a": 2}), case, torch.clone)


@pytest.mark.parametrize("mesh", rc.MESHES, ids=str)
def test_without_gradient(mesh: dict[str, int]) -> None:
    """Integers, bools and half floats; no_grad and inference mode."""
    world = runtime.World(mesh)
    for case in rc.cases(mesh):
        if case.shape != rc.SHAPES["uneven"] or case.source == "P":
            continue
        for dtype in (torch.int64, torch.bool, torch.bfloat16):
            xs = [(x.to(dtype),) for x in rc.inputs(case)]
            with torch.inference_mode(dtype is torch.bool), torch.set_grad_enabled(dtype is torch.int64):
                ys = world.run(case.call, xs)
            assert all(y.dtype == dtype and not y.requires_grad for y in ys)
            if case.target != "P":
                for y, value in zip(ys, rc.held(case, case.target, "value", case.to_dim, case.order), strict=True):
                    torch.testing.assert_close(y, value.to(dtype))


@pytest.mark.parametrize(("op", "best"), [("max", torch.amax), ("min", torch.amin)])
def test_max_and_min(op: str, best: Callable[..., torch.Tensor]) -> None:
    xs = torch.randn(4, 3, requires_grad=True)
    ys = runtime.World({"a": 2, "b": 2}).run(lambda x: runtime.all_reduce(x, ("a", "b"), op=op), [(x,) for x in xs])
    assert all(torch.equal(y, best(xs, 0)) and not y.requires_grad for y in ys)


class _One(torch.autograd.Function):
    """One tensor for the invariant that every rank holds; each rank receives the whole gradient."""

    @staticmethod
    def forward(ctx: Any, *xs: torch.Tensor) -> torch.Tensor:
        ctx.count = len(xs)
        return xs[0].clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Every.apply(gradient, ctx.count)


class _Every(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: int) -> Any:
        return tuple(x.clone() for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _One.apply(*gradients), None


def test_second_derivatives() -> None:
    """The backward of a move is a move, so it has a backward too."""
    world = runtime.World({"a": 2})

    def f(x: torch.Tensor) -> torch.Tensor:
        rows = runtime.all_gather(x.pow(3), 0, "a", to="R")
        mine = runtime.reduce_scatter(rows * (1.0 + runtime.current().rank), 0, "a").sin()
        return runtime.all_reduce(mine.sum().pow(2), "a")

    xs = [torch.randn(1, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradgradcheck(lambda *xs: _One.apply(*world.run(f, [(x,) for x in xs])), xs)


@pytest.mark.parametrize("mesh", rc.MESHES, ids=str)
def test_size_and_offset(mesh: dict[str, int]) -> None:
    axes = tuple(mesh)
    for n in (0, 1, 5, 12):
        parts = runtime.World(mesh).run(lambda n=n: (runtime.offset(n, axes), runtime.size(n, axes)))
        assert [s for _, s in parts] == [len(c) for c in rc.cut(torch.arange(n), 0, list(mesh.values()))]
        assert [torch.arange(n)[o : o + s].tolist() for o, s in parts] == [
            c.tolist() for c in rc.cut(torch.arange(n), 0, list(mesh.values()))
        ]


def test_the_log_has_ring_bytes() -> None:
    world = runtime.World({"a": 2, "b": 2, "c": 1})
    world.log = []

    def f(x: torch.Tensor) -> torch.Tensor:
        x = runtime.enter(x, "a")  # backward: all-reduce of 4·6·8 bytes over 2
        x = runtime.slice(x, 0, ("a", "b"), of="R")
        x = runtime.all_to_all(x, 0, 1, ("a", "b"))  # local 6·1·8... of 4·6·8 bytes over 4
        x = runtime.permute(x, ("a", "b"), ("b", "a"))
        return runtime.all_gather(runtime.all_reduce(x, "c"), 1, ("a", "b"), to="I")

    xs = [torch.randn(4, 8, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    torch.autograd.backward(world.run(f, [(x,) for x in xs]), [torch.ones(4, 8)] * 4)
    whole, both = 4 * 8 * 8, ("a", "b")
    assert world.log == [
        ("all_to_all", both, "forward", 3 / 4 * whole / 4),
        ("permute", both, "forward", whole / 4),
        ("all_gather", both, "forward", 3 / 4 * whole),
        ("permute", both, "backward", whole / 4),
        ("all_to_all", both, "backward", 3 / 4 * whole / 4),
        ("all_reduce", ("a",), "backward", 2 * 1 / 2 * whole),
    ]


# What goes wrong ------------------------------------------------------------------------------------------------------


def test_mismatch_names_both_calls_on_every_rank() -> None:
    world = runtime.World({"a": 3})
    seen: list[str] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        try:
            if runtime.current().rank == 1:
                return runtime.all_gather(x, 0, "a")
            return runtime.all_reduce(x, "a")
        except RuntimeMismatchError as error:
            seen.append(str(error))
            raise

    with pytest.raises(
        RuntimeMismatchError, match=r"rank 0 calls all_reduce P → I over a, but rank 1 calls all_gather S → I of dim 0"
    ):
        world.run(f, [(torch.ones(2),)] * 3)
    assert len(seen) == 3
    assert len(set(seen)) == 1
    assert world.run(lambda: 1) == [1, 1, 1]  # and the mesh is usable afterwards


def test_a_rank_that_ends_early_is_noticed() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return runtime.all_reduce(x, "a") if runtime.current().rank else x

    with pytest.raises(RuntimeMismatchError, match=r"rank 1 waits in all_reduce.* but rank 0 has ended without it"):
        runtime.World({"a": 2}).run(f, [(torch.ones(2),)] * 2)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_first_exception_reaches_the_caller(rank: int) -> None:
    cleaned = []

    def f(x: torch.Tensor) -> None:
        try:
            x = runtime.all_reduce(x, "a")
            if runtime.current().rank == rank:
                raise KeyError("mine")
            runtime.all_reduce(x, "a")
        finally:
            cleaned.append(runtime.current().rank)

    world = runtime.World({"a": 3})
    for _ in range(3):
        with pytest.raises(KeyError, match="mine"):
            world.run(f, [(torch.ones(2),)] * 3)
    assert sorted(cleaned) == sorted([0, 1, 2] * 3)


def test_an_error_inside_a_collective_reaches_the_caller() -> None:
    with pytest.raises(RuntimeError, match="size"):
        runtime.World({"a": 2}).run(lambda x: runtime.all_reduce(x, "a"), [(torch.ones(2),), (torch.ones(3),)])


def test_user_errors() -> None:
    world, x = runtime.World({"a": 2}), torch.ones(2)
    calls: dict[str, Callable[[], Any]] = {
        "the mesh has no axis 'z'. Its axes: a": lambda: runtime.enter(x, "z"),
        "name an axis twice": lambda: runtime.enter(x, ("a", "a")),
        "not one of 'sum', 'max', 'min'": lambda: runtime.all_reduce(x, "a", op="mean"),
        'is not "I"': lambda: runtime.all_gather(x, 0, "a", to="S"),  # type: ignore[arg-type]
        "already running": lambda: world.run(lambda: None),
    }
    for message, call in calls.items():
        with pytest.raises((LayoutError, MeshError, RuntimeMismatchError), match=message):
            world.run(call)
    with pytest.raises(RuntimeMismatchError, match="no communicator is bound"):
        runtime.enter(x, "a")
    with pytest.raises(RuntimeMismatchError, match=r"outside World\.run"), runtime.bind(world.ranks[0]):
        runtime.all_reduce(x, "a")


def test_the_callers_state_holds_in_every_rank() -> None:
    def state() -> Any:
        cast = torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype if torch.is_autocast_enabled("cpu") else None
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            cast,
            torch.ones(1).device,
            torch.ones(1).dtype,
        )

    world = runtime.World({"a": 3})
    scopes = [torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta")]
    seen = set()
    for scope in scopes:
        with scope:
            results = world.run(state)
        assert results == [results[0]] * 3
        seen.add(results[0])
    assert len(seen) == 4


def test_worlds_are_copied_without_their_threads_and_end_with_them() -> None:
    def threads() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if t.name.startswith("autoshard rank")}

    before = threads()  # of worlds of other tests, which may end meanwhile
    world = runtime.World({"a": 4})
    world.run(lambda: None)
    other = copy.deepcopy(world)
    assert len(threads() - before) == 3
    assert other.run(lambda: runtime.current().rank) == [0, 1, 2, 3]
    ours = threads() - before
    del world, other
    gc.collect()
    for thread in ours:
        thread.join(timeout=5)
    assert not any(thread.is_alive() for thread in ours)


# Randomness -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_dropout_is_that_of_one_device(dtype: torch.dtype, p: float) -> None:
    x = torch.randn(5, 33, dtype=dtype)
    world = runtime.World({"a": 2, "b": 2})

    def f() -> tuple[torch.Tensor, torch.Tensor]:
        mine = runtime.slice(runtime.slice(x, 0, "a", of="R"), 1, "b", of="R")
        y = runtime.dropout(mine, p, x.shape, {0: "a", 1: ("b",)})
        first = runtime.all_gather(runtime.all_gather(y, 1, "b", size=33), 0, "a", size=5)
        return first, runtime.dropout(x, p, x.shape, {})

    torch.manual_seed(3)
    expected = torch.nn.functional.dropout(x, p), torch.nn.functional.dropout(x, p)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    for one, two in world.run(f):
        assert torch.equal(one, expected[0])
        assert torch.equal(two, expected[1])
    assert torch.equal(torch.get_rng_state(), state)
    assert p in (0.0, 1.0) or not torch.equal(*expected)


def test_dropout_of_permuted_memory_is_that_of_one_device() -> None:
    x = torch.randn(6, 2, 5, 3).permute(3, 1, 0, 2)  # an attention output, its heads merged by a transpose
    torch.manual_seed(3)
    expected = torch.nn.functional.dropout(x, 0.5)

    def f() -> torch.Tensor:
        start, rows = runtime.offset(6, "a"), runtime.size(6, "a")
        mine = x.permute(2, 1, 3, 0)[start : start + rows].permute(3, 1, 0, 2)
        return runtime.dropout(mine.contiguous(), 0.5, x.shape, {2: "a"}, order=(2, 1, 3, 0))

    torch.manual_seed(3)
    assert torch.equal(torch.cat(runtime.World({"a": 4}).run(f), 2), expected)


def test_shared_draws_once_and_gives_each_rank_its_own() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with runtime.synchronised_rng(runtime.World({"a": 2}).ranks[0]):
        draws = runtime.World({"a": 3}).run(lambda: runtime.shared(torch.rand, 3).add_(1))
    assert all(torch.equal(d, expected + 1) for d in draws)

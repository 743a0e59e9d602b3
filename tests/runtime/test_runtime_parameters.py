"""A block's parameters on the in-process mesh: gathered together, gathered again, their gradients reduced together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import runtime_cases as rc
import torch

from autoshard import runtime
from autoshard.errors import RuntimeMismatchError


@pytest.fixture
def blocks() -> list[list[torch.Tensor]]:
    """Two blocks of (weight [4, 4], bias [4], a frozen scale, an unused parameter)."""
    torch.manual_seed(0)
    shapes: list[tuple[int, ...]] = [(4, 4), (4,), (4,), (3,)]
    return [[torch.randn(s, dtype=torch.float64, requires_grad=i != 2) for i, s in enumerate(shapes)] for _ in range(2)]


def forward(x: torch.Tensor, blocks: list[list[torch.Tensor]], arrive: Callable[..., Any]) -> torch.Tensor:
    for block in blocks:
        with runtime.regather():
            w, b, scale, _ = arrive(block)
            x = torch.tanh(torch.nn.functional.linear(x, w, b)) * scale
    return x.pow(2).sum()


def reference(blocks: list[list[torch.Tensor]], x: torch.Tensor) -> list[Any]:
    copies = [[p.detach().clone().requires_grad_(p.requires_grad) for p in block] for block in blocks]
    forward(x, copies, lambda block: block).backward()
    return [[p.grad for p in block] for block in copies]


def test_enter_parameters_is_one_all_reduce_per_block(blocks: list[list[torch.Tensor]]) -> None:
    world = runtime.World({"dp": 2})
    world.log = []
    x = torch.randn(6, 4, dtype=torch.float64)
    copies = [[[p.detach().requires_grad_(p.requires_grad) for p in b] for b in blocks] for _ in range(2)]

    def f(params: list[list[torch.Tensor]]) -> torch.Tensor:
        flat = runtime.wait_gradients(*(p for b in params for p in b))
        mine = [list(flat[:4]), list(flat[4:])]
        local = runtime.slice(x, 0, "dp", of="R")
        return runtime.all_reduce(forward(local, mine, lambda b: runtime.enter_parameters(b, "dp")), "dp")

    losses = world.run(f, [(c,) for c in copies])
    torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])
    for copy_ in copies:
        torch.testing.assert_close([[p.grad for p in b] for b in copy_], reference(blocks, x), rtol=1e-12, atol=1e-12)
    assert [(c.kind, c.phase, c.bytes) for c in world.log] == [
        ("all_reduce", "forward", 8),
        ("all_reduce", "backward", 8 * 20),
        ("all_reduce", "backward", 8 * 20),
    ]


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 3}, {"rep": 2, "dp": 2}], ids=str)
def test_gathered_parameters_are_gathered_again(blocks: list[list[torch.Tensor]], mesh: dict[str, int]) -> None:
    world = runtime.World(mesh)
    world.log = []
    x = torch.randn(6, 4, dtype=torch.float64)
    dims, sizes = (1, 0, 0, 0), (4, 4, 4, 3)
    n, axes = mesh["dp"], tuple(mesh)
    shards = [
        [
            [
                rc.cut(p.detach(), d, [n])[r % n].clone().requires_grad_(p.requires_grad)
                for p, d in zip(b, dims, strict=True)
            ]
            for b in blocks
        ]
        for r in range(world.size)
    ]
    alive: list[Any] = []

    def arrive(block: list[torch.Tensor]) -> Any:
        full = runtime.gather_parameters(block, dims, "dp", sizes=sizes, replicas=axes[:-1])
        alive.append(torch.multiprocessing.reductions.StorageWeakRef(full[0].untyped_storage()))  # type: ignore[no-untyped-call]
        return full

    def f(params: list[list[torch.Tensor]]) -> torch.Tensor:
        return runtime.all_reduce(forward(runtime.slice(x, 0, axes, of="R"), params, arrive), axes)

    losses = world.run(f, [(c,) for c in shards])
    assert all(weight.expired() for weight in alive)
    torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])
    expected = reference(blocks, x)
    for r, shard in enumerate(shards):
        for i, b in enumerate(shard):
            for j, p in enumerate(b):
                whole = expected[i][j]
                part = None if whole is None else rc.cut(whole, dims[j], [n])[r % n]
                torch.testing.assert_close(p.grad, part, rtol=1e-12, atol=1e-12)
    kinds = [(c.kind, c.axes) for c in world.log if c.phase == "backward"]
    sync = [("reduce_scatter", ("dp",)), *([("all_reduce", ("rep",))] if "rep" in mesh else [])]
    assert sorted(kinds) == sorted([("all_gather", ("dp",)), *sync] * 2)
    gathers = [c.bytes for c in world.log if c.kind == "all_gather"]
    assert gathers == [(n - 1) * 8 * (6 * -(-4 // n) + -(-3 // n))] * 4


def test_a_change_between_forward_and_backward_is_refused(blocks: list[list[torch.Tensor]]) -> None:
    def f() -> torch.Tensor:
        w = runtime.slice(blocks[0][0].detach(), 0, "dp").requires_grad_()
        with runtime.regather():
            (full,) = runtime.gather_parameters((w,), (0,), "dp")
            loss = (torch.ones(2, 4, dtype=torch.float64, requires_grad=True) @ full).sum()
        with torch.no_grad():
            w.add_(1)
        return loss

    losses = runtime.World({"dp": 2}).run(f)
    with pytest.raises(RuntimeMismatchError, match="changed in place"):
        torch.autograd.backward(losses)


def test_without_gradients_parameters_are_only_gathered(blocks: list[list[torch.Tensor]]) -> None:
    world = runtime.World({"dp": 2})

    def f(p: torch.Tensor) -> torch.Tensor:
        (p,) = runtime.wait_gradients(p)
        (p,) = runtime.enter_parameters((p,), "dp")
        return runtime.gather_parameters((runtime.slice(p, 0, "dp"),), (0,), "dp")[0]

    with torch.no_grad():
        assert all(torch.equal(y, blocks[0][0]) for y in world.run(f, [(blocks[0][0],)] * 2))


class Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.ahead = ("dp",)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def test_what_has_entered_over_some_axes_enters_over_others() -> None:
    """It comes as it is over those that its node says, and no others: there its gradient is summed."""
    params = [torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(4)]

    def f(p: torch.Tensor) -> torch.Tensor:
        entered: torch.Tensor = Entered.apply(p)
        (same,) = runtime.enter_parameters((entered,), "dp")
        (other,) = runtime.enter_parameters((entered,), "tp")
        assert same is entered
        return other.sum()

    losses = runtime.World({"dp": 2, "tp": 2}).run(f, [(p,) for p in params])
    torch.autograd.backward(losses)
    assert [p.grad.tolist() for p in params if p.grad is not None] == [[2.0] * 3] * 4


def test_a_rank_owns_no_row_beside_a_gather_of_uneven_parts() -> None:
    """Lengths are given for uneven parts alone: of a matrix that others own, each chunk is empty, and so is its gradient."""
    uneven, owned = torch.randn(3, 2), torch.randn(4, 2)
    whole = [(uneven, owned if tp == 1 else owned[:0]) for tp in (0, 1)]
    leaves = [[rc.cut(x, 0, [2])[dp].clone().requires_grad_() for x in whole[tp]] for dp in (0, 1) for tp in (0, 1)]

    def f(parameters: list[torch.Tensor]) -> Any:
        return runtime.gather_parameters(parameters, (0, 0), "dp", sizes=(3, None))

    found = runtime.World({"dp": 2, "tp": 2}).run(f, [(x,) for x in leaves])
    for rank, full in enumerate(found):
        assert all(torch.equal(x, y) for x, y in zip(full, whole[rank % 2], strict=True))
    torch.autograd.backward([x.sum() for full in found for x in full])
    for leaf in (x for of_rank in leaves for x in of_rank):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, torch.full_like(leaf, 2))


@pytest.mark.parametrize("verb", ["partial", "slice", "pad"])
def test_ranks_keep_alike_what_a_local_move_gives(verb: str) -> None:
    """No rank's result lies in a gathered parameter: its backward alone would gather that again, and wait for ever."""
    w = torch.randn(4, 2, requires_grad=True)

    def f() -> bool:
        full = runtime.gather_parameters((runtime.slice(w, 0, "dp"),), (0,), "dp")[0]
        made = runtime.partial(full, "dp", of="R") if verb == "partial" else getattr(runtime, verb)(full, 0, "dp")
        return bool(made.untyped_storage()._cdata != full.untyped_storage()._cdata)

    assert runtime.World({"dp": 2}).run(f) == [True, True]

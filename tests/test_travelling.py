"""Products beside messages of their operands and sums: equal to one device, what they send, and when they are chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autoshard import runtime
from autoshard.errors import RuntimeMismatchError
from autoshard.runtime.operations import products
from autoshard.runtime.transport.window import chunks

Tensor = torch.Tensor
KEPT = {"dtype": torch.float64, "requires_grad": True}


def parts(x: Tensor, dim: int, ranks: int) -> list[Tensor]:
    """Those of ranks that cut ``x``."""
    cut = chunks(x.shape[dim], (ranks,))
    return [x.detach().narrow(dim, *c).clone().requires_grad_(x.requires_grad) for c in cut]


def gathered(
    ranks: int, shape: tuple[int, ...], dim: int, *, again: bool = False, bias: bool = True, frozen: str = ""
) -> tuple[list[Tensor], list[Tensor], list[runtime.Executed]]:
    """Two products of one operand, and gradients of one device; the same of ranks; what these sent."""
    torch.manual_seed(0)
    x = torch.randn(shape, **KEPT).requires_grad_("x" not in frozen)
    ws = [torch.randn(n, shape[-1], **KEPT).requires_grad_("w" not in frozen) for n in (2 * ranks, 3 * ranks)]
    bs = [torch.randn(2 * ranks, **KEPT) if bias else None, None]
    outs = [F.linear(x, w, b) for w, b in zip(ws, bs, strict=True)]
    cotangents = [torch.randn_like(y) for y in outs]
    trained = [t for t in (x, *ws, *bs) if t is not None and t.requires_grad]
    theirs = [*outs, *torch.autograd.grad(outs, trained, cotangents)]

    own = parts(x, dim, ranks), *([[None] * ranks if t is None else parts(t, 0, ranks) for t in (*ws, *bs)])
    world = runtime.World({"tp": ranks})
    log = world.log = list[runtime.Executed]()

    def one(x: Tensor, v: Tensor, w: Tensor, *biases: Tensor | None) -> Any:
        how = {"size": shape[dim], "biases": biases, "again": again}
        return runtime.gather_products(x, (v, w), dim, "tp", **how)

    made = world.run(one, list(zip(*own, strict=True)))
    given = [c.chunk(ranks, -1)[r] for r in range(ranks) for c in cotangents]
    leaves = [t for each in own if each[0] is not None and each[0].requires_grad for t in each]
    found = torch.autograd.grad([y for ys in made for y in ys], leaves, given)
    dims = [dim] * ("x" not in frozen) + [0] * len(found)
    joined = [torch.cat(found[i : i + ranks], d) for i, d in zip(range(0, len(found), ranks), dims, strict=False)]
    return theirs, [*(torch.cat(ys, -1) for ys in zip(*made, strict=True)), *joined], log


def scattered(
    ranks: int, shape: tuple[int, ...], dim: int, *, bias: bool = True, frozen: str = ""
) -> tuple[list[Tensor], list[Tensor], list[runtime.Executed]]:
    """A product of which every rank has a summand, as :func:`gathered`."""
    torch.manual_seed(0)
    x = torch.randn(shape, **KEPT).requires_grad_("x" not in frozen)
    w = torch.randn(5, shape[-1], **KEPT).requires_grad_("w" not in frozen)
    b = torch.randn(5, **KEPT) if bias else None
    y = F.linear(x, w, b)
    cotangent = torch.randn_like(y)
    theirs = [y, *torch.autograd.grad(y, [t for t in (x, w, b) if t is not None and t.requires_grad], cotangent)]

    own: Any = parts(x, -1, ranks), parts(w, 1, ranks)
    zeros = [torch.zeros(5, **KEPT) for _ in range(ranks - 1)]
    own = *own, [b.detach().clone().requires_grad_(), *zeros] if b is not None else [None] * ranks
    world = runtime.World({"tp": ranks})
    log = world.log = list[runtime.Executed]()
    made = world.run(lambda x, w, b: runtime.scatter_product(x, w, dim, "tp", bias=b), list(zip(*own, strict=True)))
    leaves = [t for each in own if each[0] is not None and each[0].requires_grad for t in each]
    found = torch.autograd.grad(made, leaves, parts(cotangent, dim, ranks))
    joined = [torch.cat(found[i : i + ranks], -1) for i in range(0, len(found), ranks)]
    if bias:  # every rank has the whole gradient of its summand
        joined[-1] = joined[-1][:5]
    return theirs, [torch.cat(made, dim), *joined], log


def error(theirs: list[Tensor], ours: list[Tensor]) -> float:
    assert [x.shape for x in theirs] == [x.shape for x in ours]
    return max(float((a - b).detach().abs().max()) for a, b in zip(theirs, ours, strict=True))


SHAPES = [((2, 12, 12), 1), ((12, 2, 12), 0), ((2, 7, 12), 1), ((2, 3, 2, 12), 1), ((1, 1, 12), 1), ((5, 12), 0)]
"""of what is multiplied, and the dim that is cut: even, uneven, and with ranks that have nothing"""


@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_as_one_device(ranks: int, shape: tuple[int, ...], dim: int) -> None:
    for run in (gathered, scattered):
        theirs, ours, _ = run(ranks, shape, dim)
        assert error(theirs, ours) < 1e-12, run
    theirs, ours, _ = gathered(ranks, shape, dim, again=True, bias=False)
    assert error(theirs, ours) < 1e-12


@pytest.mark.parametrize("frozen", ["x", "w"])
def test_what_wants_no_gradient(frozen: str) -> None:
    for again in (False, True):
        theirs, ours, log = gathered(3, (2, 7, 12), 1, again=again, frozen=frozen)
        assert error(theirs, ours) < 1e-12
        assert len([e for e in log if e.phase == "backward"]) == 2 * ((frozen != "x") + (again and frozen != "w"))
    theirs, ours, _ = scattered(3, (2, 7, 12), 1, frozen=frozen)
    assert error(theirs, ours) < 1e-12


@pytest.mark.parametrize(("length", "longest"), [(12, 4), (7, 3)])
def test_bytes(length: int, longest: int) -> None:
    """n - 1 messages of a chunk, there and back: as many bytes as gathers and reduce-scatters send."""
    sent = 2 * longest * 8  # of each feature
    for run, ahead, back in ((gathered, 12, 12), (scattered, 5, 5)):
        *_, log = run(3, (2, length, 12), 1)
        assert [(e.kind, e.axes) for e in log] == [("permute", ("tp",))] * 4
        for phase, features in (("forward", ahead), ("backward", back)):
            assert [e.bytes for e in log if e.phase == phase] == [sent * features] * 2
    *_, log = gathered(3, (2, length, 12), 1, again=True)
    assert [e.bytes for e in log if e.phase == "backward"] == [sent * 12] * 4


def test_parts_that_come_in_another_order_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above fail where a part is taken for that of another rank."""
    before = products._Way.before
    for run in (gathered, scattered):
        monkeypatch.setattr(
            products._Way, "before", lambda way, distance: before(way, -distance if abs(distance) > 1 else distance)
        )
        theirs, ours, _ = run(4, (2, 12, 12), 1)
        assert error(theirs, ours) > 1e-3
        monkeypatch.undo()


def test_without_gradients() -> None:
    world = runtime.World({"tp": 2})
    x, w = torch.randn(2, 6, 4), torch.randn(8, 4, requires_grad=True)
    pairs = list(zip(x.chunk(2, 1), w.detach().chunk(2), strict=True))
    (a,), (b,) = world.run(lambda x, w: runtime.gather_products(x, (w,), 1, "tp"), pairs)
    assert torch.allclose(torch.cat([a, b], -1), F.linear(x, w))
    assert not a.requires_grad


def test_no_second_derivative() -> None:
    x, w = torch.randn(2, 6, 4, requires_grad=True), torch.randn(8, 4)
    world = runtime.World({"tp": 2})
    pairs = list(zip(x.chunk(2, 1), w.chunk(2), strict=True))
    made = world.run(lambda x, w: runtime.gather_products(x, (w,), 1, "tp"), pairs)
    with pytest.raises(RuntimeMismatchError, match="products whose operand goes along tp has no second derivative"):
        torch.autograd.grad(sum(y.sum() for (y,) in made), x, create_graph=True)

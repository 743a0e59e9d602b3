"""Products whose backward comes in two parts: dX at once, dW later; together what autograd gives."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from product_counts import Counted

import autoshard
from autoshard import runtime
from autoshard.models import Gpt, GptConfig
from autoshard.report.pipeline import staged_times

Made = tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], list[tuple[int, ...]]]

PRODUCTS: dict[str, Made] = {
    "linear": (F.linear, runtime.linear, [(2, 3, 4), (5, 4), (5,)]),
    "linear_without_bias": (F.linear, runtime.linear, [(3, 4), (5, 4)]),
    "linear_of_a_row": (F.linear, runtime.linear, [(4,), (5, 4), (5,)]),
    "matmul": (torch.matmul, runtime.matmul, [(2, 3, 4), (4, 5)]),
    "bmm": (torch.bmm, runtime.matmul, [(2, 3, 4), (2, 4, 5)]),
    "conv1d": (F.conv1d, runtime.conv, [(2, 4, 9), (6, 4, 3), (6,)]),
    "conv2d": (
        lambda x, w, b: F.conv2d(x, w, b, 2, 1, groups=2),
        lambda x, w, b: runtime.conv(x, w, b, [2, 2], [1], 1, 2),
        [(2, 4, 9, 8), (6, 2, 3, 3), (6,)],
    ),
    "conv3d": (F.conv3d, runtime.conv, [(1, 2, 4, 5, 6), (3, 2, 2, 2, 2)]),
}


class Alone(runtime.Communicator):
    """One rank, that exchanges nothing."""

    def apply(self, *_: Any) -> Any: ...

    def shared(self, *_: Any) -> Any: ...

    def exchange(self, *_: Any) -> Any: ...


@pytest.fixture
def later() -> Iterator[list[torch.Tensor]]:
    """What waits for the second part, of a backward in two."""
    comm = Alone({"tp": 1}, 0)
    comm.later = []
    with runtime.bind(comm):
        yield comm.later


@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_two_parts(name: str, again: bool, later: list[torch.Tensor]) -> None:
    """The first makes no gradient of a weight, and one product; the second the other. Dropped, it is missed."""
    theirs, ours, shapes = PRODUCTS[name]
    values = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    expected = torch.autograd.grad(theirs(*values).square().sum(), values)
    part = lambda *xs: ours(*xs).square()  # noqa: E731
    out = runtime.recompute(part, *values) if again else part(*values)
    with Counted() as first:
        out.sum().backward()
    assert first.count == 1 + again
    torch.testing.assert_close(values[0].grad, expected[0], rtol=1e-12, atol=1e-12)
    assert all(x.grad is None for x in values[1:])
    with Counted() as second:
        torch.autograd.backward(later)
    assert second.count == 1
    for x, gradient in zip(values, expected, strict=True):
        torch.testing.assert_close(x.grad, gradient, rtol=1e-12, atol=1e-12)


def test_an_operand_without_gradient(later: list[torch.Tensor]) -> None:
    """As in a model's first layer: the weight's gradient comes all the same, and no other product is made."""
    x, w = torch.randn(3, 4), torch.randn(5, 4, requires_grad=True)
    with Counted() as first:
        runtime.linear(x, w).sum().backward()
    assert first.count == 1  # the forward's
    torch.autograd.backward(later)
    torch.testing.assert_close(w.grad, x.sum(0).expand(5, 4))


def test_what_is_not_trained(later: list[torch.Tensor]) -> None:
    """Frozen weights, and calls without a backward: nothing waits."""
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    runtime.linear(x, w).sum().backward()
    with torch.no_grad():
        runtime.linear(x, w.requires_grad_())
    assert later == []
    assert x.grad is not None


def test_the_second_part_holds_nothing_afterwards(later: list[torch.Tensor]) -> None:
    """Between the parts the operand and the gradient of the result are held, then nothing."""
    w = torch.randn(5, 4, requires_grad=True)
    x = torch.randn(3, 4, requires_grad=True) * 2
    held = weakref.ref(x)
    out = runtime.linear(x, w)
    out.sum().backward()
    del x, out
    assert held() is not None
    torch.autograd.backward(later)
    assert held() is None


def test_a_weight_whose_operand_has_no_gradient_is_not_held(later: list[torch.Tensor]) -> None:
    """Nor what was converted for it, such as a gathered copy: its own gradient needs the shape alone."""
    leaf = torch.randn(5, 4, requires_grad=True)
    weight = leaf * 2
    held = weakref.ref(weight.untyped_storage())
    out = runtime.linear(torch.randn(3, 4), weight)
    del weight
    assert held() is None
    out.sum().backward()
    torch.autograd.backward(later)
    assert leaf.grad is not None


@pytest.mark.slow
def test_the_source_says_so() -> None:
    """Products with weights are the runtime's where a schedule splits the backward, else torch's; a bias is no product."""
    torch.manual_seed(0)
    model = Gpt(GptConfig(vocab=50, positions=12, width=32, heads=4, layers=2))
    ids = torch.randint(0, 50, (8, 12))
    mesh = autoshard.Mesh({"pp": 2}, hardware="ideal_network")
    for schedule, own in (("zero_bubble", True), ("1f1b", False)):
        asked: dict[str, Any] = {"stages": "pp", "micro_batches": 4, "schedule": schedule}
        sharded = autoshard.compile(model, mesh, (ids, ids), **asked)
        source, staged = sharded.source, sharded.plan.staged
        assert ("F.linear(" not in source) == ("runtime.linear(" in source) == own
        assert staged is not None
        assert all(0.3 < t.batch.weights / t.batch.backward < 0.5 for t in staged_times(staged, mesh))

"""Rows on their way to experts and back, and the products there: gradients, second ones, and how they lie in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.runtime.operations import experts as expert_ops
from autoshard.runtime.operations import grouped
from autoshard.runtime.operations.experts import (
    ExpertForm,
    combine_expert_rows,
    dispatch_expert_rows,
    dispatch_slots,
    experts,
    gated_products,
)
from autoshard.runtime.operations.grouped import grouped_product
from autoshard.runtime.transport.move import transposed_segments

ROWS, TOP, COUNT = 5, 2, 3
IDS = torch.tensor([[0, 2], [2, 1], [2, 0], [0, 2], [2, -1]])
"""of four experts; nothing goes to the last"""
SILU = ExpertForm("silu", gated=True, transposed=False)


def operands(dtype: torch.dtype = torch.float64, width: int = 4, hidden: int = 4) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    shapes = ((ROWS, width), (ROWS, TOP), (COUNT + 1, 2 * hidden, width), (COUNT + 1, width, hidden))
    return [torch.randn(s, generator=drawn, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def plainly(
    x: torch.Tensor, weights: torch.Tensor, first: torch.Tensor, second: torch.Tensor, act: Any
) -> torch.Tensor:
    """Row after row."""
    out = []
    for t in range(ROWS):
        total = x.new_zeros(second.shape[1])
        for k, e in enumerate(IDS[t].tolist()):
            if e >= 0:
                gate, up = (first[e] @ x[t]).chunk(2)
                total = total + weights[t, k] * (second[e] @ (act(gate) * up))
        out.append(total)
    return torch.stack(out)


@pytest.mark.parametrize("turned", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("silu", F.silu),
        ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
        ("relu_squared", lambda x: F.relu(x) ** 2),
    ],
    ids=["silu", "gelu_tanh", "relu_squared"],
)
def test_experts_have_first_and_second_derivatives(activation: str, function: Any, turned: bool) -> None:
    given, again = operands(), operands()
    wanted = plainly(*again, function)
    first, second = (w.mT.contiguous() if turned else w for w in given[2:])
    found = experts(given[0], IDS, given[1], first, second, ExpertForm(activation, True, turned))
    for out, tensors in ((found, given), (wanted, again)):
        gradients = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
        sum(g.square().sum() for g in gradients).backward()
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for a, b in zip(given, again, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_of_a_sum_are_right(dtype: torch.dtype) -> None:
    """The result's gradient is one element, seen many times."""
    given, again = operands(dtype), operands(dtype)
    experts(given[0], IDS, *given[1:], SILU).sum().backward()
    plainly(*again, F.silu).sum().backward()
    for a, b in zip(given, again, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("order", [[7, 0, 4, 2], [], [*range(9, -1, -1)]], ids=["some", "none", "all"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_some_slots_are_dealt_and_collected(order: list[int], dtype: torch.dtype) -> None:
    """As by numbers into zeros; weights of another dtype make sums in theirs."""
    (x, weights, *_), numbers = operands(dtype), torch.tensor(order, dtype=torch.int64)
    weights = weights.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    again = [t.detach().clone().requires_grad_() for t in (x, weights)]
    slots = dispatch_slots(numbers, ROWS, TOP)
    found = combine_expert_rows(dispatch_expert_rows(x, slots).sin(), weights.reshape(-1), slots)
    made = again[0][numbers // TOP].sin() * again[1].reshape(-1)[numbers].unsqueeze(1)
    wanted = torch.zeros(ROWS, x.shape[1], dtype=made.dtype).index_add(0, numbers // TOP, made)
    assert found.dtype == wanted.dtype
    found.square().sum().backward()
    wanted.square().sum().backward()
    close = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
    for a, b in ((found, wanted), (x.grad, again[0].grad), (weights.grad, again[1].grad)):
        torch.testing.assert_close(a, b, **close)


@pytest.mark.parametrize("few", [6, 5], ids=["put together", "gathered"])
def test_segments_change_their_order_and_come_back(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    monkeypatch.setattr("autoshard.runtime.transport.move.MAX_CONCATENATED_SEGMENTS", few)
    x = torch.arange(7.0)
    order = transposed_segments([[2, 0, 1], [1, 3, 0]], x.device)
    moved = order.of(x)
    assert moved.tolist() == [0, 1, 3, 4, 5, 6, 2]
    assert torch.equal(order.turned().of(moved), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["", "transposed"])
def test_the_gradient_of_a_weight_lies_as_the_weight_does(dtype: torch.dtype, turned: bool) -> None:
    """Else it is copied into that order; of an expert without rows it is zero."""
    x = torch.randn(6, 8, dtype=dtype, requires_grad=True)
    stored = torch.randn(3, 8, 4, dtype=dtype).mT if turned else torch.randn(3, 4, 8, dtype=dtype)
    weight = stored.contiguous().requires_grad_()
    ends = torch.tensor([4, 4, 6], dtype=torch.int32)
    out = grouped_product(x, weight.mT, ends)
    torch.testing.assert_close(out, torch.cat([x[:4] @ weight[0].mT, x[4:] @ weight[2].mT]))
    x_grad, gradient = torch.autograd.grad(out, (x, weight), torch.ones_like(out))
    assert gradient.stride() == weight.stride()
    assert not gradient[1].any()
    torch.testing.assert_close(gradient[0], x[:4].sum(0).expand(4, 8).detach())
    torch.testing.assert_close(x_grad[:4], weight[0].sum(0).expand(4, 8).detach())


class Written(TorchDispatchMode):
    """Elements that are set to zero or copied."""

    def __init__(self) -> None:
        self.numel: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in (
            "zeros",
            "zeros_like",
            "new_zeros",
            "zero_",
            "fill_",
            "copy_",
            "clone",
            "index_copy",
            "index_add",
            "cat",
        ):
            self.numel.append((name, out.numel()))
        return out


def test_nothing_as_large_as_rows_or_weights_is_copied_or_zeroed() -> None:
    x, weights, first, second = operands(torch.float32, 16, 16)
    ids = IDS.clamp(0)
    with Written() as written:
        experts(x, ids, weights, first, second, SILU).sum().backward()
    assert max((n for _, n in written.numel), default=0) <= ROWS * TOP, written.numel


@pytest.mark.parametrize("cached", [1, 1 << 20, None], ids=["group by group", "at once", "by a kernel"])
@pytest.mark.parametrize("turned", [False, True], ids=["", "transposed"])
def test_gated_products_in_pieces(monkeypatch: pytest.MonkeyPatch, turned: bool, cached: int | None) -> None:
    """Of groups of rows, one of them empty: as row after row, twice differentiable, and gradients of weights lie as these
    do."""
    if cached is None:
        at_once = "autoshard.runtime.operations.experts.group_blocks"
        monkeypatch.setattr(at_once, lambda x, ends, columns: [grouped.GroupBlock(slice(None), (), x.shape[0], ends)])
    else:
        monkeypatch.setattr(grouped, "CACHE_BLOCK_ELEMENTS", cached)
    lengths = torch.tensor([3, 0, 4])
    ends = lengths.cumsum(0).to(torch.int32)
    drawn = torch.Generator().manual_seed(0)
    shapes = ((7, 4), (3, 4, 6), (3, 3, 5))
    x, *matrices = (torch.randn(s, generator=drawn, dtype=torch.float64) for s in shapes)
    if turned:
        matrices = [w.mT.contiguous().mT for w in matrices]
    given = [t.requires_grad_() for t in (x, *matrices)]
    again = [t.detach().clone().requires_grad_() for t in given]
    assert len(grouped.group_blocks(x, ends, 6)) == (2 if cached == 1 else 1)
    found = gated_products(*given, ends, "silu")
    numbers = torch.arange(3).repeat_interleave(lengths)
    made = [again[0][i] @ again[1][e] for i, e in enumerate(numbers)]
    wanted = torch.stack([(F.silu(m[:3]) * m[3:]) @ again[2][e] for m, e in zip(made, numbers, strict=True)])
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    first = torch.autograd.grad(found.square().sum(), given, retain_graph=True)
    assert [g.stride() for g in first] == [t.stride() for t in given]
    for out, tensors in ((found, given), (wanted, again)):
        gradients = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
        for a, b in zip(gradients, first, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
        sum(g.square().sum() for g in gradients).backward()
    for a, b in zip(given, again, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("computed", [10, 6], ids=["all", "some"])
def test_gradients_of_weights_without_the_kernel_that_gpus_lack(monkeypatch: pytest.MonkeyPatch, computed: int) -> None:
    order = torch.randperm(ROWS * TOP, generator=torch.Generator().manual_seed(0))[:computed]
    found = []
    for has in (True, False):
        monkeypatch.setattr(expert_ops, "_has_weight_gradient_kernel", lambda x, has=has: has)
        x, weights = torch.ones(computed, 4, dtype=torch.float64), operands()[1].detach().flatten()
        x = (x * torch.arange(4.0) + torch.arange(float(computed)).unsqueeze(1)).requires_grad_()
        y = combine_expert_rows(x, weights.requires_grad_(), dispatch_slots(order, ROWS, TOP))
        found.append(torch.autograd.grad((y * torch.arange(20.0).view(ROWS, 4)).sum(), (x, weights)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
        assert a.abs().max() > 0

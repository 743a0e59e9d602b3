"""Sums and means of rows whose gradient is added up as it comes, beside torch's own; and indices that are parts of one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.runtime.operations.embedding import (
    embedding_bag_of_tables,
    embedding_bags,
    has_fast_bag_gradient,
    pooled,
)
from autoshard.runtime.operations.stacked import stacked_view


class Seen(TorchDispatchMode):
    """The operations inside, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))  # type: ignore[operator]


def _given(bags: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A table of 7 rows, of which every bag repeats some, the indices, and gradients of the results."""
    torch.manual_seed(0)
    table = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    return table, torch.randint(7, (bags, length)), torch.randn(bags, 3, dtype=torch.float64)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding", [-1, 2])
@pytest.mark.parametrize(("bags", "length"), [(20, 3), (2, 9), (5, 1)])
def test_rows_and_their_gradient_are_those_of_torch(mode: str, padding: int, bags: int, length: int) -> None:
    table, indices, gradient = _given(bags, length)
    rows = F.embedding(indices, table, padding if padding >= 0 else None)
    expected = rows.sum(1) if mode == "sum" else rows.mean(1)
    for found in (embedding_bag_of_tables(indices, mode, padding, table), pooled(table, indices, mode, padding)):
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
        (ours,) = torch.autograd.grad(found, table, gradient)
        (theirs,) = torch.autograd.grad(expected, table, gradient, retain_graph=True)
        torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)


def test_the_gradient_is_added_up_without_sorting_and_has_a_derivative() -> None:
    table, indices, gradient = _given(20, 3)
    with Seen() as seen:
        embedding_bag_of_tables(indices, "sum", -1, table).backward(gradient)
    assert seen.names.count("aten.index_add_.default") == 3, "a call for each place in a bag"
    assert not [n for n in seen.names if "sort" in n or "embedding_bag_dense_backward" in n]
    assert torch.autograd.gradcheck(lambda t: embedding_bag_of_tables(indices, "mean", -1, t), (table,))
    assert torch.autograd.gradgradcheck(lambda t: embedding_bag_of_tables(indices, "mean", -1, t).square(), (table,))


def test_tables_one_after_another_get_each_its_gradient() -> None:
    whole = torch.arange(14.0).view(7, 2)
    a, none, b = (whole[i:j].requires_grad_() for i, j in ((0, 3), (3, 3), (3, 7)))
    embedding_bag_of_tables(torch.tensor([[0, 3], [6, 6]]), "sum", -1, a, none, b).sum().backward()
    assert a.grad is not None
    assert none.grad is not None
    assert b.grad is not None
    assert a.grad.tolist() == [[1, 1], [0, 0], [0, 0]]
    assert none.grad.shape == (0, 2)
    assert b.grad.tolist() == [[1, 1], [0, 0], [0, 0], [2, 2]]


@pytest.mark.slow_cases("all-1-*", "all-3-*", "mine-1-*", "mine-3-sum")
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("length", [1, 3, 9])
@pytest.mark.parametrize("some", [False, True], ids=["all", "mine"])
def test_one_node_for_several_tables_gives_what_each_does(mode: str, length: int, some: bool) -> None:
    """One without rows, one that needs no gradient, one with a row of padding; ``some``: indices that do not count."""
    torch.manual_seed(0)
    sizes, padding = (5, 0, 7, 4), [-1, -1, 2, -1]
    tables = [torch.randn(n, 3, dtype=torch.float64, requires_grad=i != 3) for i, n in enumerate(sizes)]
    indices = [torch.randint(max(1, n), (6, length)) for n in sizes]
    mine = torch.rand(len(sizes), 6, length) < 0.5 if some else torch.ones(len(sizes), 6, length, dtype=torch.bool)
    mine[1] = False

    def each(*given: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for i, table in enumerate((*given, tables[3])):
            full = table if len(table) else table.new_zeros(1, 3) + table.sum(0)
            rows = F.embedding(indices[i], full, padding[i] if padding[i] >= 0 else None) * mine[i].unsqueeze(-1)
            found.append(rows.sum(1) if mode == "sum" else rows.mean(1))
        return found

    def together(*given: torch.Tensor, pads: Sequence[int] = padding) -> tuple[torch.Tensor, ...]:
        return embedding_bags(indices, mode, pads, [*given, tables[3]], mine if some else None)

    trained = tables[:3]
    expected, found = each(*trained), together(*trained)
    assert [x.requires_grad for x in found] == [True] * 4, "one node"
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)
    gradients = [torch.randn_like(x) for x in expected]
    for of in ((0, 1, 2), (2,)):  # of others no gradient comes
        ours, theirs = (
            torch.autograd.grad(
                [x[i] for i in of], trained, [gradients[i] for i in of], retain_graph=True, allow_unused=True
            )
            for x in (found, expected)
        )
        assert [g is None for g in ours] == [i not in of for i in range(3)]
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)
    rows = tables[0], tables[2]

    def squares(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:  # of a row of padding no gradient is the derivative
        return torch.stack([x.square().sum() for x in together(a, tables[1], b, pads=[-1] * 4)]).sum()

    assert torch.autograd.gradgradcheck(squares, rows)


@pytest.mark.parametrize(
    ("table", "indices", "sparse"),
    [
        (torch.zeros(3, 2, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int64), False),
        (torch.zeros(3, 2, device="meta"), torch.zeros(1, 1, dtype=torch.int64, device="meta"), False),
        (torch.zeros(3, 2), torch.zeros(1, 1, dtype=torch.int64), True),
        (torch.zeros(3, 2), torch.zeros(4, 0, dtype=torch.int64), False),
        (torch.zeros(()).expand(3, 2), torch.zeros(1, 1, dtype=torch.int64), False),
    ],
    ids=["half precision", "no CPU", "sparse", "empty bags", "expanded"],
)
def test_what_goes_as_torch_does_it(table: torch.Tensor, indices: torch.Tensor, sparse: bool) -> None:
    assert not has_fast_bag_gradient(table, indices, sparse)
    assert pooled(table, indices, "sum", sparse=sparse).shape == (len(indices), 2)


def test_parts_of_one_tensor_are_one_again() -> None:
    x = torch.arange(24).view(2, 4, 3)
    for parts in ([x[:, 0], x[:, 2]], [x[:, i] for i in range(4)], [x[:, 1]]):
        one = stacked_view(parts)
        assert one is not None
        assert one.data_ptr() == parts[0].data_ptr()
        assert torch.equal(one, torch.stack(parts))
    apart = ([x[:, 0], x[:, 1], x[:, 3]], [x[:, 2], x[:, 0]], [x[:, 0], x[:, 1].clone()], [x[:, 0], x[:, 1, :2]])
    assert [stacked_view(parts) for parts in apart] == [None] * len(apart)

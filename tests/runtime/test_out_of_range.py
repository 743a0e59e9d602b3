"""An index or a class that does not exist raises where the dim is cut, as on one device; it is no zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard import Shard
from autoshard.runtime.operations.tables import Bags, LookupGroup, _look_up_group

ROWS = 12
MESH = autoshard.Mesh({"tp": 2}, "ideal_network")
Use = Callable[[Tensor, Tensor, Tensor], Tensor]
"""of a table [rows, 8], rows [8, 8] and indices [4, 2]"""
USES: dict[str, Use] = {
    "embedding": lambda w, x, i: F.embedding(i, w).sum(1),
    "bag": lambda w, x, i: F.embedding_bag(i, w, mode="sum"),
    "bag of maxima": lambda w, x, i: F.embedding_bag(i, w, mode="max"),
    "cross entropy": lambda w, x, i: F.cross_entropy(x @ w.T, i.flatten()),
    "nll": lambda w, x, i: F.nll_loss((x @ w.T).log_softmax(-1), i.flatten()),
    "scatter_add": lambda w, x, i: w.scatter_add(0, i.reshape(-1, 1).expand(-1, 8), x),
    "index_put": lambda w, x, i: w.index_put((i.flatten(),), x),
    "index_fill": lambda w, x, i: w.index_fill(0, i.flatten(), 2.0),
    "index_add": lambda w, x, i: w.index_add(0, i.flatten(), x),
}


class Uses(nn.Module):
    def __init__(self, use: Use) -> None:
        super().__init__()
        self.use, self.w = use, nn.Parameter(torch.randn(ROWS, 8, dtype=torch.float64))

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        return self.use(self.w, x, i)


@pytest.mark.slow_cases("bag", "cross entropy")
@pytest.mark.parametrize("name", USES)
def test_what_no_rank_holds_raises(name: str) -> None:
    torch.manual_seed(0)
    model, x, indices = Uses(USES[name]), torch.randn(8, 8, dtype=torch.float64), torch.randint(0, ROWS, (4, 2))
    asked: dict[str, Any] = {"like": "row-wise"} if "bag" in name else {"hints": {"w": Shard(0)}}
    sharded = autoshard.compile(model, MESH, (x, indices), **asked)
    assert "S(0)" in str(sharded.plan.layouts["w"])
    torch.testing.assert_close(sharded(x, indices), model(x, indices), rtol=1e-9, atol=1e-9)
    for wrong in (ROWS, -1, -ROWS - 1):
        given = indices.clone()
        given[1, 0] = wrong
        try:
            wanted = model(x, given)
        except (IndexError, RuntimeError):
            with pytest.raises((IndexError, RuntimeError), match="out of range"):
                sharded(x, given)
        else:
            torch.testing.assert_close(sharded(x, given), wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(sharded(x, indices), model(x, indices), rtol=1e-9, atol=1e-9)


def test_ignored_classes_are_no_error() -> None:
    model = Uses(lambda w, x, i: F.cross_entropy(x @ w.T, i.flatten(), ignore_index=-7))
    x, labels = torch.randn(8, 8, dtype=torch.float64), torch.randint(0, ROWS, (4, 2))
    labels[0] = -7
    sharded = autoshard.compile(model, MESH, (x, labels), hints={"w": Shard(0)})
    torch.testing.assert_close(sharded(x, labels), model(x, labels), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("jagged", [False, True])
def test_beyond_a_table_is_not_the_next_one(jagged: bool) -> None:
    """Tables of a rank that lie one after another are looked up as one."""
    both = torch.randn(2 * ROWS, 4, dtype=torch.float64)
    tables, group = (both[:ROWS], both[ROWS:]), LookupGroup((0, 1), 4, 4, not jagged)
    indices = torch.arange(8).view(4, 2)

    def found(*each: Tensor) -> Tensor:
        starts = torch.arange(0, 8, 2)
        bags = [Bags(i.flatten(), starts) if jagged else Bags(i) for i in each]
        return group.in_order(_look_up_group(tables, bags, "max", None, False, group), 4, 2)

    expected = [F.embedding_bag(indices, table, mode="max") for table in tables]
    torch.testing.assert_close(found(indices, indices), torch.stack(expected, int(not jagged)), rtol=1e-9, atol=1e-9)
    for first in (True, False):
        for wrong in (ROWS, -1):
            given = indices.clone()
            given[2, 1] = wrong
            with pytest.raises((IndexError, RuntimeError), match="out of range"):
                found(*((given, indices) if first else (indices, given)))

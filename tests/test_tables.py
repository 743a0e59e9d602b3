"""Embedding tables by table, row and column; sparse gradients of tables; which rank owns which."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import double, ideal
from table_models import Call
from torch import nn

import autoshard
import autoshard.models


def dlrm(sparse: bool, batch: int = 8) -> Call:
    torch.manual_seed(0)
    reference = autoshard.models.get("dlrm")
    model = reference.model().double().train()
    for table in model.tables:
        table.sparse = sparse
    (dense, ids), kwargs = double(reference.inputs(batch=batch))
    return model, (dense, ids, kwargs["labels"])


def optimizers(module: nn.Module, tables: str | None) -> list[torch.optim.Optimizer]:
    """``tables``: of tables; all others, or all, are trained by AdamW."""
    apart = {n: p for n, p in module.named_parameters() if tables and p.grad is not None and p.grad.is_sparse}
    rest = [p for n, p in module.named_parameters() if n not in apart]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=1e-2, eps=1e-6)]
    return [*found, getattr(torch.optim, tables or "")(apart.values(), lr=0.1)] if apart else found


def loss_of(module: nn.Module, args: tuple[Any, ...]) -> torch.Tensor:
    out = module(*args)
    return out if isinstance(out, torch.Tensor) else out.loss


def trains_alike(
    case: Call, mesh: dict[str, int], tables: str | None = None, **options: Any
) -> autoshard.ShardedModule:
    """Losses, gradients and whether they are sparse, and weights after three steps, against the unsharded model."""
    model, args = case
    reference, sharded = copy.deepcopy(model), autoshard.compile(model, ideal(mesh), args, **options)
    both = (reference, sharded)
    steps: list[list[torch.optim.Optimizer]] = []
    for _ in range(3):
        losses = [loss_of(module, args) for module in both]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-9, atol=1e-12)
        for module, loss in zip(both, losses, strict=True):
            module.zero_grad()
            loss.backward()
        for name, p in sharded.named_parameters():
            expected = reference.get_parameter(name).grad
            assert p.grad.is_sparse == expected.is_sparse, name
            torch.testing.assert_close(p.grad.to_dense(), expected.to_dense(), rtol=1e-9, atol=1e-12, msg=name)
        steps = steps or [optimizers(module, tables) for module in both]
        for optimizer in (o for found in steps for o in found):
            optimizer.step()
        state = sharded.full_state_dict()
        for name, x in reference.state_dict().items():
            torch.testing.assert_close(state[name], x, rtol=1e-9, atol=1e-12, msg=name)
    return sharded


def owners(sharded: autoshard.ShardedModule) -> dict[str, str]:
    return {n: str(x) for n, x in sharded.plan.layouts.items() if x.owner and sharded.plan.kinds[n] == "parameter"}


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 4}, {"dp": 2, "x": 2}], ids=str)
def test_tables_lie_whole_on_one_rank_each(mesh: dict[str, int]) -> None:
    like = {"x": "table-wise", **({"dp": "ddp"} if "dp" in mesh else {})}
    sharded = trains_alike(dlrm(sparse=False), mesh, like=like)
    found = owners(sharded)
    assert len(found) == 3, "every table has an owner"
    assert {x.split("@")[0] for x in found.values()} == {f"O({r})" for r in range(min(3, mesh["x"]))}
    assert sharded.source.count("runtime.table_wise(") == 1, "one look-up for all tables"

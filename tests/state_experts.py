"""States of routing: how rows fall on experts changes from call to call."""

from __future__ import annotations

import torch
from state_harness import case, pair, rows, steps
from torch import nn

import autoshard
from autoshard.runtime.experts import experts_op


class Routed(nn.Module):
    """Experts after a layer; ``experts[:, :2]`` of the input says where rows go."""

    def __init__(self, count: int = 3, gated: bool = True) -> None:
        super().__init__()
        self.layer, self.gated = nn.Linear(8, 8), gated
        self.first = nn.Parameter(torch.randn(count, 12 if gated else 6, 8) / 3)
        self.second = nn.Parameter(torch.randn(count, 8, 6) / 3)

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor]:
        x = self.layer(batch["x"])
        y = experts_op(x, batch["ids"], batch["weights"], self.first, self.second, "silu", self.gated, False)
        return ((x + y).square().mean(),)


def batch(*ids: tuple[int, int], seed: int = 1) -> dict[str, torch.Tensor]:
    """A batch whose rows go to these pairs of experts."""
    count = len(ids)
    return {"x": rows(count, seed=seed), "ids": torch.tensor(ids), "weights": rows(count, 2, seed).sigmoid()}


EVEN = ((0, 2), (2, 1), (1, 2), (2, 0), (2, 1), (0, 2))


@case
def rows_travel_to_their_experts(mesh: autoshard.Mesh) -> None:
    """Evenly, all to the experts of one rank, all to those of the other, all to one; the ranks hold 2 and 1 experts."""
    (axis,) = mesh.axes
    model, sharded = pair(mesh, Routed, batch(*EVEN), like={axis: "expert"})
    assert any("rows to their experts" in c.reason for c in sharded.plan.collectives), sharded.plan
    for ids in (EVEN, ((0, 1),) * 6, ((2, 2),) * 6, ((1, 1),) * 6, EVEN):
        steps(model, sharded, batch(*ids), batch(*reversed(ids), seed=2))


@case
def each_rank_sums_its_own_experts(mesh: autoshard.Mesh) -> None:
    """Whole rows, experts cut: no row travels, and what is of no expert here is zero."""
    whole = {"batch*": "replicate", "layer.*": "replicate"}
    hints = {**whole, "first": autoshard.Shard(0), "second": autoshard.Shard(0)}
    model, sharded = pair(mesh, Routed, batch(*EVEN), hints=hints)
    for ids in (EVEN, ((0, 1),) * 6, ((2, 2),) * 6):
        steps(model, sharded, batch(*ids))

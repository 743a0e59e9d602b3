"""Micro-batches of models that take samples of two inputs as one batch, as siamese ones do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from harness import ideal
from microbatch_cases import TOLERANCE, far, farthest
from torch import nn

import autoshard
from autoshard.errors import PlanError

pytestmark = pytest.mark.usefixtures("remembering")


class Pairs(nn.Module):
    """Two inputs whose samples are one batch of the encoder, as in siamese models; ``apart``: how they are taken apart."""

    def __init__(self, apart: Callable[[torch.Tensor, int], Sequence[torch.Tensor]]) -> None:
        super().__init__()
        self.apart = apart
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 6)
        )
        self.norm = nn.LayerNorm(6)

    def forward(self, a: torch.Tensor, b: torch.Tensor, same: torch.Tensor) -> torch.Tensor:
        found = self.norm(self.encoder(torch.cat([a, b])))
        return nn.functional.cosine_embedding_loss(*self.apart(found, len(a))[:2], same)


def pairs(a: int = 8, b: int = 8) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    same = torch.tensor([-1.0, 1.0, 1.0, -1.0] * 2)[: min(a, b)]
    return torch.randn(a, 3, 5, 5).double(), torch.randn(b, 3, 5, 5).double(), same.double()


@pytest.mark.slow_cases("split-stages")
@pytest.mark.parametrize(
    ("apart", "b", "stages"),
    [
        pytest.param(lambda h, n: h.chunk(2), 8, None, id="chunk"),
        pytest.param(lambda h, n: h.split(n), 8, "pp", id="split-stages"),
        pytest.param(lambda h, n: (h[:n], h[n:]), 8, None, id="slices"),
        pytest.param(lambda h, n: h.view(2, n, -1), 8, None, id="view"),
        pytest.param(lambda h, n: h.view(n, 2, -1).unbind(1), 8, None, id="neighbours"),
        pytest.param(lambda h, n: (h[:n], h[n:].view(n, 2, -1).mean(1)), 16, None, id="uneven"),
    ],
)
def test_samples_of_two_inputs_as_one_batch(apart: Any, b: int, stages: str | None) -> None:
    """A micro-batch takes its part of each, and none works on more than that."""
    model, args = Pairs(apart).double(), pairs(8, b)
    mesh = ideal({stages or "dp": 2})
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, micro_batches=4, stages=stages)
    assert sharded.plan.cost.flops == autoshard.plan(model, mesh, args).cost.flops
    losses = [module(*args) for module in (model, sharded)]
    for loss in losses:
        loss.backward()
    assert far(losses[1].detach(), losses[0].detach()) <= TOLERANCE
    assert farthest(sharded.full_gradients(), {n: p.grad for n, p in model.named_parameters()}) <= TOLERANCE


class Contrastive(Pairs):
    """Every sample beside all others: the loss of SimCLR."""

    def forward(self, a: torch.Tensor, b: torch.Tensor, same: torch.Tensor) -> torch.Tensor:
        found = nn.functional.normalize(self.encoder(torch.cat([a, b])))
        others = (found @ found.T).masked_fill(torch.eye(len(found), dtype=torch.bool), -1e9)
        return nn.functional.cross_entropy(others, torch.arange(len(found)).roll(len(a)))


@pytest.mark.parametrize(
    ("model", "where"),
    [
        (Contrastive(torch.chunk), r"matmul\.default .* of the full batch"),
        (Pairs(lambda h, n: (h[:n], h[2 : n + 2])), r"slice\.Tensor .* of the full batch"),
    ],
)
def test_samples_beside_those_of_other_micro_batches(model: nn.Module, where: str) -> None:
    """All pairs of the batch, or rows shifted against each other: refused."""
    with pytest.raises(PlanError, match=where):
        autoshard.plan(model.double(), {"dp": 2}, pairs(), micro_batches=4)

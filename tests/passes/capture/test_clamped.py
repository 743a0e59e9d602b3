"""Parameters that a forward clamps in place before it reads them, as Gemma 3n in training."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from harness import assert_equal_training, ideal
from torch import nn
from transformers_models import GEMMA3N

import autoshard
from autoshard.errors import CaptureError, PlanError

X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))


class Clipped(nn.Module):
    """``late``: it reads its weight before it clamps it."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.linear, self.late = nn.Linear(8, 8), late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.linear(x) if self.late else x
        if self.training:
            self.linear.weight.data.clamp_(-0.1, max=0.2)
        return before + self.linear(x).relu()


class Model(nn.Module):
    def __init__(self, late: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Clipped(late), Clipped(False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def clipped(late: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(late)


@pytest.mark.parametrize(("micro_batches", "axes"), [(1, {"tp": 2}), (2, {"tp": 2}), (2, {"pp": 2, "tp": 2})], ids=str)
def test_every_rank_clamps_what_it_holds(micro_batches: int, axes: dict[str, int]) -> None:
    """Of modules that are equal each has its own: weights that are out of bounds when a forward begins are in them after it."""
    model = clipped().double()
    assert all(float(p.detach().max()) > 0.2 for p in model.parameters() if p.ndim > 1)
    assert_equal_training(model, {"dp": 2, "tp": 2}, (X,))
    stages = "pp" if "pp" in axes else None
    sharded = autoshard.compile(clipped().train(), ideal(axes), (X,), micro_batches=micro_batches, stages=stages)
    sharded(X).backward()
    for name, x in sharded.full_state_dict().items():
        assert "weight" not in name or (float(x.min()), float(x.max())) == pytest.approx((-0.1, 0.2))


def test_what_is_read_before_it_is_clamped_is_refused() -> None:
    with pytest.raises(CaptureError, match="while autograd does not record"):
        autoshard.plan(clipped(late=True), {"tp": 2}, (X,))


def test_a_step_that_clamps_is_not_saved(tmp_path: Path) -> None:
    """In eval nothing is clamped."""
    sharded = autoshard.compile(clipped().train(), ideal({"tp": 2}), (X,))
    with pytest.raises(PlanError, match="clamps parameters"):
        sharded.save(str(tmp_path))
    autoshard.compile(copy.deepcopy(clipped()).eval(), ideal({"tp": 2}), (X,)).save(str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_gemma3n(axes: dict[str, int]) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Gemma3nTextConfig(**GEMMA3N)
    model = transformers.Gemma3nForCausalLM(config).double().train()
    ids = torch.randint(2, 128, (4, 16), generator=torch.Generator().manual_seed(1))
    mesh = autoshard.Mesh(axes, "ideal_network")
    report = autoshard.verify(model, mesh, (), {"input_ids": ids, "labels": ids.roll(-1, 1)}, steps=2)
    assert report.ok, str(report)

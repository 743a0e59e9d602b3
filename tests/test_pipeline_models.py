"""Models of public libraries in pipeline stages, in one process: losses and gradients are those of one device, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import double, ideal
from test_real_models import CASES, build

import autoshard
from autoshard.models import Gpt, GptConfig

MESHES = {
    "pp2": {"pp": 2}, "pp4": {"pp": 4}, "pp2tp2": {"pp": 2, "tp": 2}, "dp2pp2": {"dp": 2, "pp": 2},
    "pp2dp2tp2": {"pp": 2, "dp": 2, "tp": 2},
}  # fmt: skip
BATCHES = {"pp2": 4, "pp4": 4, "pp2tp2": 2, "dp2pp2": 2, "pp2dp2tp2": 2}
NAMES = ("llama", "gpt2", "bert", "t5", "whisper", "vit", "resnet", "mixtral")
SINGLE = 1e-6
"""relative, of losses that a library computes in float32 in a float64 model: their sum is rounded by micro-batch"""


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", NAMES)
def test_real_models(name: str, mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, kwargs = build(name, monkeypatch)
    model.double()
    kwargs = double(kwargs)
    count = 1 if name == "resnet" else BATCHES[mesh]  # batch norm needs the whole batch
    sharded = autoshard.compile(copy.deepcopy(model), ideal(MESHES[mesh]), (), kwargs, stages="pp", micro_batches=count)
    assert sharded.plan.staged is not None
    assert len(sharded.plan.staged.plans) == MESHES[mesh]["pp"]
    losses = []
    for m in (model, sharded):
        torch.manual_seed(0)
        losses.append(m(**kwargs).loss)
        losses[-1].backward()
    single = losses[0].dtype == torch.float32
    assert abs(float(losses[0].detach() - losses[1].detach())) <= (SINGLE if single else 1e-9) * abs(
        float(losses[0].detach())
    )
    ours = dict(sharded.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    for n, p in model.named_parameters():
        assert (p.grad is None) == (ours[n].grad is None), n
        if p.grad is not None:
            error, scale = float((ours[n].grad - p.grad).abs().max()), float(p.grad.abs().max())
            assert error <= (SINGLE if single else 1e-9) * max(scale, 1e-3 * largest), n


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"pp": 2, "dp": 2, "cp": 2, "tp": 2}, {"dp": 2, "tp": 2, "pp": 2}])
def test_four_axes(axes: dict[str, int]) -> None:
    torch.manual_seed(0)
    model: Any = Gpt(GptConfig.tiny()).double()
    ids = torch.randint(0, 128, (8, 16))
    sharded = autoshard.compile(copy.deepcopy(model), ideal(axes), (ids, ids), stages="pp", micro_batches=2)
    gradients = []
    for m in (model, sharded):
        torch.manual_seed(0)
        m(ids, ids).loss.backward()
        gradients.append({n: p.grad for n, p in m.named_parameters()})
    assert max(float((gradients[0][n] - x).abs().max()) for n, x in gradients[1].items()) <= 1e-12


def test_every_case_is_one() -> None:
    assert set(NAMES) <= CASES.keys()

"""Every model on every mesh, with every kind of recomputation, in 1, 2 and 4 micro-batches: three AdamW steps are those of
one device, in float64. The fast run takes a sample, ``--run-slow`` all of it.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from harness import double, ideal
from microbatch_cases import steps_alike
from torch import nn
from transformers_models import CASES, build

import autoshard
from autoshard.errors import AutoshardError

OURS = ("gpt", "llama", "moe", "vit")
MESHES: dict[str, tuple[dict[str, int], Any]] = {
    "tp2": ({"tp": 2}, None),
    "dp2tp2": ({"dp": 2, "tp": 2}, None),
    "fsdp3": ({"fsdp": 3}, "fsdp"),
}
HUGGING_FACE = [f"hf_{name}" for name in CASES]
CROSS = list(itertools.product((*OURS, *HUGGING_FACE), MESHES, ("none", "selective", "blocks"), (1, 2, 4)))
FAST = {("gpt", "fsdp3", "blocks", 4)}
WHOLE = {"hf_resnet": "norm", "hf_clip": "micro"}
"""what looks at the whole batch, so that micro-batches are refused, and a word of the reason"""


def made(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model in training mode and float64."""
    if name in HUGGING_FACE:
        model, args, kwargs = build(name.removeprefix("hf_"), monkeypatch)
    else:
        torch.manual_seed(0)
        reference = autoshard.models.get(name)
        inputs, kwargs = reference.inputs(batch=4)
        model, args = reference.model().train(), tuple(inputs)
    args, kwargs = double((args, dict(kwargs)))
    return model.double(), args, kwargs


@pytest.mark.usefixtures("upcasts_in_float64")
@pytest.mark.parametrize(
    ("name", "mesh", "recompute", "count"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case not in FAST)) for case in CROSS],
)
def test_cross(name: str, mesh: str, recompute: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, kwargs = made(name, monkeypatch)
    axes, like = MESHES[mesh]
    asked = {"like": like, "recompute": recompute, "micro_batches": count}
    if count > 1 and name in WHOLE:
        with pytest.raises(AutoshardError, match=WHOLE[name]):
            steps_alike(model, ideal(axes), args, kwargs, 3, **asked)
        return
    steps_alike(model, ideal(axes), args, kwargs, 3, **asked)

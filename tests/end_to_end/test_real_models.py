"""Fifteen models of public libraries, trained with a loss in float64: equal to one device, and really divided.

The configurations are tiny and random; sizes do not divide three ranks, so ``{"tp": 3}`` cuts heads, widths, channels
and vocabulary unevenly. Every test prints the share of FLOPs that is divided.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from harness import assert_equal_training
from transformers_models import CASES, build

import autoshard
import autoshard.models

MESHES = {"tp2": {"tp": 2}, "dp2tp2": {"dp": 2, "tp": 2}, "tp3": {"tp": 3}}
NAMES = (*CASES, "dlrm")
FAST = {"dlrm"}
"""what runs without --run-slow, too; test_compile_models.py has text models of transformers"""


def cases() -> list[Any]:
    """The fast ones by default on two ranks; everything with --run-slow."""
    return [
        pytest.param(n, m, marks=[] if n in FAST and m == "tp2" else [pytest.mark.slow], id=f"{n}-{m}")
        for n in NAMES
        for m in MESHES
    ]


@pytest.mark.parametrize(("name", "mesh"), cases())
def test_real_models(name: str, mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, kwargs = build(name, monkeypatch)
    axes = MESHES[mesh]
    report = assert_equal_training(model, axes, args, kwargs, steps=1)
    cost, ranks = report.plan.cost, math.prod(axes.values())
    share = cost.flops / (cost.flops_per_rank * ranks)
    print(f"{name} on {mesh}: {share:.1%} of the FLOPs divided, largest error {report.worst}")
    assert share > (0.75 if ranks == 3 else 0.9), f"{share:.1%} of the work is divided"


@pytest.mark.slow
def test_a_wrong_gradient_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without the all-reduce of gradients the comparison fails."""
    model, args, kwargs = build("gpt2", monkeypatch)
    model.double()
    monkeypatch.setattr("autoshard.runtime.enter", lambda x, axes: x)
    monkeypatch.setattr("autoshard.runtime.enter_parameters", lambda x, axes: x)
    report = autoshard.verify(model, autoshard.Mesh({"tp": 2}, hardware="ideal_network"), args, kwargs)
    assert not report.ok

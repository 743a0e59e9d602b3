"""Kinds of silently wrong gradients, each against one device in float64: ``docs/concepts/trust.md`` is the table of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ideal
from trust_models import KINDS, Attending, Kind, tokens

import autoshard
from autoshard import runtime

pytestmark = pytest.mark.usefixtures("captures")

PAGE = Path(__file__).parents[2] / "docs/concepts/trust.md"
CASES = [(name, number) for name, kind in KINDS.items() for number in range(len(kind.settings))]


def report(kind: Kind, setting: Mapping[str, Any], steps: int = 2) -> autoshard.VerifyReport:
    torch.manual_seed(0)
    asked = dict(setting)
    return autoshard.verify(kind.make().double(), ideal(asked.pop("mesh")), (), kind.inputs(), steps=steps, **asked)


@pytest.mark.slow_cases("draws of recomputed blocks-0", "norm of a gated delta rule's output-0")
@pytest.mark.parametrize(
    ("name", "number"), [pytest.param(*c, marks=[pytest.mark.slow] * (c[1] > 0)) for c in CASES], ids=str
)
def test_equal_to_one_device(name: str, number: int) -> None:
    found = report(KINDS[name], KINDS[name].settings[number])
    assert found.ok, str(found)
    assert found.plan.cost.flops_per_rank < found.plan.cost.flops, "nothing is divided"


def test_the_page_lists_them() -> None:
    rows = re.findall(r"^\| ([^|]+?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == ["kind", "---", *KINDS]


@pytest.mark.parametrize(
    "name", ["shared rotary key of latent attention", "attention sinks", "one norm weight for all heads"]
)
def test_a_sum_left_out_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: ranks that keep their own part of a gradient."""
    right = runtime.all_reduce
    monkeypatch.setattr(runtime, "enter", lambda x, *a, **k: x)
    monkeypatch.setattr(runtime, "all_reduce", lambda x, axes, to: right(x, axes, to="I"))
    found = report(KINDS[name], KINDS[name].settings[0], steps=1)
    assert not found.ok
    assert ", backward: gradient of " in str(found.first_divergence)


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2, "tp": 2}])
def test_the_clipped_norm_counts_every_parameter_once(axes: dict[str, int]) -> None:
    """Sharded weights, replicated ones, and sinks that lie by heads."""
    torch.manual_seed(0)
    model, given = Attending(sinks=True).double(), tokens()
    sharded = autoshard.compile(model, ideal(axes), (), given, like="megatron-sp")
    model(**given).backward()
    sharded(**given).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert abs(autoshard.clip_grad_norm_(sharded, 0.1) - expected) <= 1e-9 * expected
    for name, p in model.named_parameters():
        torch.testing.assert_close(sharded.full_gradients()[name], p.grad, rtol=1e-9, atol=1e-12)

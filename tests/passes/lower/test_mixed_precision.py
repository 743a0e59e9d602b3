"""Mixed precision in one process; under torch.distributed: tests/distributed/test_precision_gloo.py."""

from __future__ import annotations

import pytest
import torch
from harness import ideal
from precision_cases import CASES, SLOW, WIDE, compare, net
from torch.distributed.fsdp import MixedPrecisionPolicy

import autoshard
from autoshard.runtime.parameters import bucket


@pytest.mark.slow_cases("scaled_and_clipped", "half_on_the_wire", "refused")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES])
def test_case(name: str) -> None:
    CASES[name](ideal({"dp": 2, "tp": 2}))


def test_a_gradient_rounded_after_its_sum_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    right = bucket.JointBucket.backward

    def rounded(self: bucket.JointBucket, *args: object) -> object:
        out, works, later = right(self, *args)  # type: ignore[arg-type]
        return [None if g is None else g.bfloat16().to(g.dtype) for g in out], works, later

    monkeypatch.setattr(bucket.JointBucket, "backward", rounded)
    model, args = net()
    with pytest.raises(AssertionError, match="gradient of"):
        compare(model, args, ideal({"dp": 2}), WIDE, like="fsdp")


def test_what_is_held() -> None:
    """Parameters, gradients and optimizer state as without; activations, and what is gathered, of half the size."""
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4))), torch.randn(16, 64)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    plans = [autoshard.plan(model, {"dp": 2}, (x,), like="fsdp", mixed_precision=p) for p in (None, policy)]
    assert "bfloat16 (param_dtype=bfloat16, reduce_dtype=float32), training step" in str(plans[1])
    plain, mixed = (plan.memory for plan in plans)
    assert (plain.parameters, plain.gradients, plain.optimizer) == (mixed.parameters, mixed.gradients, mixed.optimizer)
    assert mixed.activations < 0.7 * plain.activations
    assert mixed.peak < plain.peak

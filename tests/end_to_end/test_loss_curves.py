"""A training run of real length: 200 steps on a text, sharded and on one device. Slow."""

from __future__ import annotations

import pytest
from loss_curves import curve, model, sharded
from torch import nn

STEPS = 200
TOLERANCE = 1e-9


@pytest.mark.slow
def test_curves_lie_on_each_other() -> None:
    """With dropout, micro-batches and blocks that run again; and the model learns something."""
    alone = curve(model(), STEPS)
    assert sum(alone[-10:]) < 0.75 * sum(alone[:10])
    ours = sharded(model())
    assert ours.plan.cost.flops_per_rank < 0.5 * ours.plan.cost.flops
    assert ours.plan.recomputed
    assert all(abs(a - b) / a <= TOLERANCE for a, b in zip(alone, curve(ours, STEPS), strict=True))


@pytest.mark.slow
def test_other_draws_are_another_curve() -> None:
    """Negative control: without dropout it is another one from the first step on."""
    other = model()
    for module in other.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    first, second = curve(model(), 2), curve(other, 2)
    assert all(abs(a - b) > 1e-4 * a for a, b in zip(first, second, strict=True))

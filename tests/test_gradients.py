"""``autoshard.clip_grad_norm_`` on ranks inside one process; tests/distributed has it between processes."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import ideal
from torch import nn

import autoshard


@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
def test_norm_and_clipped_gradients_are_those_of_the_model(order: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    x = torch.randn(5, 6, dtype=torch.float64)
    sharded = autoshard.compile(copy.deepcopy(model), ideal({"tp": 2}), (x,))
    for module in (model, sharded):
        module(x).square().sum().backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.5, order)
    found = autoshard.clip_grad_norm_(sharded, 0.5, order)
    assert expected > 0.5
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    gradients = {n: p.grad for n, p in model.named_parameters()}
    torch.testing.assert_close(sharded.full_gradients(), gradients, rtol=1e-9, atol=1e-12)

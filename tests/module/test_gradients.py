"""``autoshard.clip_grad_norm_`` on ranks inside one process; tests/distributed has it between processes; second derivatives."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from harness import ideal
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import autoshard
from autoshard.passes.capture.export import capture
from autoshard.passes.capture.translate.canonicalize import GradientFlow


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


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Embedding(9, 4, sparse=True), nn.Embedding(7, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.one(ids) + self.two(ids)).square().sum()


@pytest.mark.parametrize("like", ["table-wise", "row-wise"])
def test_sparse_gradients_are_clipped(like: str) -> None:
    """Rows that were looked up several times count by their sums."""
    torch.manual_seed(0)
    model = Tables().double()
    ids = torch.tensor([0, 3, 3, 6, 6, 6])
    sharded = autoshard.compile(copy.deepcopy(model), ideal({"tp": 2}), (ids,), like=like)
    for module in (model, sharded):
        module(ids).backward()
    expected = {n: p.grad.to_dense() for n, p in model.named_parameters() if p.grad is not None}
    norm = nn.utils.get_total_norm(expected.values())
    torch.testing.assert_close(autoshard.clip_grad_norm_(sharded, 0.5), norm, rtol=1e-12, atol=0)
    found = sharded.full_gradients()
    assert found["one.weight"].is_sparse
    for name, g in expected.items():
        torch.testing.assert_close(found[name].to_dense(), g * (0.5 / (norm + 1e-6)), rtol=1e-9, atol=1e-12)


class SpelledOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).view(2, 4, 2, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return ((q @ k.mT / 2).softmax(-1) @ v).square().sum()


def test_second_derivatives_of_attention_in_the_plain_kernel() -> None:
    """A spelled-out attention is one operation here, whose fused kernels have none: see docs/reference/what_happens_if.md."""
    torch.manual_seed(0)
    model, x = SpelledOut().double(), torch.randn(2, 4, 8).double()
    sharded = autoshard.compile(copy.deepcopy(model), ideal({"tp": 2}), (x,))

    def second(module: Any) -> list[torch.Tensor]:
        parameters = list(module.parameters())
        first = torch.autograd.grad(module(x), parameters, create_graph=True)
        found = torch.autograd.grad(sum(g.square().sum() for g in first), parameters)
        return list(found)

    expected = second(model)
    largest = max(float(g.abs().max()) for g in expected)
    with sdpa_kernel(SDPBackend.MATH):
        for given, wanted in zip(second(sharded), expected, strict=True):
            torch.testing.assert_close(given, wanted, rtol=1e-9, atol=1e-9 * largest)


def test_autograd_is_asked_once_about_torchs_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers serve all captures."""
    monkeypatch.setattr(GradientFlow, "_torchs", {})
    asked = Mock(wraps=GradientFlow._ask)
    monkeypatch.setattr(GradientFlow, "_ask", asked)
    model, x = nn.Sequential(nn.Linear(3, 5), nn.GELU()), torch.randn(2, 3)
    graphs = [capture(model, (x,)) for _ in range(2)]
    assert asked.call_count == 2
    for graph in graphs:
        assert graph.types == graphs[0].types
        assert graph.types[graph.outputs[0].name].grad

"""Tensors that a module holds as plain attributes: constants of every program that is compiled from it."""

from __future__ import annotations

from typing import Any

import torch
from harness import ideal
from torch import nn

import autoshard


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.mask = torch.arange(8.0)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.linear(x) * self.mask)


def test_every_program_knows_them(float64: None, close: Any) -> None:
    model = Masked()
    sharded = autoshard.compile(model, ideal({"tp": 2}), (torch.randn(4, 8),))
    for rows, training in ((4, True), (6, True), (4, False), (5, False)):  # new shapes, and the other mode
        x = torch.randn(rows, 8)
        for module in (model, sharded):
            module.train(training)
        torch.manual_seed(1)
        expected = model(x)
        torch.manual_seed(1)
        found = sharded(x)
        close(found.detach(), expected.detach())
        for output, module in ((expected, model), (found, sharded)):
            module.zero_grad()
            output.square().sum().backward()
        close(sharded.full_gradients()["linear.weight"], model.linear.weight.grad)
    assert len(sharded.programs) >= 4


def test_of_a_tensor_parallel_program_they_are_cut(float64: None, close: Any) -> None:
    model, x = Masked().eval(), torch.randn(4, 8)
    sharded = autoshard.compile(model, ideal({"tp": 2}), (x,), hints={"linear": "colwise"})
    close(sharded(x).detach(), model(x).detach())
    assert sharded.plan.cost.flops_per_rank == sharded.plan.cost.flops / 2

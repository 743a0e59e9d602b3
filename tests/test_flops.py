"""FLOPs that are priced, against those that torch counts when it runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from autoshard.passes.capture import capture
from autoshard.passes.propagate.prices import cost as costs
from autoshard.passes.rules import rule_for


class Added(nn.Module):
    """A product with something added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight)


@pytest.mark.parametrize("frozen", ["", "0.weight", "0.bias", "1.weight"])
@pytest.mark.parametrize("of_input", [False, True], ids=["plain", "gradient"])
@pytest.mark.parametrize("kind", ["linear", "addmm", "convolution"])
def test_products_of_the_backward_are_those_that_torch_runs(kind: str, of_input: bool, frozen: str) -> None:
    """None for an input that wants no gradient, and none for a bias."""
    layers = {
        "linear": lambda: (nn.Linear(8, 16), nn.Linear(16, 4)),
        "addmm": lambda: (Added(), nn.Linear(16, 4)),
        "convolution": lambda: (nn.Conv2d(8, 16, 3), nn.Conv2d(16, 4, 3)),
    }
    model = nn.Sequential(*layers[kind]())
    if frozen:
        model.get_parameter(frozen).requires_grad_(False)
    x = torch.randn(*((2, 8, 9, 9) if kind == "convolution" else (6, 8)), requires_grad=of_input)
    graph = capture(model, (x,), training=True)
    with FlopCounterMode(display=False) as counted:
        model(x).sum().backward()
    assert sum(costs.node_flops(n, graph, rule_for(n.op)) for n in graph.nodes) == counted.get_total_flops()

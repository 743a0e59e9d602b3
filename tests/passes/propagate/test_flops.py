"""FLOPs that are priced, against those that torch counts when it runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from autoshard import Mesh
from autoshard.hardware import PRESETS
from autoshard.passes.capture import capture
from autoshard.passes.propagate.op_space import op_space
from autoshard.passes.propagate.prices import roofline as costs
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
    assert sum(costs.node_flops(n, graph) for n in graph.nodes) == counted.get_total_flops()


def seconds(module: nn.Module, *args: torch.Tensor) -> costs.PhaseSeconds:
    """Of the one product of ``module``, on an H100."""
    graph, mesh = capture(module, args, training=True), Mesh({"x": 1})
    (node,) = (n for n in graph.nodes if (rule := rule_for(n.op)) is not None and rule.flops is not None)
    space = op_space(node, graph, mesh)
    return costs.node_seconds(node, graph, mesh, space.choices[0], [p[0] for p in (*space.inputs, *space.outputs)])


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_the_gradient_of_a_bias_reads_that_of_the_result_once_more(kind: str) -> None:
    """A bias that is frozen takes nothing."""
    taken, h100 = [], PRESETS["h100"]
    for bias, trained in ((False, False), (True, False), (True, True)):
        with torch.device("meta"):
            layer: nn.Module = nn.Linear(64, 128, bias=bias)
            x = torch.empty(8 * 1024, 64)
            if kind == "convolution":
                layer, x = nn.Conv2d(64, 128, 3, bias=bias), torch.empty(8, 64, 34, 34)
        if bias:
            layer.get_parameter("bias").requires_grad_(trained)
        taken.append(seconds(layer, x.requires_grad_()))
    assert taken[0].backward == pytest.approx(taken[1].backward, rel=1e-3)
    more = taken[2].backward - taken[1].backward
    assert more == pytest.approx(h100.memory_seconds(8 * 1024 * 128 * 4) + h100.kernel_latency, rel=1e-6)
    assert taken[2].launches[1] - taken[1].launches[1] == pytest.approx(h100.kernel_latency)


def test_the_gradient_of_what_is_as_large_as_the_result_is_that_of_the_result() -> None:
    with torch.device("meta"):
        large = Added()
        large.bias = nn.Parameter(torch.empty(6, 16))
        added, alone = (
            seconds(m, torch.empty(6, 8, requires_grad=True)) for m in (large, nn.Linear(8, 16, bias=False))
        )
    assert added.launches == alone.launches

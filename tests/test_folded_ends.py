"""Where the folded order that a graph carries ends: at buffers, at values with two sequences, before experts' weights."""

from __future__ import annotations

import pytest
import torch
from harness import assert_equal_training
from test_ring import Attention
from torch import nn

from autoshard import compiler
from autoshard.passes.propagate import folded_order
from autoshard.runtime.operations.experts import experts_op


class Kept(Attention):
    """A buffer has the last result of attention."""

    def __init__(self) -> None:
        super().__init__(16, 4, 4)
        self.register_buffer("kept", torch.zeros(2, 16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.mixed(x)
        self.kept.copy_(y.detach())
        return y.square().mean()


@pytest.mark.usefixtures("taken", "remembering")
def test_a_buffer_is_written_in_the_order_of_the_sequence() -> None:
    torch.manual_seed(0)
    report = assert_equal_training(Kept(), {"cp": 4}, (torch.randn(2, 16, 16),), {}, like="ring")
    assert report.plan.folded == 4
    assert len(report.plan.folds[1]) == 1


class Crossed(nn.Module):
    """Scores [positions, positions] of what attention makes, read along either dim."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(16, 4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.attention.mixed(x)
        scores = y @ y.mT
        return (scores.sin() * scores.mT.exp() + scores.cumsum(1)).mean()


@pytest.mark.usefixtures("taken", "remembering")
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_value_has_the_sequence_along_one_dim(ranks: int) -> None:
    """What would meet it along another ends the order there."""
    torch.manual_seed(0)
    report = assert_equal_training(Crossed(), {"cp": ranks}, (0.1 * torch.randn(2, 16, 16),), {}, like="ring")
    assert report.plan.folded == ranks


def test_experts_are_in_no_order_of_rows() -> None:
    """Of as many experts as rows, too: rows that travel go where ids say."""
    rows, hidden = torch.randn(2, 8, 4, dtype=torch.float64), torch.randn(8, 3, 4, dtype=torch.float64)

    class Routed(nn.Module):
        def forward(self, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            weights, ids = x.softmax(-1).topk(2)
            return experts_op(x, ids, weights, first, second, "silu", False, False)

    graph = compiler.captured(Routed(), (rows, hidden, hidden.mT.contiguous()), {})
    (node,) = (n for n in graph.nodes if n.op is experts_op._opoverload)
    found = [link for link in folded_order.carried(node, graph) if link.inputs[0] is not None]
    assert {link.inputs[0] for link in found} == {0, 1}
    assert all(link.inputs[3:] == (None, None) for link in found)

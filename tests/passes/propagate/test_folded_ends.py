"""Where the folded order that a graph carries ends: at buffers, at values with two sequences, before experts' weights."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from harness import assert_equal_training
from ring_steps import Attention
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard import compiler
from autoshard.passes.propagate import zigzag
from autoshard.plans.options import CompileOptions
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

    graph = compiler.capture_graph(Routed(), (rows, hidden, hidden.mT.contiguous()), {})
    (node,) = (n for n in graph.nodes if n.op is experts_op._opoverload)
    found = [link for link in zigzag.order_free_links(node, graph) if link.inputs[0] is not None]
    assert {link.inputs[0] for link in found} == {0, 1}
    assert all(link.inputs[3:] == (None, None) for link in found)


class Block(nn.Module):
    """``inside``: the order ends in the block; else outside of it, at the first of its two results."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.norm, self.attention, self.out = nn.LayerNorm(16), Attention(16, 4, 4), nn.Linear(16, 16)
        self.inside = inside

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.attention.mixed(self.norm(x))
        return x + self.out(x.cumsum(1)).sin() if self.inside else (x, self.out(x).sin())


class Blocks(nn.Module):
    def __init__(self, inside: bool, again: bool = False) -> None:
        super().__init__()
        self.blocks, self.inside, self.again = nn.ModuleList(Block(inside) for _ in range(3)), inside, again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            made = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
            x = made if self.inside else made[0].cumsum(1) + made[1]
        return x.square().mean()


def source_of(model: nn.Module) -> str:
    """The program of four ranks in folded order, which is right."""
    torch.manual_seed(0)
    x = torch.randn(2, 16, 16)
    report = assert_equal_training(model, {"cp": 4}, (x,), {}, like="ring", steps=1)
    assert report.plan.folded == 4
    graph = compiler.capture_graph(model.double(), (x.double(),), {})
    return compiler.compile_graph(graph, autoshard.Mesh({"cp": 4}), CompileOptions(like="ring")).source.text


@pytest.mark.slow_cases("False")
@pytest.mark.usefixtures("taken", "remembering")
@pytest.mark.parametrize("inside", [True, False])
def test_blocks_stay_whole(inside: bool) -> None:
    """What ends the order in a block belongs to it, and what does so outside comes before or behind all of it."""
    blocks, rest = source_of(Blocks(inside)).split("class RankModule")
    assert "runtime.from_zigzag(" in (blocks if inside else rest)
    assert "def forward(" in blocks
    assert "def forward_1(" not in blocks


@pytest.mark.slow
@pytest.mark.usefixtures("taken", "remembering")
def test_what_runs_again_stays_whole() -> None:
    """One part of every checkpoint."""
    blocks, _ = source_of(Blocks(True, again=True)).split("class RankModule")
    assert blocks.count("= runtime.recompute(") == len(re.findall(r"class Block\w*\(", blocks))


class Parts(nn.Module):
    """Checkpoints of a method, of no module; outside of them the order ends at the first of two results."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = Attention(16, 4, 4), nn.Linear(16, 16)

    def part(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.attention.mixed(x)
        return x, self.out(x).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x, y = checkpoint(self.part, x, use_reentrant=False)
            x = x.cumsum(1) + y
        return x.square().mean()


@pytest.mark.usefixtures("taken", "remembering")
def test_what_reads_a_checkpoint_comes_behind_it() -> None:
    lines = [
        line for line in source_of(Parts()).splitlines() if "runtime.from_zigzag(" in line or " = torch.sin(" in line
    ]
    assert ["sin" in line for line in lines[:4]] == [True, False, True, False]
    assert all(line.startswith(8 * " " + "add") for line in lines[1:4:2])  # in no function that runs again


class Inner(nn.Module):
    """In order from the first to the last operation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(16), Attention(16, 4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention.mixed(self.norm(x))


class Between(nn.Module):
    """The order ends and begins between blocks."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.blocks, self.again = nn.ModuleList(Inner() for _ in range(3)), again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x.cumsum(1)
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x.square().mean()


@pytest.mark.slow
@pytest.mark.usefixtures("taken", "remembering")
@pytest.mark.parametrize("again", [False, True])
def test_what_begins_outside_does_not_belong_to_its_reader(again: bool) -> None:
    """So blocks are one class, and what runs again in them is one part."""
    blocks, rest = source_of(Between(again)).split("class RankModule")
    assert rest.count("runtime.to_zigzag(") == 3
    assert len(re.findall(r"class \w+", blocks)) == 1
    assert (blocks + rest).count("runtime.recompute(") == int(again)

"""Locals that are freed before their function returns, in the source and in the predicted peak."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard import Mesh
from autoshard.compiler import capture_graph, compile_graph
from autoshard.plans.options import CompileOptions


class Chain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.repeat(1, 64)
        narrow = wide.amax(1, True)
        return (narrow + 1).exp() * x


def test_large_values_are_deleted_after_their_last_use() -> None:
    source = compile_graph(
        capture_graph(Chain(), (torch.empty(512, 64),), {}, training=False), Mesh({"tp": 1})
    ).source.text
    body = source[source.index("wide =") : source.index("return")]
    assert [line.split("  #")[0].strip() for line in body.strip().splitlines()] == [
        "wide = x.repeat(1, 64)",
        "narrow = wide.amax([1], True)",
        "del wide",
        "add = narrow + 1",
        "exp = torch.exp(add)",
        "mul = exp * x",
    ]


@pytest.mark.parametrize(("rows", "deleted"), [(63, False), (64, True)])
def test_what_an_allocator_keeps_anyway_is_not(rows: int, deleted: bool) -> None:
    """64 × 4096 float32 are 1 MiB."""
    source = compile_graph(
        capture_graph(Chain(), (torch.empty(rows, 64),), {}, training=False), Mesh({"tp": 1})
    ).source.text
    assert ("del wide" in source) == deleted


class Reads(nn.Module):
    def forward(self, x: Tensor, wide: Tensor) -> Tensor:
        return (x + wide.amax(1, True)).exp() * 2


class Inside(nn.Module):
    """What a block reads last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Reads()])

    def forward(self, x: Tensor) -> Tensor:
        wide = x.repeat(1, 64)
        return self.blocks[0](x, wide).sin() + 1  # type: ignore[no-any-return]


def test_what_a_block_reads_is_deleted_where_it_was_made() -> None:
    """Whoever called the block holds it until that returns."""
    source = compile_graph(
        capture_graph(Inside(), (torch.empty(512, 64),), {}, training=False), Mesh({"tp": 1})
    ).source.text
    assert "del wide" not in source[: source.index("class RankModule")]
    body = [
        line.split("  #")[0].strip() for line in source[source.index("wide =") : source.index("return (")].splitlines()
    ]
    assert body[:3] == ["wide = x.repeat(1, 64)", "x = self.blocks[0](wide, x)", "del wide"]


def deleted(model: nn.Module, *args: Tensor, **opts: Any) -> dict[str, tuple[str, ...]]:
    """By statement of a step on one device what is deleted after it."""
    graph = capture_graph(model, args, {}, training=True)
    program = compile_graph(graph, Mesh({"tp": 1}), CompileOptions(**opts)).program
    return {s.outputs[0]: s.dead_after for s in program.statements if s.dead_after}


class Turned(nn.Module):
    """A large value that autograd keeps or not, turned around twice."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.kept, self.scale = kept, nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        wide = (x + self.scale).repeat(1, 64)
        wide = wide.exp() if self.kept else wide
        once = wide.t().reshape(512, 4096)
        twice = once.t().reshape(4096, 512)
        return twice.sum() * 2


def test_what_may_lie_in_memory_that_autograd_keeps_is_not_deleted() -> None:
    """A reshape is a view or a copy: nothing is known to be gained."""
    x = torch.empty(512, 64)
    assert deleted(Turned(True), x) == {"exp": ("repeat",)}
    assert len(deleted(Turned(False), x)) == 3


class Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(64, 4096), nn.Tanh(), nn.Linear(4096, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x).square().mean()  # type: ignore[no-any-return]


def test_what_is_made_again_is_deleted_after_its_last_use_outside() -> None:
    """Autograd would keep it for two that read it, and the backward makes it again."""
    x = torch.empty(256, 64)
    assert deleted(Again(), x, recompute={"mlp": True}) == {"tanh": ("linear",), "linear_1": ("tanh",)}
    assert deleted(Again(), x, recompute="none") == {"tanh": ("linear",)}

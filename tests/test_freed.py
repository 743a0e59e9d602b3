"""Locals that are freed before their function returns, in the source and in the predicted peak."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoshard import Mesh
from autoshard.compiler import build, captured


class Chain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.repeat(1, 64)
        narrow = wide.amax(1, True)
        return (narrow + 1).exp() * x


def test_large_values_are_deleted_after_their_last_use() -> None:
    source = build(captured(Chain(), (torch.empty(512, 64),), {}, training=False), Mesh({"tp": 1})).source.text
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
    source = build(captured(Chain(), (torch.empty(rows, 64),), {}, training=False), Mesh({"tp": 1})).source.text
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
    source = build(captured(Inside(), (torch.empty(512, 64),), {}, training=False), Mesh({"tp": 1})).source.text
    assert "del wide" not in source[: source.index("class RankModule")]
    body = [
        line.split("  #")[0].strip() for line in source[source.index("wide =") : source.index("return (")].splitlines()
    ]
    assert body[:3] == ["wide = x.repeat(1, 64)", "x = self.blocks[0](wide, x)", "del wide"]

"""Splits of fused projections: every part is cut as the whole is, and only what ranks lack of their parts is sent."""

from __future__ import annotations

import pytest
import torch
from harness import collectives, ideal
from state_experts import Fused

import autoshard
from autoshard.compiler import captured

aten = torch.ops.aten


def given() -> torch.Tensor:
    return torch.randn(3, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_slices_that_tile_a_projection_are_a_split() -> None:
    graph = captured(Fused(), (given().float(),), {}, training=True)
    ops = [n.op for n in graph.nodes]
    assert aten.split_with_sizes.default in ops
    assert aten.slice.Tensor not in ops


def test_slices_that_leave_a_gap_are_none() -> None:
    class Gap(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y[..., :4] * y[..., 5:9]

    ops = [n.op for n in captured(Gap(8, 9), (given().float(),), {}, training=True).nodes]
    assert ops.count(aten.slice.Tensor) == 2


def test_a_fused_layer_is_cut_as_a_pair_of_columns_and_rows() -> None:
    """No whole activation is gathered: of unequal parts what a shard lacks is sent, of equal ones nothing: each is cut."""
    found = collectives(Fused(), {"tp": 2}, None, (given(),), like="megatron")
    gathered = [c for c in found if c[0] in ("all_gather", "all_to_all", "reduce_scatter")]
    assert not gathered, found
    rows, item = 3 * 6, 8
    parts = sorted(size for kind, _, phase, size in found.elements() if kind == "halo" and phase == "forward")
    # all 16 queries lie on the first rank, all 8 keys and 8 values on the second
    assert parts == sorted(rows * item * n for n in (8, 4, 4)), found


def test_parts_of_another_rank_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: every rank takes the parts that it holds itself."""

    def held(x: torch.Tensor, dim: int, lengths: list[int], axes: str) -> list[torch.Tensor]:
        return list(x.split([n // 2 for n in lengths], dim))

    monkeypatch.setattr("autoshard.runtime.split", held)
    report = autoshard.verify(Fused().double(), ideal({"tp": 2}), (given(),), like="megatron")
    assert not report.ok

"""Identifiers in generated code: a name is taken again only when nobody will read its old value."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness import assert_equal_training
from torch import nn

import autoshard
from autoshard import Shard
from autoshard.passes.codegen import emit as codegen


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


X = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(0))
SEQUENCE_PARALLEL = {"*.up": "colwise", "*.down": "rowwise", "layers.?": Shard(1), "x": Shard(1)}


def train() -> autoshard.VerifyReport:
    """Every layer reads its input in shards, for the residual, and gathered, for the first weight."""
    return assert_equal_training(Layers(), {"tp": 2}, (X,), hints=SEQUENCE_PARALLEL, hardware="h100")


def test_a_value_that_a_later_block_reads_keeps_its_name() -> None:
    kinds = {(c.kind, c.phase) for c in train().plan.collectives}
    assert ("all_gather", "forward") in kinds
    assert ("reduce_scatter", "forward") in kinds


def test_a_name_that_is_taken_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: as if nothing were read after the statements between two blocks."""
    monkeypatch.setattr(codegen._Emitter, "_read_later", lambda emitter: [frozenset[str]() for _ in emitter.segments])
    with pytest.raises((AssertionError, RuntimeError)):
        train()


class Taken(nn.Module):
    """A parameter, a buffer, two arguments and the results of ops share their names."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.matmul = nn.Parameter(torch.randn(16, 12)), nn.Parameter(torch.randn(12, 7))
        self.register_buffer("x", torch.zeros(16))

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        self.x += x.sum((0, 1))
        return torch.relu(x * weight @ self.weight) @ self.matmul


@pytest.mark.parametrize("axes", [{"tp": 2}, {"tp": 3}, {"dp": 2, "tp": 2}], ids=str)
def test_equal_names_of_tensors_arguments_and_results(axes: dict[str, int]) -> None:
    report = assert_equal_training(Taken(), axes, (X, X.roll(1, 0)), share=1.2)
    layouts = report.plan.layouts
    assert {"weight", "weight (input)", "x", "x (input)", "matmul", "matmul_result"} <= layouts.keys()
    assert [report.plan.shapes[n] for n in ("weight", "weight (input)", "matmul")] == [(16, 12), (4, 8, 16), (12, 7)]

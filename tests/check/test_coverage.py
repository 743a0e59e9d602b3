"""The coverage report: what every op of a model gets, before it is compiled."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoshard
from autoshard.check.coverage import CoverageReport


@torch.library.custom_op("autoshard_coverage_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, g: g * 2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer(), Layer())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        x = torch.ops.autoshard_coverage_tests.twice(x)
        return torch.kron(x, x[:1, :2])


class Loss(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh().sum()


def report(model: nn.Module, *args: torch.Tensor, **kwargs: object) -> CoverageReport:
    return autoshard.coverage(model, args, **kwargs)  # type: ignore[arg-type]


def test_every_op_stands_in_the_report_with_where_and_what() -> None:
    found = report(Model(), torch.randn(8, 16))
    ops = {op.op: op for op in found.ops}
    linear = [op for op in found.ops if op.op == "aten.linear.default"]
    assert sorted((op.status, op.count, op.fqn) for op in linear) == [
        ("sharded", 3, "layers.*.down"),
        ("sharded", 3, "layers.*.up"),
    ]
    assert all(op.source.startswith("test_coverage.py:") and not op.seconds_lost for op in linear)
    twice_, kron = ops["autoshard_coverage_tests.twice.default"], ops["aten.kron.default"]
    assert (twice_.status, twice_.reason, twice_.fqn) == ("replicated", "no rule", "")
    assert twice_.seconds_lost > 0
    assert (kron.status, kron.count) == ("decomposed", 1)
    assert sum(found.counts.values()) == sum(op.count for op in found.ops)
    assert not found.complete


def test_text() -> None:
    text = str(report(Model(), torch.randn(8, 16)))
    head, first, *rest = text.splitlines()
    assert head.startswith("coverage on x=2: 0 refused, ")
    assert " 1 decomposed, 9 sharded; " in head
    assert "autoshard_coverage_tests.twice.default" in first  # what costs most comes first
    assert "loses" in first
    assert first.endswith("(no rule)")
    assert any("3 ×  aten.relu.default" in line for line in rest)


def test_a_rule_completes_it() -> None:
    assert report(Layer(), torch.randn(8, 16)).complete
    model = nn.Sequential(Layer())
    assert report(model, torch.randn(8, 16), mesh={"tp": 4}).mesh.size == 4


def test_small_factors_and_costs_are_named() -> None:
    found = report(nn.Linear(2, 2), torch.randn(2, 2), mesh=autoshard.Mesh({"x": 3}, "ideal_network"))
    assert [op.reason for op in found.ops] == ["no factor is as long as 3 ranks"]
    slow = report(Loss(), torch.randn(4, 16), mesh=autoshard.Mesh({"x": 2}, "h100"))
    assert ("aten.tanh.default", "replicated", "sharding it does not pay") in [
        (o.op, o.status, o.reason) for o in slow.ops
    ]


def test_a_model_that_cannot_be_captured_is_refused_with_the_reason() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    found = report(Branch(), torch.randn(4))
    assert found.error.startswith("CaptureError: ")
    assert not found.complete
    assert "refused" in str(found)
    with pytest.raises(autoshard.CaptureError):
        autoshard.compile(Branch(), {"x": 2}, (torch.randn(4),), parts=None)

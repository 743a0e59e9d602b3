"""``verify`` says where: operation, module, line, forward or backward, in micro-batches and stages too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import ideal
from torch import nn

import autoshard
from autoshard import Replicate, runtime
from autoshard.check.divergence import first_divergence
from autoshard.errors import RuntimeMismatchError
from autoshard.layout import Layout
from autoshard.module.programs.simulated_ranks import join_shards

pytestmark = pytest.mark.usefixtures("captures")

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches": {"micro_batches": 2},
    "stages": {"stages": "pp"},
    "stages and micro-batches": {"stages": "pp", "micro_batches": 2},
}
ASKED: dict[str, Any] = {"like": {"tp": "megatron"}, "hints": {"[xy]": "replicate"}}


class Layer(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(6, 12), nn.Linear(12, 6), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.dropout(F.gelu(self.up(x)), 0.2, self.training))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(len(y)) < 0.9  # by shape: of a micro-batch, a part of it
        return F.mse_loss(self.second(self.first(x)), torch.where(drawn[:, None, None], y, 0.0))


def model_and_inputs() -> tuple[Model, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return Model().double(), (torch.randn(4, 3, 6).double(), torch.randn(4, 3, 6).double())


def found(**setting: Any) -> str | None:
    model, args = model_and_inputs()
    mesh = ideal({"pp": 2, "tp": 2} if "stages" in setting else {"tp": 2})
    report = autoshard.verify(model, mesh, args, **ASKED, **setting)
    assert report.ok == (report.first_divergence is None)
    return report.first_divergence


@pytest.mark.slow_cases("micro-batches", "stages")
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_nothing_is_found_where_nothing_differs(setting: dict[str, Any]) -> None:
    model, args = model_and_inputs()
    mesh = ideal({"pp": 2, "tp": 2} if "stages" in setting else {"tp": 2})
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, **ASKED, **setting)
    assert first_divergence(model, sharded, args, {}, 1e-9) is None


@pytest.mark.slow_cases("micro-batches")
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_a_wrong_sum_is_found_in_the_forward(setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("all_reduce", "reduce_scatter"):
        right = getattr(runtime, name)
        monkeypatch.setattr(runtime, name, lambda x, *a, right=right, **k: right(x, *a, **k) * (1 + 1e-6))
    text = found(**setting)
    assert text is not None
    assert text.startswith("aten.add.Tensor in first at test_divergence.py:"), text
    assert ", forward: error " in text


@pytest.mark.slow_cases("micro-batches", "stages")
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_a_sum_left_out_of_the_backward_is_found_there(
    setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of what a column-parallel layer reads is summed over its ranks."""
    right = runtime.all_reduce
    monkeypatch.setattr(runtime, "enter", lambda x, *a, **k: x)
    monkeypatch.setattr(runtime, "all_reduce", lambda x, axes, to: right(x, axes, to="I"))
    text = found(**setting)
    assert text is not None
    assert text.startswith(("aten.linear.default in second.up at test_divergence.py:", "aten.add.Tensor in first")), (
        text
    )
    assert ", backward: gradient of " in text


def test_a_wrong_trace_is_found_by_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graph and program agree, and the model does something else."""
    model, args = model_and_inputs()
    sharded = autoshard.compile(copy.deepcopy(model), ideal({"tp": 2}), args, **ASKED)
    right = F.gelu
    monkeypatch.setattr(F, "gelu", lambda x: right(x) * 1.001)
    found = first_divergence(model, sharded, args, {}, 1e-9)
    assert found is not None
    assert found.startswith("the graph of first ")


class Cancelling(nn.Module):
    """Sums of large numbers that nearly cancel: their order decides about the fourth digit in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 4096), nn.Linear(4096, 4, bias=False)
        with torch.no_grad():
            self.down.weight[:, ::2] = 10 + 0.1 * torch.randn(4, 2048)
            self.down.weight[:, 1::2] = -self.down.weight[:, ::2] + 1e-2 * torch.randn(4, 2048)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        h = torch.stack([h[..., ::2], h[..., ::2]], -1).flatten(-2)
        return F.dropout(self.down(h), 0.5)


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_rounding_is_measured_against_float64(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 model whose rounding exceeds the limit on one device is right as long as the sharded one is as near."""
    for name in ("all_reduce", "reduce_scatter"):
        right = getattr(runtime, name)
        monkeypatch.setattr(runtime, name, lambda x, *a, right=right, **k: right(x, *a, **k) * factor)
    torch.manual_seed(0)
    model, args = Cancelling(), (torch.randn(4, 3, 8),)
    report = autoshard.verify(model, ideal({"tp": 2}), args, like="megatron")
    worst = report.worst
    assert worst.error > worst.limit
    assert worst.rounding is not None
    assert worst.rounding > worst.limit / 4
    assert report.ok == (factor == 1.0), str(report)
    assert "against float64" in str(report)


class Narrow(nn.Module):
    """A dtype is written into the forward, where the model in float64 cannot run."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x.float()).square().mean()


def test_what_is_not_compared_with_float64_is_said() -> None:
    x = torch.randn(4, 6)
    report = autoshard.verify(Narrow(), ideal({"tp": 2}), (x,))
    assert report.ok
    assert "not compared with float64, where the model does not run: RuntimeError: " in str(report)
    assert not autoshard.verify(nn.Linear(6, 6), ideal({"tp": 2}), (x,)).unchecked


@pytest.mark.parametrize(("drift", "dtype"), [(0.05, torch.bfloat16), (0.05, torch.float16), (1e-3, torch.float32)])
def test_replicas_that_drift_are_refused(drift: float, dtype: torch.dtype) -> None:
    layout, x = Layout(autoshard.Mesh({"tp": 2}), [Replicate()]), torch.full((4,), 2.0, dtype=dtype)
    assert join_shards([x, x * (1 + torch.finfo(dtype).eps)], layout, (4,), "x").equal(x)
    with pytest.raises(RuntimeMismatchError, match="rank 1 disagrees"):
        join_shards([x, x * (1 + drift)], layout, (4,), "x")

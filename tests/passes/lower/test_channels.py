"""Convolutions on CPUs read images with the channels last in memory, and give what they give on one device."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from harness import assert_equal_training
from torch import Tensor, nn

import autoshard
from autoshard.passes.lower import channels


class Net(nn.Module):
    """Down, up and across, with what reads the order of dims: flattened, joined, multiplied, and returned."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1)
        )
        self.wide = nn.Conv2d(8, 8, 3, padding="same", groups=4)
        self.up, self.outer = nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.Conv2d(16, 4, 1)
        self.head = nn.Linear(4 * 8 * 8, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        skip = self.inner[:3](x)
        deep = self.wide(F.max_pool2d(self.inner[3](skip), 3, 1, 1)) + 1
        features = self.outer(torch.cat([skip, self.up(deep)], 1))
        rows = deep.flatten(2).transpose(1, 2)
        out = self.head(features.flatten(1))
        return out.square().mean() + (rows @ rows.mT).mean() + features.square().sum(1).mean(), features, rows


def image(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass where sums do not round."""
    monkeypatch.setattr(channels, "ONEDNN_DTYPES", {torch.float64})


@pytest.mark.slow_cases("axes2", "axes0")
@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}])
def test_as_on_one_device(doubles: None, axes: dict[str, int]) -> None:
    assert_equal_training(Net(), axes, (image(),))


def test_only_what_comes_in_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    sharded = autoshard.compile(Net(), autoshard.Mesh({"dp": 2}), (image(),), like="ddp")
    assert sharded.source.count("runtime.channels_last(") < sharded.source.count("F.conv2d(")
    convolve, seen = torch.nn.functional.conv2d, list[bool]()

    def noted(x: Tensor, *rest: Any) -> Tensor:
        seen.append(x.is_contiguous(memory_format=torch.channels_last))
        return convolve(x, *rest)

    monkeypatch.setattr(torch.nn.functional, "conv2d", noted)
    _, features, rows = sharded(image())
    assert seen == [True] * 4 * 2
    assert [x.is_contiguous() for x in (features, rows)] == [True, True]


class Pooled(nn.Module):
    """The mean of all pixels, as ``form`` says."""

    FORMS: ClassVar[dict[str, Any]] = {
        "mean": lambda x: x.mean((2, 3)),
        "kept dims": lambda x: x.mean((-1, -2), keepdim=True).flatten(1),
        "pool": lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1),
    }

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.inner, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.FORMS[self.form](torch.relu(self.inner(x)))).square()
        return out.mean()


def test_the_mean_of_a_number_beside_images() -> None:
    class Gained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.gain = nn.Conv2d(3, 8, 3), nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).square().mean() * self.gain.mean(0)

    torch.manual_seed(0)
    model = Gained()
    sharded = autoshard.compile(model, autoshard.Mesh({"dp": 2}), (image(),))
    torch.testing.assert_close(sharded(image()), model(image()))


@pytest.mark.parametrize("form", Pooled.FORMS)
def test_gradients_of_means_lie_as_what_they_are_of(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """Nothing is written in another order."""
    torch.manual_seed(0)
    model, derived = Pooled(form), list[bool]()
    sharded = autoshard.compile(model, autoshard.Mesh({"dp": 1}), (image(),))
    assert "sum([2, 3], " in sharded.source
    relu = torch.relu

    def noted(x: Tensor) -> Tensor:
        out = relu(x)
        out.register_hook(lambda g: derived.append(g.stride()[1] == 1))
        return out

    monkeypatch.setattr(torch, "relu", noted)
    found = sharded(image())
    found.backward()
    assert derived == [True]
    expected = model(image())
    expected.backward()
    torch.testing.assert_close(found, expected)
    for p, q in zip(sharded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert derived == [True, False]  # of a mean it is written out

"""Caches that the first call of a model fills: compiling makes that call, where they depend on no data; else it refuses."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_equal_training, ideal
from torch import Tensor, nn

import autoshard
from autoshard import CaptureError


def positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1]).to(x).cos()[:, None]


def attribute(self: Net, x: Tensor) -> Tensor:
    if self.cached is None or self.n < x.shape[1]:
        self.cached, self.n = positions(x), x.shape[1]
    return self.cached[: x.shape[1]]


def buffer(self: Net, x: Tensor) -> Tensor:
    """As rotary embeddings keep it: a number says how much is valid, and the call that fills it does not read it."""
    if self.n >= x.shape[1]:
        return self.table[: x.shape[1]]
    self.table[: x.shape[1]] = made = positions(x) * self.frequency
    self.n = x.shape[1]
    return made


def by_length(self: Net, x: Tensor) -> Tensor:
    if x.shape[1] not in self.known:
        self.known[x.shape[1]] = {"cos": torch.zeros_like(x[0, :, :1]) + positions(x)}
    return self.known[x.shape[1]]["cos"]


def of(make: Callable[[Net, Tensor], Any]) -> Callable[[Net, Tensor], Any]:
    def filled(self: Net, x: Tensor) -> Any:
        if self.cached is None:
            self.cached = make(self, x)
        return self.cached

    return filled


def other(self: Net, x: Tensor) -> Any:
    self.n += 1
    return positions(x) if self.n > 1 else 2.0


def counted(self: Net, x: Tensor) -> Any:
    self.n += 1
    return self.n


def scheduled(self: Net, x: Tensor) -> Any:
    """The first two calls compute the same, the hundredth something else."""
    self.n += 1
    if (self.n - 1.5) * 2 > 200:
        self.cached = 2.0
    return positions(x) * (self.cached or 1.0)


def only_counted(self: Net, x: Tensor) -> Any:
    self.n = self.n + 1
    self.known["calls"] = f"{self.n / 2:.1f}"
    return positions(x)


class Net(nn.Module):
    def __init__(self, table: Callable[[Net, Tensor], Any]) -> None:
        super().__init__()
        self.lin, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.cached, self.n, self.known = None, 0, {}
        self.register_buffer("table", torch.zeros(9, 1), persistent=False)
        self.register_buffer("frequency", torch.full((1,), 0.5))
        self.of = table

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.drop(self.lin(x)).mT).mT
        return h * self.of(self, x)


@pytest.mark.parametrize("table", [attribute, buffer, by_length])
def test_compiling_makes_the_call(
    table: Callable[[Net, Tensor], Any], float64: None, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    with caplog.at_level(logging.INFO, "autoshard"):
        assert_equal_training(Net(table), {"tp": 2}, (torch.randn(4, 6, 8),), steps=2)
    said = next(r for r in caplog.records if "its first call fills" in r.getMessage())
    assert (said.levelno == logging.WARNING) == (table is buffer)  # it reads one that a checkpoint may bring


REFUSED: dict[str, Callable[[Net, Tensor], Any]] = {
    "of data": of(lambda s, x: x.mean((0, 1))),
    "of what data wrote": of(lambda s, x: [y := torch.zeros(8), y.copy_(x[0, 0])][0]),
    "of a trained parameter": of(lambda s, x: s.lin.weight.detach().sum(0)),
    "drawn": of(lambda s, x: torch.randn(8)),
    "other in the first call": other,
    "other in every call": counted,
    "other in a later call": scheduled,
}


@pytest.mark.slow_cases("other in the first call", "other in every call")
@pytest.mark.one_graph
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_cache_is_refused_and_nothing_changed(name: str, float64: None) -> None:
    torch.manual_seed(0)
    model, x = Net(REFUSED[name]), torch.randn(4, 6, 8)
    before, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with pytest.raises(CaptureError, match="behind in the model, which changes the result of its next call"):
        autoshard.compile(model, ideal({"tp": 2}), (x,))
    assert torch.equal(drawn, torch.get_rng_state())
    assert (model.cached, model.n, model.known) == (None, 0, {})
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


@pytest.mark.one_graph
def test_a_counter_that_decides_nothing_is_no_state(float64: None) -> None:
    torch.manual_seed(0)
    assert autoshard.compile(Net(only_counted), ideal({"tp": 2}), (torch.randn(4, 6, 8),)).parts == ("",)

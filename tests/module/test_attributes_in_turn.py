"""Attributes and containers set in turn: before the first call, in copies, of modules called alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import ideal
from torch import nn

import autoshard

X = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(4, 8)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.scale, self.weights = nn.Linear(8, 8), 1.0, [2.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * self.scale * self.weights[0]


class Root(nn.Module):
    def __init__(self, in_parts: bool) -> None:
        super().__init__()
        self.body, self.other, self.in_parts = Body(), nn.Linear(8, 8), in_parts
        self.scale, self.weights = 1.0, [1.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.other(self.body(x)) * self.scale * self.weights[0]
        return y if not self.in_parts or float(x.sum()) < 1e9 else x


def put(path: str, value: Any) -> Callable[[nn.Module], None]:
    """Set the attribute, or its first item (``body.weights[0]``)."""

    def done(model: nn.Module) -> None:
        module, _, name = path.rpartition(".")
        if name.endswith("[0]"):
            getattr(model.get_submodule(module), name[:-3])[0] = value
        else:
            setattr(model.get_submodule(module), name, value)

    return done


TURNS: dict[str, list[Callable[[nn.Module], None] | str]] = {
    "a list set before": [put("weights", [2.0]), put("weights[0]", 4.0), "copy", put("weights[0]", 6.0)],
    "set before, then back": [put("weights", [2.0]), put("weights", [3.0]), put("weights", [1.0])],
    "set before, then a list": [put("body.scale", 3.0), put("body.weights[0]", 5.0), put("body.weights[0]", 2.0)],
    "a list replaced": ["", put("body.weights", [3.0]), put("body.weights[0]", 7.0), put("body.weights", [2.0])],
    "copied": [put("scale", 2.0), put("scale", 5.0), "copy", put("scale", 7.0)],
    "copied first": ["copy", put("weights[0]", 4.0), put("body.weights[0]", 3.0), put("weights[0]", 1.0)],
}


@pytest.mark.parametrize("in_parts", [False, True], ids=["graph", "parts"])
@pytest.mark.parametrize("turn", TURNS)
def test_as_the_unsharded_model(turn: str, in_parts: bool) -> None:
    torch.manual_seed(0)
    model = Root(in_parts).double()
    sharded: Any = autoshard.compile(copy.deepcopy(model), ideal({"tp": 2}))
    for number, step in enumerate(TURNS[turn]):
        if step == "copy":
            sharded = copy.deepcopy(sharded)
        elif callable(step):
            for module in (model, sharded):
                step(module)
        torch.testing.assert_close(sharded(X), model(X), rtol=1e-9, atol=1e-12, msg=f"turn {number}")


def test_a_module_called_alone_between() -> None:
    torch.manual_seed(0)
    model = Root(False).double()
    sharded: Any = autoshard.compile(copy.deepcopy(model), ideal({"tp": 2}))
    for step in (put("body.scale", 3.0), put("body.weights[0]", 5.0), put("body.weights[0]", 6.0)):
        for module in (model, sharded):
            step(module)
        torch.testing.assert_close(sharded.body(X), model.body(X), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(sharded(X), model(X), rtol=1e-9, atol=1e-12)

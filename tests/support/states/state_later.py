"""Cases of states: attributes, fields of configurations and containers that are set after compilation."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from state_harness import Net, both, case, close, full, ids, pair, refused, rows, steps
from torch import nn

import autoshard
from autoshard.errors import SharedStateError
from autoshard.module.gathered import changed_modules, gathered_model


class Scaled(nn.Module):
    """Its forward reads a number, a function and what users may set; not a list of names."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.scale, self.act, self.tags = nn.Linear(8, 8), 1.0, torch.tanh, ["a"]

    def add(self, tag: str) -> None:
        self.tags = [*self.tags, tag]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        y = self.act(self.lin(x)) * self.scale
        return ((y * getattr(self, "factor", 1.0)).square().mean(),)


@case
def attributes_that_are_set_later(mesh: autoshard.Mesh) -> None:
    """Programs follow them, those of modules inside, too; what the forward does not read costs no plan."""
    model, sharded = pair(mesh, lambda: nn.Sequential(Scaled()), rows())
    steps(model, sharded, rows())
    both(model, sharded, lambda m: m[0].add("b"))
    assert sharded[0].tags == ["a", "b"]
    steps(model, sharded, rows())
    assert len({id(program.compiled.program) for program in sharded.programs}) == 1
    losses = []
    for name, value in (("scale", 2.0), ("act", torch.sigmoid), ("factor", 3.0), ("scale", 1.0)):
        both(model, sharded, lambda m, name=name, value=value: setattr(m[0], name, value))
        steps(model, sharded, rows())
        losses.append(float(full(sharded(rows())[0]).detach()))
    assert len(set(losses)) == len(losses)  # each was read
    both(model, sharded, lambda m: delattr(m[0], "factor"))
    steps(model, sharded, rows())
    if not sharded.is_staged:  # copies have what is set and lack what is deleted
        close(gathered_model(sharded)(rows())[0], model(rows())[0])
        with changed_modules(sharded):
            pass
        both(model, sharded, lambda m: m(rows()))
        steps(model, sharded, rows())
    model, sharded = pair(mesh, lambda: Net(p=0.1), ids())
    both(model, sharded, lambda m: setattr(m.layers[0].drop, "p", 0.7))
    steps(model, sharded, ids())


class Settings:
    """A configuration, as libraries have them: read through a property, another name, a dict."""

    def __init__(self) -> None:
        self.inner, self.factors = SimpleNamespace(scale=1.0), {"bias": 1.0}
        self.returns_twice, self.act = False, torch.tanh

    @property
    def scale(self) -> float:
        return self.inner.scale

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__("returns_twice" if name == "twice" else name)


class Counter:
    """What the forward does not read."""

    done = 0


class Configured(nn.Module):
    """Its forward reads an object that it shares with a module inside."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.config, self.lin, self.steps = settings, nn.Linear(8, 8), Counter()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.config.act(self.lin(x)) * self.config.scale + getattr(self.config, "offset", 0.0)
        return ((y * self.config.factors["bias"]).square().mean(),) * (1 + self.config.twice)


@case
def fields_of_a_configuration_that_are_set_later(mesh: autoshard.Mesh) -> None:
    """Programs follow them, also back; what the forward does not read costs no capture."""

    def make() -> nn.Module:
        settings = Settings()
        model = nn.Sequential(Configured(settings))
        model.config = settings
        return model

    model, sharded = pair(mesh, make, rows())
    steps(model, sharded, rows())
    if sharded.is_staged:
        return
    close(sharded(rows())[0], model(rows())[0])
    before, seen = len(sharded.programs), set()
    sharded[0].steps.done += 1
    sharded(rows())
    assert len(sharded.programs) == before
    changes: list[Callable[[Any], Any]] = [
        lambda c: setattr(c.inner, "scale", 2.0),
        lambda c: setattr(c, "act", torch.sigmoid),
        lambda c: c.factors.update(bias=3.0),
        lambda c: setattr(c, "offset", 1.0),
        lambda c: setattr(c, "inner", SimpleNamespace(scale=4.0)),
        lambda c: setattr(c.inner, "scale", 5.0),
    ]
    for change in changes:
        both(model, sharded, lambda m, change=change: change(m.config))
        steps(model, sharded, rows())
        seen.add(float(full(sharded(rows())[0]).detach()))
    assert len(seen) == len(changes)  # each was read
    for twice in (True, False, True):
        both(model, sharded, lambda m, twice=twice: setattr(m.config, "returns_twice", twice))
        assert len(sharded(rows())) == len(model(rows())) == 1 + twice
        before = before if twice else len(sharded.programs)
    assert len(sharded.programs) == before
    model, sharded = pair(mesh, make, rows())
    both(model, sharded, lambda m: m.eval())
    for scale in (2.0, 1.0, 2.0):  # first read by the program that this makes
        both(model, sharded, lambda m, scale=scale: setattr(m.config.inner, "scale", scale))
        close(sharded(rows())[0], model(rows())[0])
    both(model, sharded, lambda m: setattr(m.config.inner, "scale", 5.0))
    with changed_modules(sharded) as inside:
        assert inside[0].config.inner.scale == 5.0
    copied = copy.deepcopy(sharded)
    copied.config.inner.scale = 6.0
    close(sharded(rows())[0], model(rows())[0])
    model.config.inner.scale = 6.0
    close(copied(rows())[0], model(rows())[0])
    vars(holder := Settings()).update(weights=torch.ones(8))
    model, sharded = pair(mesh, lambda: Configured(holder), rows())
    both(model, sharded, lambda m: setattr(m.config.inner, "scale", 2.0))
    steps(model, sharded, rows())
    sharded.config.act = torch.sigmoid
    with refused("field 'act' of a Settings was set after compilation", SharedStateError):
        sharded(rows())


class Weighted(nn.Module):
    """Its forward reads a dict that is nested and shared with a module inside, and a list; it does not read its log."""

    def __init__(self, weights: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.weights = weights or {"loss": 1.0, "rows": {"each": [1.0, 2.0]}}
        self.inner = nn.Linear(8, 8) if weights else Weighted(self.weights)
        self.powers, self.log = [1], [0]

    def forward(self, x: torch.Tensor) -> Any:
        y = self.inner(x) * self.weights["loss"] + self.weights["rows"]["each"][1] + getattr(self, "more", [0.0])[0]
        return (y.pow(self.powers[0]).mean(),) if isinstance(self.inner, Weighted) else y


@case
def containers_that_change_later(mesh: autoshard.Mesh) -> None:
    """Programs follow dicts and lists of constants in attributes, also back; what the forward does not read is free."""
    model, sharded = pair(mesh, lambda: nn.Sequential(Weighted()), rows())
    steps(model, sharded, rows())
    if sharded.is_staged:
        return
    changes: list[Callable[[Any], Any]] = [
        lambda m: m[0].weights.update(loss=2.0),
        lambda m: operator.setitem(m[0].weights["rows"]["each"], 1, 3.0),
        lambda m: operator.setitem(m[0].powers, 0, 2),
        lambda m: setattr(m[0], "more", [1.0]),
        lambda m: operator.setitem(m[0].more, 0, 2.0),
        lambda m: setattr(m[0], "weights", {"loss": 3.0, "rows": {"each": [1.0, 2.0]}}),
        lambda m: m[0].weights.update(loss=4.0),
    ]
    seen = set()
    for change in changes:
        both(model, sharded, change)
        steps(model, sharded, rows())
        seen.add(float(full(sharded(rows())[0]).detach()))
    assert len(seen) == len(changes)  # each was read
    before = len(sharded.programs)
    for loss in (3.0, 4.0):
        sharded[0].log.append(loss)
        both(model, sharded, lambda m, loss=loss: m[0].weights.update(loss=loss))
        close(sharded(rows())[0], model(rows())[0])
    assert len(sharded.programs) == before
    copied = copy.deepcopy(sharded)
    copied[0].weights["loss"] = 5.0
    close(sharded(rows())[0], model(rows())[0])
    model[0].weights["loss"] = 5.0
    close(copied(rows())[0], model(rows())[0])

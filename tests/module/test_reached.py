"""Whatever leads a forward to a part of its model, or finds one by identity, leads later programs to what was trained."""

from __future__ import annotations

import copy
import functools
import weakref
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import ideal
from state_harness import both, close, once, rows
from torch import nn

import autoshard


class Linked(nn.Module):
    """A forward that reaches its parts by what holds them, or looks up by identity; ``make`` puts that on it."""

    def __init__(self, make: Any, forward: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), nn.Linear(8, 8)
        self.held, self.inside = make(self), forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.b(self.inside(self, x)), torch.arange(len(x)) % 8)


LINKS: dict[str, tuple[Any, Any]] = {
    "function_in_a_tuple": (lambda m: (lambda x: m.a(x),), lambda m, x: m.held[0](x)),
    "function_in_a_default_dict": (lambda m: defaultdict(list, k=[lambda x: m.a(x)]), lambda m, x: m.held["k"][0](x)),
    "function_over_a_list": (lambda m: (lambda parts: lambda x: parts[0](x))([m.a]), lambda m, x: m.held(x)),
    "keyword_default": (lambda m: lambda x, *, part=m.a: part(x), lambda m, x: m.held(x)),
    "partial": (lambda m: functools.partial(lambda by, x: m.a(x) * by, 2.0), lambda m, x: m.held(x)),
    "cached_call": (lambda m: functools.lru_cache(lambda: m.a), lambda m, x: m.held()(x)),
    "weak_reference": (lambda m: weakref.ref(m.a), lambda m, x: m.held()(x)),
    "weak_method": (lambda m: weakref.WeakMethod(m.a.forward), lambda m, x: m.held()(x)),
    "weak_values": (lambda m: weakref.WeakValueDictionary(k=m.a), lambda m, x: m.held["k"](x)),
    "weak_keys": (lambda m: weakref.WeakKeyDictionary({m.a: 3.0}), lambda m, x: m.a(x) * m.held.get(m.a, 1.0)),
    "ids_of_modules": (lambda m: {id(m.a): 3.0}, lambda m, x: m.a(x) * m.held.get(id(m.a), 1.0)),
    "ids_of_parameters": (lambda m: {id(m.b.bias)}, lambda m, x: m.a(x) * (3.0 if id(m.b.bias) in m.held else 1.0)),
    "parameters_as_keys": (lambda m: {m.b.bias: 3.0}, lambda m, x: m.a(x) * m.held.get(m.b.bias, 1.0)),
    "sets_of_parameters": (lambda m: frozenset([m.b.bias]), lambda m, x: m.a(x) * (3.0 if m.b.bias in m.held else 1.0)),
    "lists_of_parameters": (
        lambda m: ([m.b.bias],),
        lambda m, x: m.a(x) * (3.0 if any(p is m.b.bias for p in m.held[0]) else 1.0),
    ),
}


@pytest.mark.slow_cases(
    "function_in_a_tuple",
    "function_over_a_list",
    "weak_values",
    "weak_method",
    "ids_of_modules",
    "lists_of_parameters",
    "parameters_as_keys",
    "function_in_a_default_dict",
    "weak_keys",
    "partial",
    "sets_of_parameters",
)
@pytest.mark.parametrize("link", LINKS)
def test_later_programs_are_of_what_was_trained(link: str) -> None:
    """A program in another shape and mode has today's weights, whatever leads to them; and again in a copy."""
    models = [Linked(*LINKS[link]).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    model, sharded = models[0], autoshard.compile(models[1], ideal({"tp": 2}), (rows(),))
    for module in (model, sharded):
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(module.parameters(), 1.0)
        module(rows()).backward()
        optimizer.step()
    both(model, sharded, nn.Module.eval)
    others = () if "ids" in link else (copy.deepcopy(sharded),)  # eager's copies have other ids, too
    for n, one in enumerate((sharded, *others), 6):
        with torch.no_grad():
            close(one(rows(n)), model(rows(n)))
    both(model, sharded, nn.Module.train)
    once(model, sharded, rows(5))
    assert models[1].b.bias.grad is None

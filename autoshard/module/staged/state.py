"""Optimizer states of pipeline stages ↔ state of the full model's optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autoshard.errors import PlanError
from autoshard.module.staged.pipelined import PipelinedModule


def whole_state(sharded: PipelinedModule, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """State dict of the full model's optimizer, on the CPU of every rank. Collective."""
    own, groups = optimizer.state_dict(), _groups(sharded, optimizer)
    mine = {name: own["state"][n] for n, name in enumerate(_names(sharded, optimizer)) if n in own["state"]}
    forms = sharded.gathered({name: {key: _form(x) for key, x in entry.items()} for name, entry in mine.items()})
    known: dict[str, dict[str, Any]] = {name: form for rank in reversed(forms) for name, form in rank.items()}
    state = {}
    for number, name in enumerate(name for names in groups for name in names):
        if name in known:
            entry = mine.get(name, {})
            state[number] = {
                key: sharded.everywhere(name, form, entry.get(key)).cpu() if isinstance(form, torch.Tensor) else form
                for key, form in known[name].items()
            }
    numbers = iter(range(sum(map(len, groups))))
    options = [
        {**group, "params": [next(numbers) for _ in names]}
        for group, names in zip(own["param_groups"], groups, strict=True)
    ]
    return {**own, "state": state, "param_groups": options}


def own_state(sharded: PipelinedModule, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's part of the full model's optimizer state; tensors stay full. Collective.

    Raises :class:`PlanError` for another number of parameters.
    """
    groups = _groups(sharded, optimizer)
    sizes = [len(group["params"]) for group in state["param_groups"]]
    if sizes != [len(names) for names in groups]:
        raise PlanError(
            f"the optimizer state is of {sizes} parameters by group, the model's are {[len(g) for g in groups]}"
        )
    numbers = [n for group in state["param_groups"] for n in group["params"]]
    number = dict(zip((name for names in groups for name in names), numbers, strict=True))
    names, own = _names(sharded, optimizer), optimizer.state_dict()["param_groups"]
    found = {i: state["state"][number[name]] for i, name in enumerate(names) if number[name] in state["state"]}
    options = [{**group, "params": mine["params"]} for group, mine in zip(state["param_groups"], own, strict=True)]
    return {**state, "state": found, "param_groups": options}


def _form(x: Any) -> Any:
    """A meta tensor for a tensor; anything else unchanged."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, torch.Tensor) else x


def _names(sharded: PipelinedModule, optimizer: torch.optim.Optimizer) -> list[str]:
    """Original names of the parameters in this rank's optimizer, in order."""
    return [name for names in _own_groups(sharded, optimizer) for name in names]


def _own_groups(sharded: PipelinedModule, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    known = {id(p): name for name, p in sharded.named_parameters()}
    return [[known[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _groups(sharded: PipelinedModule, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Per parameter group the names of all ranks, in model order. Collective."""
    order = {name: n for n, name in enumerate(sharded.whole_names())}
    every = sharded.gathered(_own_groups(sharded, optimizer))
    return [
        sorted({name for group in groups for name in group}, key=order.__getitem__)
        for groups in zip(*every, strict=True)
    ]

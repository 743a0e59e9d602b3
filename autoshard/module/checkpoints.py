"""Optimizer states of the full model, from and for a sharded module on any mesh."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoshard.errors import PlanError
from autoshard.module.optimizers import trained_module
from autoshard.module.programs.call_checks import collective_method
from autoshard.module.ranks.pipelined import PipelinedModule
from autoshard.module.sharded_module import ShardedModule


def full_optimizer_state(sharded: PipelinedModule, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """State dict of the full model's optimizer, on the CPU of every rank. Collective."""
    own, groups = optimizer.state_dict(), _model_groups(sharded, optimizer)
    mine = {name: own["state"][n] for n, name in enumerate(_own_names(sharded, optimizer)) if n in own["state"]}
    forms = sharded.gathered({name: {key: _meta_entry(x) for key, x in entry.items()} for name, entry in mine.items()})
    known: dict[str, dict[str, Any]] = {name: form for rank in reversed(forms) for name, form in rank.items()}
    state = {}
    for number, name in enumerate(name for names in groups for name in names):
        if name in known:
            entry = mine.get(name, {})
            state[number] = {
                key: sharded.everywhere(name, form, entry.get(key)).cpu() if isinstance(form, Tensor) else form
                for key, form in known[name].items()
            }
    numbers = iter(range(sum(map(len, groups))))
    options = [
        {**group, "params": [next(numbers) for _ in names]}
        for group, names in zip(own["param_groups"], groups, strict=True)
    ]
    return {**own, "state": state, "param_groups": options}


def local_optimizer_state(
    sharded: PipelinedModule, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> dict[str, Any]:
    """This rank's part of the full model's optimizer state; tensors stay full. Raises
    :class:`PlanError` for another number of parameters. Collective."""
    groups = _model_groups(sharded, optimizer)
    sizes = [len(group["params"]) for group in state["param_groups"]]
    if sizes != [len(names) for names in groups]:
        raise PlanError(f"the optimizer state has {sizes} parameters by group, the model {[len(g) for g in groups]}")
    numbers = [n for group in state["param_groups"] for n in group["params"]]
    number = dict(zip((name for names in groups for name in names), numbers, strict=True))
    names, own = _own_names(sharded, optimizer), optimizer.state_dict()["param_groups"]
    found = {i: state["state"][number[name]] for i, name in enumerate(names) if number[name] in state["state"]}
    options = [{**group, "params": mine["params"]} for group, mine in zip(state["param_groups"], own, strict=True)]
    return {**state, "state": found, "param_groups": options}


def _meta_entry(x: Any) -> Any:
    """A meta tensor for a tensor; anything else unchanged."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x


def _own_names(sharded: PipelinedModule, optimizer: torch.optim.Optimizer) -> list[str]:
    """Original names of the parameters in this rank's optimizer, in order."""
    return [name for names in _own_groups(sharded, optimizer) for name in names]


def _own_groups(sharded: PipelinedModule, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    known = {id(p): name for name, p in sharded.named_parameters()}
    return [[known[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _model_groups(sharded: PipelinedModule, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Per parameter group the names of all ranks, in model order. Collective."""
    order = {name: n for n, name in enumerate(sharded.all_stages_names())}
    every = sharded.gathered(_own_groups(sharded, optimizer))
    return [
        sorted({name for group in groups for name in group}, key=order.__getitem__)
        for groups in zip(*every, strict=True)
    ]


@collective_method
def full_optimizer_state_dict(sharded: ShardedModule, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The unsharded model's optimizer state dict: full tensors on the CPU. Collective.

    Save it with ``torch.save`` on one rank; load it by :func:`load_full_optimizer_state_dict`.
    """
    if isinstance(sharded, PipelinedModule):
        return full_optimizer_state(sharded, optimizer)
    return pytree.tree_map_only(Tensor, lambda x: sharded._full(x.detach()).cpu(), optimizer.state_dict())


def load_full_optimizer_state_dict(
    sharded: ShardedModule, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Load a full optimizer state dict; every rank keeps its shards.

    Raises :class:`PlanError` if it is not an optimizer state, or has other parameters. Each tensor
    must be a scalar or have its parameter's shape, unless :func:`autoshard.whole` steps the optimizer.
    """
    held, groups = (state.get(k) if isinstance(state, Mapping) else None for k in ("state", "param_groups"))
    if not (_holds_mappings(held, Mapping) and _holds_mappings(groups, list)):
        raise PlanError("not the state of an optimizer: it needs mappings in 'state' and a list in 'param_groups'")
    if isinstance(sharded, PipelinedModule):
        state = local_optimizer_state(sharded, optimizer, state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    theirs, ours = ([len(g.get("params", ())) for g in gs] for gs in (state["param_groups"], optimizer.param_groups))
    if theirs != ours:
        raise PlanError(
            f"the optimizer state has {theirs} parameters per group, the optimizer has "
            f"{ours}. Make the optimizer with the same groups"
        )
    entries = ((p, state["state"].get(number, {})) for number, p in enumerate(parameters))
    for parameter, entry in () if getattr(optimizer, "steps_whole", False) else entries:
        for key, value in entry.items():
            if not (isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.ndim):
                continue
            if value.shape != parameter.shape and not all(p.is_replicate() for p in parameter.placements):
                raise PlanError(
                    f"optimizer state {key!r} has shape {list(value.shape)}, but its parameter "
                    f"has {list(parameter.shape)}, so its sharding is not known. Save and load "
                    "it with torch.distributed.checkpoint."
                )
    optimizer.load_state_dict(dict(state))


def _holds_mappings(found: Any, kind: type) -> bool:
    """Whether ``found`` is a ``kind`` whose values are mappings."""
    values = found.values() if isinstance(found, Mapping) else found
    return isinstance(found, kind) and all(isinstance(x, Mapping) for x in values)


def full_state(model: nn.Module, kept: bool) -> dict[str, Tensor]:
    """State dict of ``model``, of its sharded modules with full tensors on the CPU, tied ones once; empty unless
    ``kept``. Collective."""
    found: dict[str, Tensor] = OrderedDict(model.state_dict())
    for path, sharded in model.named_modules():
        if isinstance(sharded, ShardedModule):
            prefix = f"{path}." if path else ""
            for name in [name for name in found if name.startswith(prefix)]:  # those of all stages follow
                del found[name]
            found |= {prefix + n: x for n, x in sharded._cpu_state_dict(kept).items()}
    return found if kept else OrderedDict()


class FullOptimizer:
    """``optimizer`` for frameworks that save and load it: its state dict is the unsharded model's."""

    def __init__(self, optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> None:
        """``models``: those that may be sharded modules that the optimizer steps."""
        self.optimizer = optimizer
        sharded = [m for m in models if isinstance(m, ShardedModule)]
        self.sharded = trained_module(optimizer, sharded)
        """the sharded module that it steps; None: another model"""
        if len(sharded) == 1 and sharded[0].is_staged and not any(g["params"] for g in optimizer.param_groups):
            self.sharded = sharded[0]  # all its parameters are other stages'

    def state_dict(self) -> dict[str, Any]:
        """See :func:`full_optimizer_state_dict`."""
        own = self.optimizer
        return own.state_dict() if self.sharded is None else full_optimizer_state_dict(self.sharded, own)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :func:`load_full_optimizer_state_dict`."""
        if self.sharded is None:
            self.optimizer.load_state_dict(dict(state))
        else:
            load_full_optimizer_state_dict(self.sharded, self.optimizer, state)

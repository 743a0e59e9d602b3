"""The tensors of a sharded module and of its optimizer: who holds them, and this rank's shards."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from autoshard.errors import PlanError
from autoshard.layout import Layout
from autoshard.module.dtensors.module_dtensor import local_shard
from autoshard.module.dtensors.table_wise import as_dtensor
from autoshard.module.in_process import InProcessModule
from autoshard.module.model.submodules import state_dict_entries
from autoshard.module.programs.pipeline import stage_ranks
from autoshard.module.ranks.distributed import DistributedModule
from autoshard.module.ranks.pipelined import PipelinedModule
from autoshard.module.sharded_module import ShardedModule
from autoshard.transfers.holdings import Held, Holdings, Replica
from autoshard.transfers.names import STATE_SEPARATOR


@dataclass(frozen=True)
class ModuleState:
    """One side of a transfer, on this rank."""

    module: ShardedModule
    optimizer: torch.optim.Optimizer | None
    held: Holdings
    """also tensors of other stages; the optimizer's as ``name|key``"""
    local: dict[str, torch.Tensor]
    """this rank's shards, without autograd; in one process full tensors"""
    numbers: dict[str, Any] = field(default_factory=dict)
    """the optimizer's state that is no tensor of its parameter's shape, such as the step"""

    rank: int | None = None
    """of this process in the world in which it was kept; see :func:`keep`"""

    @staticmethod
    def of(module: Any, optimizer: torch.optim.Optimizer | None = None) -> ModuleState:
        """Raises :class:`PlanError` for modules that are not compiled, and optimizers of others."""
        if isinstance(module, ModuleState):
            return module
        if not isinstance(module, ShardedModule):
            raise PlanError(
                f"autoshard.transfer takes results of autoshard.compile, got {type(module).__name__}. "
                "Under torch.distributed a rank without the module passes None"
            )
        own = module.state_dict(keep_vars=True)
        held = _module_holdings(module)
        found = ModuleState(module, optimizer, held, {n: local_shard(t.detach()) for n, t in own.items()})
        return found if optimizer is None else found._with_optimizer()

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """State-dict name → this rank's parameter, which an optimizer may update."""
        own = self.module.state_dict(keep_vars=True)
        return {n: t for n, t in own.items() if isinstance(t, torch.nn.Parameter)}

    def _with_optimizer(self) -> ModuleState:
        assert self.optimizer is not None
        getattr(self.optimizer, "collect_states", lambda: None)()
        names: dict[int, str] = {}
        for name, p in self.parameters.items():
            names.setdefault(id(p), name)
        held, local, numbers = dict(self.held), dict(self.local), dict[str, Any]()
        for p, state in self.optimizer.state.items():
            if id(p) not in names:
                raise PlanError("the optimizer has parameters that are not the module's: give the one that trains it")
            name = names[id(p)]
            for key, value in state.items():
                full = f"{name}{STATE_SEPARATOR}{key}"
                if isinstance(value, torch.Tensor) and value.ndim and value.shape == p.shape:
                    held[full] = replace(held[name], dtype=value.dtype)
                    local[full] = local_shard(value.detach())
                elif isinstance(value, torch.Tensor) and value.numel() > 1:
                    raise PlanError(
                        f"optimizer state {key!r} of {name!r} has shape {list(value.shape)}, not its parameter's "
                        f"{list(p.shape)}: its layout is not known. Transfer the weights without optimizer="
                    )
                else:
                    numbers[full] = value.detach().cpu() if isinstance(value, torch.Tensor) else value
        return replace(self, held=held, local=local, numbers=numbers)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Options of the optimizer's parameter groups."""
        groups = () if self.optimizer is None else self.optimizer.param_groups
        return [{k: v for k, v in group.items() if k != "params"} for group in groups]

    def number(self) -> int:
        """32-bit hash of who holds what, equal for equal states in every process."""
        known: dict[int, int] = {}
        rows = [
            (n, h.shape, str(h.dtype), [known.setdefault(id(r), len(known)) for r in h.replicas])
            for n, h in self.held.items()
        ]
        kinds = {id(r): (r.ranks, r.layout.mesh.shape, str(r.layout)) for h in self.held.values() for r in h.replicas}
        return zlib.crc32(repr((rows, list(kinds.values()))).encode())

    def targets(self, want: Holdings, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The tensors that new values are written into; missing states are made here."""
        found = {}
        for name in names:
            like = self.local.get(name)
            if like is None and (parameter := self.local.get(name.partition(STATE_SEPARATOR)[0])) is not None:
                like = torch.empty_like(parameter, dtype=want[name].dtype)
            if like is not None:
                found[name] = like
        return found

    @torch.no_grad()
    def switch(self, written: Mapping[str, torch.Tensor], numbers: Mapping[str, Any], groups: Sequence[Any]) -> None:
        """Tell the module and its optimizer that :meth:`targets` have new values."""
        own, parameters = self.module.state_dict(keep_vars=True), self.parameters
        for full, value in written.items():
            name, _, key = full.partition(STATE_SEPARATOR)
            if not key:
                torch.autograd.graph.increment_version(own[name])  # a backward of older values refuses
            elif full not in self.local:
                self._set_state(parameters[name], key, self.wrapped(name, value))
        for full, value in numbers.items():
            name, _, key = full.partition(STATE_SEPARATOR)
            if name in parameters:
                self._set_state(parameters[name], key, value)
        if self.optimizer is not None:
            for group, options in zip(self.optimizer.param_groups, groups, strict=True):
                group.update(options)

    def wrapped(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """This rank's shard ``value`` of a state of parameter ``name``, as optimizers hold it."""
        if not isinstance(self.module, DistributedModule):
            return value
        replica = next(r for r in self.held[name].replicas if self.module._comm.ranks == r.ranks)
        return as_dtensor(value, self.module.device_mesh, replica.layout, self.held[name].shape)

    def _set_state(self, p: torch.Tensor, key: str, value: Any) -> None:
        assert self.optimizer is not None
        state, old = self.optimizer.state[p], self.optimizer.state[p].get(key)
        if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor) and old.shape == value.shape:
            local_shard(old).copy_(local_shard(value))
        else:
            fused = any(group.get("fused") or group.get("capturable") for group in self.optimizer.param_groups)
            scalar = isinstance(value, torch.Tensor) and not value.ndim
            state[key] = value.to(p.device if fused else "cpu", copy=True) if scalar else value


def keep(sharded: ShardedModule, optimizer: torch.optim.Optimizer | None = None) -> ModuleState:
    """Weights and optimizer state on this rank, as the source of a transfer in a new world. No copy, no messages.

    If a rank dies, the others call it, leave torch.distributed, initialise it again without the dead
    rank, compile on the smaller mesh, and call ``autoshard.transfer(kept, new, optimizer=(None, …))``.
    A new rank passes None. :class:`PlanError` there if a shard was on dead ranks only.
    """
    if not dist.is_initialized():
        raise PlanError("autoshard.keep is for ranks of torch.distributed: call it before destroy_process_group()")
    return replace(ModuleState.of(sharded, optimizer), rank=dist.get_rank())


def _module_holdings(module: ShardedModule) -> dict[str, Held]:
    """Entries of the model's state dict, of all stages, and their holders; ties are one object."""
    executable = module._latest_executable()
    ranks = _stages_of(module)
    first = {alias: i.fqn for i in executable.graph.inputs for alias in i.aliases}
    layouts, homes = module._parameter_layouts or {}, module._stage_homes or {}
    replicas: dict[tuple[Layout, int], Replica] = {}
    found: dict[str, Held] = {}
    tied: dict[int | str, Held] = {}
    whole, plain = module.all_stages_state_dict(), Layout(module._program_mesh)
    for key, (name, _) in state_dict_entries(module._original_model.model).items():
        own, tensor = first.get(name, name), id(whole[key])
        if (known := tied.get(tensor, tied.get(own))) is not None:
            found[key] = known
            continue
        layout = layouts.get(own, layouts.get(name, plain))
        stages = dict.fromkeys(stage % len(ranks) for stage in homes.get(own, homes.get(name, (0,))))
        made = [replicas.setdefault((layout, s), Replica(layout, tuple(ranks[s]))) for s in stages]
        found[key] = tied[tensor] = tied[own] = Held(tuple(whole[key].shape), whole[key].dtype, tuple(made))
    return found


def _stages_of(module: ShardedModule) -> list[list[int]]:
    """Per stage along the pipeline axis the global ranks of its mesh."""
    if isinstance(module, PipelinedModule):
        return module._by_stage
    if isinstance(module, DistributedModule):
        return [module.device_mesh.mesh.flatten().tolist()]
    return stage_ranks(module._latest_executable())


def in_one_process(*states: ModuleState | None) -> bool:
    """Whether all modules' ranks are simulated here; :class:`PlanError` for a mixture."""
    kinds = {isinstance(s.module, InProcessModule) for s in states if s is not None}
    if len(kinds) > 1:
        raise PlanError(
            "one module simulates its ranks in this process, the other runs under torch.distributed: "
            "compile both after torch.distributed is initialised, or both without it"
        )
    return True in kinds


def merged(descriptions: Iterable[Holdings]) -> dict[str, Held]:
    """What ranks describe, together: modules on several groups of ranks are replicas of one. Raises
    :class:`PlanError` for tensors of different shapes or dtypes."""
    found: dict[str, Held] = {}
    joined: dict[tuple[int, int], Held] = {}
    for described in descriptions:
        for name, held in described.items():
            before = found.setdefault(name, held)
            if before is held or (id(before), id(held)) in joined:  # tied tensors stay one object
                found[name] = joined.get((id(before), id(held)), held)
                continue
            if (before.shape, before.dtype) != (held.shape, held.dtype):
                raise PlanError(f"ranks hold {name!r} as {before.shape}, {before.dtype} and {held.shape}, {held.dtype}")
            known = {r.ranks for r in before.replicas}
            more = tuple(r for r in held.replicas if r.ranks not in known)
            found[name] = joined[id(before), id(held)] = replace(before, replicas=before.replicas + more)
    return found

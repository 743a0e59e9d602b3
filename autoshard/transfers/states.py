"""The tensors of a sharded module and of its optimizer: who holds them, and this rank's shards."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

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
from autoshard.transfers.holdings import Held, Holdings, Link, Replica
from autoshard.transfers.schedule import whole_link

Names = Callable[[str], str | None] | Mapping[Any, Any] | None
"""source name → target name, or a table; see :func:`autoshard.transfer`"""

STATE_SEPARATOR = "|"
"""between a parameter's name and the key of its optimizer state"""


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

    @staticmethod
    def of(module: Any, optimizer: torch.optim.Optimizer | None = None) -> ModuleState:
        """Raises :class:`PlanError` for modules that are not compiled, and optimizers of others."""
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
        """The tensors that new values are written into; states that the optimizer lacks are made here."""
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
                self._set_state(parameters[name], key, self._wrapped(name, value))
        for full, value in numbers.items():
            name, _, key = full.partition(STATE_SEPARATOR)
            if name in parameters:
                self._set_state(parameters[name], key, value)
        if self.optimizer is not None:
            for group, options in zip(self.optimizer.param_groups, groups, strict=True):
                group.update(options)

    def _wrapped(self, name: str, value: torch.Tensor) -> torch.Tensor:
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


def _module_holdings(module: ShardedModule) -> dict[str, Held]:
    """Entries of the model's state dict, of all stages, and who holds them."""
    executable = module._latest_executable()
    ranks = _stages_of(module)
    first = {alias: i.fqn for i in executable.graph.inputs for alias in i.aliases}
    layouts, homes = module._parameter_layouts or {}, module._stage_homes or {}
    replicas: dict[tuple[Layout, int], Replica] = {}
    found = {}
    whole, plain = module.all_stages_state_dict(), Layout(module._program_mesh)
    for key, (name, _) in state_dict_entries(module._original_model.model).items():
        own = first.get(name, name)
        layout = layouts.get(own, layouts.get(name, plain))
        stages = dict.fromkeys(stage % len(ranks) for stage in homes.get(own, homes.get(name, (0,))))
        made = [replicas.setdefault((layout, s), Replica(layout, tuple(ranks[s]))) for s in stages]
        found[key] = Held(tuple(whole[key].shape), whole[key].dtype, tuple(made))
    return found


def _stages_of(module: ShardedModule) -> list[list[int]]:
    """Per stage along the pipeline axis the global ranks of its mesh."""
    if isinstance(module, PipelinedModule):
        return module._by_stage
    if isinstance(module, DistributedModule):
        return [module.device_mesh.mesh.flatten().tolist()]
    return stage_ranks(module._latest_executable())


def in_one_process(*states: ModuleState | None) -> bool:
    """Whether the ranks of all modules are simulated here. Raises :class:`PlanError` for a mixture."""
    kinds = {isinstance(s.module, InProcessModule) for s in states if s is not None}
    if len(kinds) > 1:
        raise PlanError(
            "one module simulates its ranks in this process, the other runs under torch.distributed: "
            "compile both after torch.distributed is initialised, or both without it"
        )
    return True in kinds


def merged(descriptions: Iterable[Holdings]) -> dict[str, Held]:
    """What ranks describe, together: modules on several groups of ranks are replicas of one.

    Raises :class:`PlanError` for tensors of different shapes or dtypes.
    """
    found: dict[str, Held] = {}
    for described in descriptions:
        for name, held in described.items():
            before = found.setdefault(name, held)
            if before is held:
                continue
            if (before.shape, before.dtype) != (held.shape, held.dtype):
                raise PlanError(f"ranks hold {name!r} as {before.shape}, {before.dtype} and {held.shape}, {held.dtype}")
            known = {r.ranks for r in before.replicas}
            more = tuple(r for r in held.replicas if r.ranks not in known)
            if more:
                found[name] = replace(before, replicas=before.replicas + more)
    return found


def links_of(have: Holdings, want: dict[str, Held], names: Names, trained: bool) -> list[Link]:
    """The links of all target tensors; adds optimizer states of the source to ``want``, if ``trained``.

    Raises :class:`PlanError` for targets without a source, sources that are not there, and other shapes.
    """
    weights = [name for name in have if STATE_SEPARATOR not in name]
    links = [
        *_named_links({n: have[n] for n in weights}, {n: h for n, h in want.items() if STATE_SEPARATOR not in n}, names)
    ]
    lacking = sorted({n for n in want if STATE_SEPARATOR not in n} - {link.target for link in links})
    if lacking:
        raise PlanError(
            f"the source of the transfer lacks {len(lacking)} tensors of the target: {lacking[:5]}. Map the names "
            "with names=, a function from source to target names or a table {target: source}"
        )
    states = [name.split(STATE_SEPARATOR) for name in have if STATE_SEPARATOR in name]
    keys: dict[str, list[str]] = {}
    for name, key in states if trained else ():
        keys.setdefault(name, []).append(key)
    more = []
    for link in links:
        for key in keys.get(link.source, ()):
            source, target = (f"{n}{STATE_SEPARATOR}{key}" for n in link[:2])
            want.setdefault(target, replace(want[link.target], dtype=have[source].dtype))
            more.append(link._replace(source=source, target=target))
    return links + more


def _named_links(have: Holdings, want: Holdings, names: Names) -> Iterator[Link]:
    if callable(names):
        by_target = {target: name for name in have if (target := names(name)) is not None}
        yield from (whole_link(by_target[n], n, have[by_target[n]], h) for n, h in want.items() if n in by_target)
        return
    table = dict(names or {})
    inside = {n: key for key in table if isinstance(key, tuple) for n in key}
    unknown = [n for n in (*(k for k in table if not isinstance(k, tuple)), *inside) if n not in want]
    for name in (n for value in table.values() for n in ([value] if isinstance(value, str) else value)):
        if name not in have:
            raise PlanError(
                f"names= gives {name!r} as a source, but the source has no such tensor: {_near(name, have)}"
            )
    if unknown:
        raise PlanError(
            f"names= gives {unknown[0]!r} as a target, but the target has no such tensor: {_near(unknown[0], want)}"
        )
    for name, held in want.items():
        if name in inside:
            parts = inside[name]
            sizes = [want[n].shape[0] for n in parts]
            yield _part_link(table[parts], name, have, held, sum(sizes[: parts.index(name)]), sum(sizes), joins=False)
        elif isinstance(of := table.get(name, name), str):
            if of in have:
                yield whole_link(of, name, have[of], held)
        else:
            sizes = [have[n].shape[0] for n in of]
            for at, part in enumerate(of):
                yield _part_link(part, name, have, held, sum(sizes[:at]), sum(sizes), joins=True)


def _part_link(source: str, target: str, have: Holdings, held: Held, at: int, total: int, joins: bool) -> Link:
    """A link of rows from ``at``, of the target (which ``joins`` sources) or of the source."""
    fused, part = (held.shape, have[source].shape) if joins else (have[source].shape, held.shape)
    if fused != (total, *part[1:]):
        raise PlanError(
            f"names= joins parts of {total} rows and shape {list(part)} along dim 0, but the fused tensor "
            f"({target!r} from {source!r}) has shape {list(fused)}"
        )
    zeros = (0,) * len(part)
    starts = (zeros, (at, *zeros[1:])) if joins else ((at, *zeros[1:]), zeros)
    return Link(source, target, *starts, part)


def _near(name: str, known: Iterable[str]) -> str:
    """Names of ``known`` that may be meant, for messages."""
    last = name.rsplit(".", 1)[-1]
    found = sorted(n for n in known if n.endswith(last)) or sorted(known)
    return f"there are {', '.join(found[:3])}" + (", …" if len(found) > 3 else "")

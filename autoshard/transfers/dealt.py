"""Optimizers of full matrices, dealt to ranks: gather a matrix, update it, scatter it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoshard.errors import AutoshardError, RuntimeMismatchError
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.module.dtensors.module_dtensor import local_shard
from autoshard.module.optimizers import NOT_SUMMED
from autoshard.module.sharded_module import ShardedModule
from autoshard.passes.ir.memory import orthogonalization_flops
from autoshard.runtime.transport.groups import once_per_initialisation
from autoshard.transfers.holdings import Held, Replica
from autoshard.transfers.messages import Exchange, RankMessages
from autoshard.transfers.names import STATE_SEPARATOR, whole_link
from autoshard.transfers.running import BUFFER, TransferWorld, as_text, from_text
from autoshard.transfers.schedule import make_schedule
from autoshard.transfers.states import ModuleState

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)
_GRADIENT = "gradient of the parameter"


def dealt(optimizer: OptimizerT, sharded: ShardedModule) -> OptimizerT:
    """``optimizer``, which updates each full parameter of ``sharded`` on one rank; returns it.

    For optimizers that need full matrices and update each parameter alone, such as Muon. A rank gathers
    parameter and gradient of its share, keeps their state, and scatters the new values. ``state_dict()``
    brings states into the layout of their parameters; it is collective, and so are steps. A closure is
    called once. ``optimizer`` is unchanged in one process. Raises :class:`AutoshardError` for pipeline
    stages and for a module on some ranks only.
    """
    if isinstance(next(sharded.parameters(), None), DTensor) and not hasattr(optimizer, "collect_states"):
        if hasattr(optimizer, "alone_on_host"):
            raise AutoshardError("the states of this optimizer are offloaded: autoshard.dealt cannot move them")
        deal = _Deal(optimizer, sharded)
        of: Any = optimizer
        of.step = MethodType(lambda _, closure=None: deal.step(closure), optimizer)  # schedulers rebind it
        of.collect_states, of.steps_whole, of.__reduce_ex__ = deal.collect, True, _not_copied
        optimizer.register_state_dict_pre_hook(lambda _: deal.collect())
        optimizer.register_load_state_dict_post_hook(lambda _: deal.loaded())
    return optimizer


def _not_copied(_: int) -> Any:
    raise AutoshardError(
        "an optimizer of autoshard.dealt cannot be copied or pickled: its ranks hold other states. Make it again, "
        "and load autoshard.full_optimizer_state_dict(sharded, optimizer)"
    )


def owners_of(shapes: Mapping[str, tuple[int, ...]], ranks: int) -> dict[str, int]:
    """Name → rank that updates it: the dearest first, each to the rank with the least to do."""
    work = {n: max(math.prod(shape), orthogonalization_flops(shape)) for n, shape in shapes.items()}
    found, load = dict[str, int](), [0.0] * ranks
    for name in sorted(work, key=lambda n: (-work[n], n)):
        found[name] = min(range(ranks), key=lambda r: load[r])
        load[found[name]] += work[name]
    return found


def _is_shard(x: Any, p: Tensor) -> bool:
    return isinstance(x, DTensor) and x.shape == p.shape


class _Deal:
    """The parameters of an optimizer, each with its owner."""

    def __init__(self, optimizer: torch.optim.Optimizer, sharded: ShardedModule) -> None:
        self.optimizer, self.own, self.rank = optimizer, optimizer.step, dist.get_rank()
        self.state, trained = ModuleState.of(sharded), {id(p) for g in optimizer.param_groups for p in g["params"]}
        first = {id(p): name for name, p in reversed(self.state.parameters.items()) if id(p) in trained}
        self.parameters: dict[str, Any] = {name: self.state.parameters[name] for name in sorted(first.values())}
        ranks = {tuple(sorted(r.ranks)) for name in self.parameters for r in self.state.held[name].replicas}
        if sharded.is_staged or ranks != {tuple(range(dist.get_world_size()))}:
            raise AutoshardError("matrices are dealt to all ranks: compile the module on all of them, without stages")
        self.owners = owners_of({n: tuple(p.shape) for n, p in self.parameters.items()}, dist.get_world_size())
        self.apart = False
        """whether states are on owners, in full"""
        self._messages: dict[Any, RankMessages] = {}
        self.world = once_per_initialisation("transfers", TransferWorld)

    def loaded(self) -> None:
        """States are as parameters are: a state dict was loaded."""
        self.apart = False

    def _move(
        self, source: dict[str, Tensor], target: dict[str, Tensor], dtypes: Mapping[str, Any], gather: bool
    ) -> None:
        """Gather shards on the owners, or scatter them. ``dtypes``: of each ``name`` or ``name|state``, on all ranks."""

        def messages() -> RankMessages:
            one, parts, owned = Layout(Mesh({"owner": 1})), dict[str, Held](), dict[str, Held]()
            for full, dtype in dtypes.items():
                name = full.partition(STATE_SEPARATOR)[0]
                parts[full] = replace(self.state.held[name], dtype=dtype)
                owned[full] = replace(parts[full], replicas=(Replica(one, (self.owners[name],)),))
            have, want = (parts, owned) if gather else (owned, parts)
            links = [whole_link(n, n, have[n], want[n]) for n in dtypes]
            return RankMessages.of(make_schedule(have, want, links, self.state.module.mesh.hardware), self.rank, BUFFER)

        key = gather, tuple(dtypes.items())
        if key not in self._messages:
            self._messages[key] = messages()
        device = next(iter(self.state.local.values())).device
        exchange = Exchange(self.world.weights, self.world.notes, device)
        self._messages[key].write(source, exchange.run(self._messages[key], source), target)

    def _is_mine(self, full: str) -> bool:
        return self.owners[full.partition(STATE_SEPARATOR)[0]] == self.rank

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        known = {id(p) for p in self.state.parameters.values()} - {id(p) for p in self.parameters.values()}
        if any(id(p) in known for group in self.optimizer.param_groups for p in group["params"]):
            raise AutoshardError("a parameter was added after autoshard.dealt: call it when all are in the optimizer")
        with self.world.meeting("a step of dealt matrices"):
            trained = {name: p for name, p in self.parameters.items() if p.grad is not None}
            shards: dict[str, Any] = {}
            for name, p in trained.items():
                if any(x.is_partial() for x in p.grad.placements):
                    raise RuntimeMismatchError(NOT_SUMMED)
                states = self.optimizer.state.get(p, {})  # shards only where they were collected or loaded
                found = {_GRADIENT: p.grad, **{k: x for k, x in states.items() if _is_shard(x, p)}}
                shards |= {name: p, **{f"{name}{STATE_SEPARATOR}{k}": x for k, x in found.items()}}
            full = {
                n: torch.empty(x.shape, dtype=x.dtype, device=x.device) for n, x in shards.items() if self._is_mine(n)
            }
            dtypes = {n: x.dtype for n, x in shards.items()}
            self._move({n: local_shard(x.detach()) for n, x in shards.items()}, full, dtypes, gather=True)
            self._step_own(trained, full)
            dtypes = {n: p.dtype for n, p in trained.items()}
            self._move(full, {n: local_shard(p.detach()) for n, p in trained.items()}, dtypes, gather=False)
            torch.autograd.graph.increment_version(list(trained.values()))
        self.apart = True
        return loss

    def _step_own(self, trained: Mapping[str, Any], full: dict[str, Tensor]) -> None:
        """Step this rank's matrices, which are ``full``, and drop states of the others."""
        state, plain = self.optimizer.state, dict[Any, nn.Parameter]()
        for name, p in trained.items():
            held = state.pop(p, {})
            if self._is_mine(name):
                plain[p] = nn.Parameter(full[name], p.requires_grad)
                plain[p].grad = full[f"{name}{STATE_SEPARATOR}{_GRADIENT}"]
                if held:
                    keys = {k: f"{name}{STATE_SEPARATOR}{k}" for k in held}
                    state[plain[p]] = {
                        k: full[n] if (n := keys[k]) in full else local_shard(x) for k, x in held.items()
                    }
        groups = [(group["params"], [*group["params"]]) for group in self.optimizer.param_groups]
        others = {id(p) for p in trained.values()}
        try:
            for params, before in groups:
                params[:] = [plain.get(p, p) for p in before if p in plain or id(p) not in others]
            self.own()
        finally:
            for params, before in groups:
                params[:] = before
            for p, own in plain.items():
                if own in state:
                    state[p] = state.pop(own)

    @torch.no_grad()
    def collect(self) -> None:
        """Bring states into the layout of their parameters; those of another shape are on all ranks. Collective."""
        if not self.apart:
            return
        with self.world.meeting("the states of dealt matrices"):
            own, source = dict[str, Any](), dict[str, Tensor]()
            for name, p in self.parameters.items():
                if any(_is_shard(x, p) for x in self.optimizer.state.get(p, {}).values()):
                    continue  # no step since they were collected
                for key, x in self.optimizer.state.pop(p, {}).items():
                    of_shape = isinstance(x, Tensor) and x.ndim and x.shape == p.shape
                    own[f"{name}{STATE_SEPARATOR}{key}"] = of_shape, x.dtype if of_shape else x
                    if of_shape:
                        source[f"{name}{STATE_SEPARATOR}{key}"] = x
            found = {n: x for text in self.world.agreement.texts(as_text(own)) for n, x in from_text(text).items()}
            dtypes = {n: x for n, (of_shape, x) in sorted(found.items()) if of_shape}
            local, name_of = self.state.local, {n: n.partition(STATE_SEPARATOR)[0] for n in found}
            target = {n: torch.empty_like(local[name_of[n]], dtype=dtype) for n, dtype in dtypes.items()}
            self._move(source, target, dtypes, gather=False)
            for n, (of_shape, x) in sorted(found.items()):
                name, _, key = n.partition(STATE_SEPARATOR)
                self.optimizer.state[self.parameters[name]][key] = (
                    self.state.wrapped(name, target[n]) if of_shape else x
                )
        self.apart = False

"""Strategies of Lightning for sharded modules; needs the package lightning."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy
import torch
import torch.distributed as dist
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.fabric.wrappers import _FabricOptimizer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from autoshard.errors import AutoshardError
from autoshard.module.checkpoints import FullOptimizer, full_state
from autoshard.module.inputs import batch_part
from autoshard.module.optimizers import clip_grad_norm_
from autoshard.module.ranks.distributed import DistributedModule


class _Ranks:
    """What both strategies do: ranks share a batch or have parts; states are unsharded."""

    _part = (0, 1)
    """(number of this rank's part of the batch, number of parts)"""

    def _follow(self, module: nn.Module) -> None:
        """Check ``module``, and make what is not sharded, and generators, those of rank 0. Raises
        :class:`AutoshardError` before anything is changed. Collective."""
        world = dist.get_world_size()
        sharded = _sharded_in(module)
        if world == 1:
            return
        if not sharded or any(m.mesh.size != world for m in sharded.values()):
            raise AutoshardError(
                f"{type(self).__name__} needs a module that autoshard.compile made for all {world} processes, after "
                "they were connected: compile in configure_model(), or after fabric.launch()"
            )
        parts = {batch_part(m) for m in sharded.values()}
        if len(parts) > 1:
            raise AutoshardError("the sharded modules take other parts of the batch. Compile all with the same inputs=")
        beside = _tensors_beside(module, sharded)
        trained = [n for n, x in beside.items() if x.requires_grad]
        (self._part,) = parts
        if trained and self._part[1] > 1:
            raise AutoshardError(
                f"{trained[0]!r} is not in the sharded module, and nobody sums its gradient over ranks"
            )
        for x in beside.values():
            dist.broadcast(x.detach(), 0)
        draws = [(torch.get_rng_state(), random.getstate(), numpy.random.get_state())]
        dist.broadcast_object_list(draws, 0)
        torch.set_rng_state(draws[0][0])
        random.setstate(draws[0][1])
        numpy.random.set_state(draws[0][2])

    def _reduced(self, tensor: Any, operation: Any, reduce: Any) -> Any:
        """``reduce()`` over the parts of the batch: ranks that share one count once."""
        if self._part[1] == 1 and dist.get_world_size() > 1:
            return tensor
        made, shared = reduce(), dist.get_world_size() // self._part[1]
        return made / shared if shared > 1 and str(operation).lower().endswith("sum") else made

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """One row per part of the batch; the tensor itself if ranks share the batch."""
        parts = self._part[1]
        if parts == 1 and dist.get_world_size() > 1:
            return tensor
        if parts < dist.get_world_size():
            raise AutoshardError("all_gather of parts that several ranks share is not known. Use dist.all_gather")
        return super().all_gather(tensor, group, sync_grads)  # type: ignore[misc]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002
        """Whether all ranks, or any, decide so."""
        votes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(votes, bool(decision))
        return sum(votes) == len(votes) if all else any(votes)


class AutoshardStrategy(_Ranks, DDPStrategy):  # type: ignore[misc]
    """Strategy of Lightning's ``Trainer`` for a LightningModule with a module of :func:`autoshard.compile`.

    Compile in ``configure_model()``, when the processes are connected. All ranks get the same batches, or
    their part with ``inputs="local"``. A checkpoint is one file of the unsharded model: it resumes on any mesh.
    """

    strategy_name = "autoshard"

    def setup(self, trainer: Any) -> None:
        """See Lightning's ``Strategy.setup``. Collective."""
        self._follow(self.lightning_module)
        if self._part[1] == 1:  # one device's own samplers, whose generators are alike on all ranks
            trainer._accelerator_connector.use_distributed_sampler = False
            for module in self.lightning_module.modules():
                if hasattr(module, "distributed_available_fn"):  # a metric of torchmetrics has all rows
                    module.distributed_available_fn = lambda: False
        clip = self.precision_plugin.clip_grad_by_norm
        self.precision_plugin.clip_grad_by_norm = lambda optimizer, norm: _clip(
            self.lightning_module, optimizer, norm, lambda: clip(optimizer, norm)
        )
        super(DDPStrategy, self).setup(trainer)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return model

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Options of the ``DistributedSampler`` that Lightning makes."""
        return {"num_replicas": self._part[1], "rank": self._part[0]}

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """See Lightning's ``Strategy.reduce``; global already if ranks share the batch."""
        return self._reduced(tensor, reduce_op, lambda: super(AutoshardStrategy, self).reduce(tensor, group, reduce_op))

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Inside, backwards accumulate without communication: ``accumulate_grad_batches``."""
        with _no_sync(self.lightning_module):
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Full tensors, on rank 0; empty on others. Collective."""
        return full_state(self.lightning_module, self.is_global_zero)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """State of the unsharded model's optimizer. Collective."""
        return _full(self.lightning_module, optimizer).state_dict()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether weights are loaded into the compiled module."""
        return True

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """See Lightning's ``Strategy``; every rank keeps its shards."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            _full(self.lightning_module, optimizer).load_state_dict(state)


class AutoshardFabricStrategy(_Ranks, FabricDDPStrategy):  # type: ignore[misc]
    """Strategy of Lightning's ``Fabric`` for a module of :func:`autoshard.compile`.

    Compile after ``fabric.launch()``, and set up the module before its data loaders.
    """

    _module: nn.Module | None = None
    _loads = False
    """whether a data loader was set up before a module"""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backward_sync_control = _NoSync()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """See Fabric's ``Strategy.setup_module``; nothing is wrapped. Collective."""
        if self._loads and any(batch_part(m)[1] > 1 for m in _sharded_in(module).values()):
            raise AutoshardError("a data loader was set up before a module of local inputs. Set up the module first")
        self._follow(module)
        self._module = module
        return module

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """Options of Fabric's ``DistributedSampler``; None: the loader's own sampler."""
        self._loads = self._loads or self._module is None
        return None if self._part[1] == 1 else {"num_replicas": self._part[1], "rank": self._part[0]}

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """See Fabric's ``Strategy.all_reduce``; global already if ranks share the batch."""
        return self._reduced(
            tensor, reduce_op, lambda: super(AutoshardFabricStrategy, self).all_reduce(tensor, group, reduce_op)
        )

    def clip_gradients_norm(self, module: nn.Module, optimizer: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        """See Fabric's ``Strategy.clip_gradients_norm``."""
        self.precision.unscale_gradients(optimizer)
        own = super().clip_gradients_norm
        return _clip(
            module, optimizer, max_norm, lambda: own(module, optimizer, max_norm, *args, **kwargs), *args, **kwargs
        )

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Full tensors, on rank 0; empty on others. Collective."""
        return full_state(module, self.is_global_zero)

    def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """State of the unsharded model's optimizer. Collective."""
        return _full(self._module, optimizer).state_dict()


class _NoSync:
    """Fabric's control of gradient accumulation."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Any:
        return _no_sync(module) if enabled else contextlib.nullcontext()


@contextlib.contextmanager
def _no_sync(module: nn.Module) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for sharded in _sharded_in(module).values():
            stack.enter_context(sharded.no_sync())
        yield


def _sharded_in(module: nn.Module | None) -> dict[str, DistributedModule]:
    """Path → sharded module."""
    return {} if module is None else {n: m for n, m in module.named_modules() if isinstance(m, DistributedModule)}


def _tensors_beside(module: nn.Module, sharded: Iterable[str]) -> dict[str, torch.Tensor]:
    """Parameters and buffers of ``module`` that are in none of its ``sharded`` modules."""
    within = tuple(f"{path}." if path else "" for path in sharded)
    every = (*module.named_parameters(), *module.named_buffers())
    return {n: x for n, x in every if not n.startswith(within)}


def _full(module: nn.Module | None, optimizer: Any) -> FullOptimizer:
    """``optimizer``, without its wrapper, with states of the unsharded model."""
    while isinstance(optimizer, LightningOptimizer | _FabricOptimizer):
        optimizer = optimizer.optimizer
    return FullOptimizer(optimizer, () if module is None else module.modules())


def _clip(module: nn.Module, optimizer: Any, norm: float, other: Any, *args: Any, **kwargs: Any) -> Any:
    """Clip by our norm if ``optimizer`` holds the sharded module's parameters and no more, else by ``other()``."""
    of = _full(module, optimizer)
    sharded, groups = of.sharded, of.optimizer.param_groups
    held = {id(p) for group in groups for p in group["params"] if p.grad is not None}
    if sharded is None or held != {id(p) for p in sharded.parameters() if p.grad is not None}:
        return other()
    return clip_grad_norm_(sharded, norm, *args, **kwargs)

"""Optimizers whose states are in host memory between steps."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoshard.errors import AutoshardError
from autoshard.module.dtensors.module_dtensor import dtensor_like, local_shard
from autoshard.module.optimizers import OptimizerT
from autoshard.passes.ir.memory import host_buckets
from autoshard.runtime.parameters.host import HostCopy, to_device, to_host


def offloaded(optimizer: OptimizerT) -> OptimizerT:
    """``optimizer``, whose states are in host memory between steps; returns it.

    A step copies states to the device in buckets of parameters, updates these, and copies the states back,
    while other buckets are under way. Updates are the same. An optimizer that is not of ``torch.optim``, or
    that steps all parameters together (LBFGS), has all its states on the device during its step. A closure
    is called once, unless by those. Call it before schedulers are made. Raises :class:`AutoshardError` if
    ``step`` is replaced already, as by :func:`autoshard.whole`, and for ``differentiable=True``.
    """
    if isinstance(optimizer, _HostStates):
        return optimizer
    if "step" in vars(optimizer) or optimizer.defaults.get("differentiable"):
        why = "its step was replaced already" if "step" in vars(optimizer) else "its steps are differentiable"
        raise AutoshardError(
            f"the states of {type(optimizer).__name__} cannot be offloaded: {why}. Call autoshard.offloaded "
            "as soon as the optimizer is made: before a scheduler is"
        )
    kind: Any = type(optimizer)
    optimizer.__class__ = _offloaded_class(kind)
    _release(_leave([p for group in optimizer.param_groups for p in group["params"]], optimizer), settled=True)
    return optimizer


@functools.cache
def _offloaded_class(kind: Any) -> Any:
    """``kind`` with :class:`_HostStates`; hooks run once per step, not per bucket."""
    step: Any = torch.optim.Optimizer.profile_hook_step(_HostStates.step)
    step.hooked = True
    own: Any = kind.step
    while getattr(own, "hooked", False):
        own = own.__wrapped__
    alone = kind.__module__.startswith("torch.optim.") and not issubclass(kind, torch.optim.LBFGS)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(
        kind.__name__, (_HostStates, kind), {**names, "kind": kind, "own": own, "alone_on_host": alone, "step": step}
    )


def _revived(kind: Any) -> Any:
    made = _offloaded_class(kind)
    return made.__new__(made)


class _HostStates(torch.optim.Optimizer):
    """Steps an optimizer bucket by bucket."""

    kind: Any
    own: Callable[..., Any]
    """``kind.step`` without hooks"""
    alone_on_host: bool
    """whether a step of ``kind`` updates each parameter by itself"""

    def __reduce__(self) -> Any:
        return _revived, (self.kind,), self.__getstate__()

    def step(self, closure: Callable[[], Any] | None = None, **named: Any) -> Any:
        """A step. ``named``: further arguments of an optimizer that is not of ``torch.optim``."""
        every, loss = [p for group in self.param_groups for p in group["params"]], None
        if closure is not None and self.alone_on_host:
            with torch.enable_grad():
                loss = closure()
            closure = None
        buckets = self._buckets([p for p in every if p.grad is not None]) if self.alone_on_host else [every]
        here, coming, going = dict[int, HostCopy](), dict[int, HostCopy](), list[list[HostCopy]]()
        try:
            coming = _fetch(buckets[0], self) if buckets else {}
            for number, bucket in enumerate(buckets):
                here = coming
                while len(going) > 1:
                    _release(going.pop(0))
                coming = _fetch(buckets[number + 1], self) if number + 1 < len(buckets) else {}
                _release(here.values())
                if self.alone_on_host:
                    self._step_of(bucket)
                else:
                    loss = self.own(closure, **named)
                going.append(_leave(bucket, self, here))
                here = {}
        finally:
            for copies in (*going, here.values(), coming.values()):  # an error may leave some under way
                _release(copies, settled=True)
        return loss

    def _buckets(self, trained: Sequence[Any]) -> list[list[Any]]:
        """Parameters in order; the first step, which makes the states, goes by bytes of parameters."""
        sizes = [sum(x.nbytes for x in _moved(p, self)) or local_shard(p.detach()).nbytes for p in trained]
        left = iter(trained)
        return [list(itertools.islice(left, count)) for count in host_buckets(sizes)]

    def _step_of(self, bucket: Sequence[Any]) -> None:
        groups, wanted = self.param_groups, {id(p) for p in bucket}
        before = [group["params"] for group in groups]
        try:
            for group, params in zip(groups, before, strict=True):
                group["params"] = [p for p in params if id(p) in wanted]
            self.param_groups = [group for group in groups if group["params"]]
            self.own()
        finally:
            self.param_groups = groups
            for group, params in zip(groups, before, strict=True):
                group["params"] = params

    def state_dict(self) -> dict[str, Any]:
        """As of the optimizer. Shards of a mesh of accelerators are on their device, for collectives."""

        def there(x: DTensor) -> DTensor:
            local = local_shard(x)
            return x if local.device == x.device else dtensor_like(local.to(x.device), x)

        return pytree.tree_map_only(DTensor, there, super().state_dict())

    def load_state_dict(self, state_dict: Any) -> None:
        """As of the optimizer; the states go to the host."""
        super().load_state_dict(state_dict)
        _release(_leave([p for group in self.param_groups for p in group["params"]], self), settled=True)


def _moved(p: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """The states of a parameter that move: this rank's shards, without scalars."""
    for x in optimizer.state[p].values() if p in optimizer.state else ():
        if isinstance(x, Tensor) and x.ndim:
            yield local_shard(x)


def _fetch(bucket: Sequence[Any], optimizer: torch.optim.Optimizer) -> dict[int, HostCopy]:
    """Begin to bring states to the device; by id of the tensor, whose data they become."""
    found = dict[int, HostCopy]()
    for p in bucket:
        device = local_shard(p.detach()).device
        for x in _moved(p, optimizer):
            if x.device.type == "cpu":
                found[id(x)] = copy = to_device(x.data, device)
                x.data = copy.made
    return found


def _leave(
    bucket: Sequence[Any], optimizer: torch.optim.Optimizer, came: dict[int, HostCopy] | None = None
) -> list[HostCopy]:
    """Begin to bring states to the host. ``came``: what :func:`_fetch` brought, whose memory there is used again."""
    found = []
    for x in (x for p in bucket for x in _moved(p, optimizer)):
        host = came[id(x)].source if came and id(x) in came else None
        fits = host is not None and (host.shape, host.dtype) == (x.shape, x.dtype)
        copy = to_host(x.data, host if fits else None)
        x.data = copy.made
        found.append(copy)
    return found


def _release(copies: Iterable[HostCopy], settled: bool = False) -> None:
    """Have computation wait for the copies; then their sources are free. ``settled``: the host waits, too."""
    for copy in copies:
        copy.wait()
        if settled and copy.done is not None:
            copy.done.synchronize()

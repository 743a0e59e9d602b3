"""Gradients that accumulate over several backward passes: no_sync(). Cases as in state_cases.py."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from state_cases_inputs import BATCH, Tied, executed, is_distributed, real
from state_harness import both, case, close, full, ids, pair, refused, rows, same_gradients, same_state, steps
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import autoshard
from autoshard.errors import RuntimeMismatchError
from autoshard.hardware import Link

LAYOUTS = {
    "ddp": BATCH,
    "fsdp": {**BATCH, "*.weight": autoshard.Shard(0)},
    "mixed": {**BATCH, "up.*": autoshard.Shard(0)},
    "megatron": {"up": "colwise", "down": "rowwise"},
}


def accumulate(module: Any, batches: list[torch.Tensor], outside: int = 1) -> None:
    """Backward passes of all batches, all but the last ``outside`` without a sum."""
    context = module.no_sync if isinstance(module, autoshard.ShardedModule) else contextlib.nullcontext
    inside = batches[: len(batches) - outside]
    with context():
        for batch in inside:
            full(module(batch)[0]).backward()
    for batch in batches[len(inside) :]:
        full(module(batch)[0]).backward()


@case
def accumulation_with_no_sync(mesh: autoshard.Mesh) -> None:
    """As many sums as one backward takes, whatever the layouts; two steps, in which gradients are set to None, or zeroed."""
    batches = [ids(seed=n) for n in range(3)]
    for name, hints in LAYOUTS.items():
        model, sharded = pair(real(mesh), Tied, batches[0], hints=hints)
        optimizers = [torch.optim.AdamW(m.parameters(), 0.01, eps=1e-6) for m in (model, sharded)]
        with executed(sharded) as once:
            accumulate(sharded, batches[:1])
        sharded.zero_grad()
        for step in range(2):
            both(model, sharded, lambda m, s=step: m.zero_grad(set_to_none=s == 0))
            with executed(sharded) as counted:
                for module in (model, sharded):
                    accumulate(module, batches)
            same_gradients(sharded, model)
            if name in ("ddp", "fsdp"):
                assert counted["all_reduce", "backward"] == once["all_reduce", "backward"] > 0, counted
            else:
                assert counted["all_reduce", "backward"] <= 3 * once["all_reduce", "backward"], counted
            assert counted["reduce_scatter", "backward"] == 3 * once["reduce_scatter", "backward"]
            if name == "fsdp":
                assert once["reduce_scatter", "backward"] > 0
            for optimizer in optimizers:
                optimizer.step()
            same_state(sharded, model)
        without = accumulated_without(sharded, batches)
        if name in ("ddp", "fsdp"):
            assert without["all_reduce", "backward"] == 3 * once["all_reduce", "backward"]  # the control


def accumulated_without(sharded: Any, batches: list[torch.Tensor]) -> Counter[tuple[str, str]]:
    sharded.zero_grad()
    with executed(sharded) as found:
        accumulate(sharded, batches, outside=len(batches))
    return found


class Wide(nn.Module):
    """So wide that shards are worth scattering."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.b(self.a(x).relu()).square().mean(),)


@case
def hybrid_sharding_with_no_sync(mesh: autoshard.Mesh) -> None:
    """Gradients of shards are scattered in every backward, and summed over the replicas once, on a mesh of two axes."""
    rows = dict.fromkeys(mesh.axes, autoshard.Shard(0))
    weight = {**dict.fromkeys(mesh.axes, autoshard.Replicate()), mesh.axes[-1]: autoshard.Shard(0)}
    hints = {"*": "replicate", "*.weight": weight, "x": rows, "a": rows, "b": rows}
    batches = [torch.randn(2048, 256, generator=torch.Generator().manual_seed(n)).double() for n in range(3)]
    usual = real(mesh).hardware
    quick = replace(usual, node=Link(1e-9, usual.node.bandwidth))  # bytes count, and not how many messages they are in
    model, sharded = pair(real(mesh, quick), Wide, batches[0], hints=hints)
    with executed(sharded) as once:
        accumulate(sharded, batches[:1])
    sharded.zero_grad()
    for _ in range(2):
        both(model, sharded, lambda m: m.zero_grad())
        with executed(sharded) as counted:
            for module in (model, sharded):
                accumulate(module, batches)
        same_gradients(sharded, model)
        assert counted["reduce_scatter", "backward"] == 3 * once["reduce_scatter", "backward"] > 0
        assert counted["all_reduce", "backward"] == once["all_reduce", "backward"] > 0, (counted, once)
    assert ("replicas=" in sharded.source) == (mesh.ndim > 1)


@case
def no_sync_after_a_summed_gradient(mesh: autoshard.Mesh) -> None:
    """Backward passes in any order, a forward and its backward on different sides, and gradients asked for in between."""
    model, sharded = pair(real(mesh), Tied, ids(), hints=BATCH)
    sync = {model: contextlib.nullcontext, sharded: sharded.no_sync}
    asked = []
    for module in (model, sharded):
        full(module(ids())[0]).backward()
        with sync[module]():
            full(module(ids(seed=1))[0]).backward()
            late = full(module(ids(seed=2))[0])
        late.backward()  # the forward decides
        wanted = [module.head.bias, module.up.weight]
        held = [(p.grad, getattr(p.grad, "placements", None)) for p in wanted]
        asked.append(torch.autograd.grad(full(module(ids(seed=3))[0]), wanted))
        assert all(
            p.grad is g and getattr(g, "placements", None) == at for p, (g, at) in zip(wanted, held, strict=True)
        ), "what is asked for leaves .grad as it is"
        full(module(ids(seed=4))[0]).backward(inputs=[module.head.bias])
    for given, expected in zip(*reversed(asked), strict=True):
        close(given, expected)
    same_gradients(sharded, model)
    for module in (model, sharded):
        full(module(ids(seed=5))[0]).backward()
    same_gradients(sharded, model)
    if is_distributed(sharded):
        assert not any(x.is_partial() for p in sharded.parameters() for x in p.grad.placements)


@case
def gradients_from_several_sides(mesh: autoshard.Mesh) -> None:
    """Two forwards and a penalty in one loss, hooks, a second backward: summed as autograd does, whichever sets ``.grad``."""
    model, sharded = pair(real(mesh), Tied, ids(), hints=BATCH)
    for module in (model, sharded):
        with detached() as count:
            full(module(ids())[0]).backward()
        if is_distributed(module):
            assert not count, "a gradient that is the only one is taken as it is"
        module.zero_grad()
        two = full(module(ids(seed=1))[0]) + full(module(ids(seed=2))[0])
        (two + full(module.up.weight.square().sum())).backward()
        module.down.weight.register_hook(lambda g: g * 2)
        full(module(ids(seed=3))[0]).backward()
        module.down.weight.grad = None
        full(module(ids(seed=4))[0]).backward()
        with module.no_sync() if module is sharded else contextlib.nullcontext():  # each goes through the hook once
            for seed in (5, 6):
                full(module(ids(seed=seed))[0]).backward()
        full(module(ids(seed=7))[0]).backward()
    same_gradients(sharded, model)


@case
def a_penalty_on_weights(mesh: autoshard.Mesh) -> None:
    """A term or factor of the loss, which is a plain number where the weights are DTensors."""
    for name in ("fsdp", "megatron"):
        model, sharded = pair(real(mesh), Tied, ids(), hints=LAYOUTS[name])
        for module in (model, sharded):
            weight = module.up.weight
            (module(ids())[0] + weight.square().sum()).backward()
            (weight.abs().sum() * module(ids(seed=1))[0]).backward()
        same_gradients(sharded, model)


def _into(loss: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    total = loss * 2
    total += penalty
    return total


MEETINGS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": lambda loss, penalty: loss.mean() + 0.1 * penalty,
    "product": lambda loss, penalty: penalty * loss.mean(),
    "written": lambda loss, penalty: _into(loss.mean(), penalty),
    "written to": lambda loss, penalty: _into(penalty, loss.mean()),
    "stacked": lambda loss, penalty: torch.stack([loss.mean(), penalty]).square().sum(),
    "joined": lambda loss, penalty: torch.cat([loss.mean()[None], penalty[None]]).square().sum(),
    "bounded": lambda loss, penalty: torch.maximum(loss.mean(), penalty) + torch.minimum(loss.mean(), penalty),
}


@case
def losses_outside_with_penalties(mesh: autoshard.Mesh) -> None:
    """What the outputs and a plain target make is plain, and meets numbers made of weights; a plain number is trained, too."""
    temperature = torch.tensor(1.5, dtype=torch.float64)
    target = torch.randn(4, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    losses = (lambda y: (y - target).square(), lambda y: torch.where(target > 0, y, target).abs())
    for meet in MEETINGS.values():
        model, sharded = pair(real(mesh), Shifted, rows(), hints={"by": autoshard.Shard(1)})
        found = []
        for module in (model, sharded):
            scale, values = temperature.clone().requires_grad_(), []
            for loss in losses:
                made = meet(loss(module(rows())) * scale, module.by.square().sum() * scale)
                full(made).backward()
                values.append(full(made).detach())
            assert type(scale.grad) is torch.Tensor
            found.append(torch.stack([*values, scale.grad]))
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
        same_gradients(sharded, model)


class Added(nn.Module):
    """Parameters whose gradients are one tensor, the last one's that of the output, too."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.one, self.other = (nn.Parameter(torch.randn(4, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) + self.one + self.other


@case
def parameters_that_are_added(mesh: autoshard.Mesh) -> None:
    """Each has a gradient of its own: what is added to one, or scales it, is not done to the other."""
    cut = dict.fromkeys(("one", "other"), autoshard.Shard(1))
    model, sharded = pair(real(mesh), Added, rows(), hints=cut)
    for module in (model, sharded):
        for _ in range(2):
            full(module(rows())).square().sum().backward()
        for p in module.parameters():
            p.grad.mul_(0.5)
    same_gradients(sharded, model)


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by


@case
def a_gradient_that_is_given_and_used_again(mesh: autoshard.Mesh) -> None:
    """``y.backward(g)`` leaves gradients of their own: what is written into ``g`` afterwards is not written into them."""
    model, sharded = pair(real(mesh), Shifted, rows(), hints={"by": autoshard.Shard(1)})
    for module in (model, sharded):
        y = module(rows())
        given = torch.ones_like(y)
        y.backward(given)
        given.mul_(3)
        module(rows()).backward(given)
        given.zero_()
        module(rows()).backward(torch.full(y.shape, 2.0, dtype=y.dtype))  # a plain one, also where outputs are in parts
    same_gradients(sharded, model)


@contextlib.contextmanager
def detached() -> Iterator[list[Any]]:
    """What DTensors are detached inside."""
    found = list[Any]()

    class Detached(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.detach.default and isinstance(args[0], DTensor):
                found.append(func)
            return func(*args, **(kwargs or {}))

    with Detached():
        yield found


@case
def a_step_after_no_sync(mesh: autoshard.Mesh) -> None:
    """Gradients that are not summed yet are refused by what would take them for whole; read in full they are right."""
    model, sharded = pair(real(mesh), Tied, ids(), hints=BATCH)
    optimizer = torch.optim.AdamW(sharded.parameters())
    full(model(ids())[0]).backward()
    with sharded.no_sync():
        full(sharded(ids())[0]).backward()
    same_gradients(sharded, model)
    if is_distributed(sharded):
        before = sharded.full_state_dict()
        with refused("gradients are not summed over the ranks yet, because the last backward", RuntimeMismatchError):
            optimizer.step()
        with refused("gradients are not summed over the ranks yet, because the last backward", RuntimeMismatchError):
            autoshard.clip_grad_norm_(sharded, 1.0)
        for name, x in sharded.full_state_dict().items():
            assert torch.equal(x, before[name])
        norm = nn.utils.clip_grad_norm_(sharded.parameters(), 0.1)
        close(norm, nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        same_gradients(sharded, model)
    sharded.zero_grad()
    model.zero_grad()
    for module in (model, sharded):
        full(module(ids(seed=1))[0]).backward()
    same_gradients(sharded, model)
    optimizer.step()
    sharded.load_full_state_dict(model.state_dict())
    both(model, sharded, lambda m: m.float())  # a tensor that has a weak reference could not be
    same_state(sharded, model)


@case
def copied_inside_no_sync(mesh: autoshard.Mesh) -> None:
    """A copy is outside, and has no gradients, as that of a plain model; the module goes on as it was."""
    model, sharded = pair(real(mesh), Tied, ids(), hints=BATCH)
    with sharded.no_sync():
        for module in (model, sharded):
            full(module(ids())[0]).backward()
        others = copy.deepcopy(model), copy.deepcopy(sharded)
        for module in others:
            full(module(ids(seed=1))[0]).backward()
        same_gradients(others[1], others[0])
        steps(*others, ids(seed=2))
        for module in (model, sharded):
            full(module(ids(seed=3))[0]).backward()
        if is_distributed(sharded):
            with refused("gradients are not summed over the ranks yet", RuntimeMismatchError):
                torch.optim.SGD(sharded.parameters(), 0.1).step()
    same_gradients(sharded, model)

"""Checks on gloo ranks: experts in modules, an owner each along one axis, cut along another where there are four ranks; and
sums of little, as those of their routers' gradients."""

from __future__ import annotations

import copy
import tempfile
from typing import Any
from unittest import mock

import routing_models
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from state_harness import close, same_gradients, same_state
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import autoshard
from autoshard import runtime
from autoshard.module.checkpoints import full_optimizer_state_dict, load_full_optimizer_state_dict
from autoshard.runtime.transport import process_group
from autoshard.runtime.transport.move import DIRECT_SUM_BYTES, PAIR_EXCHANGE_BYTES, Move

EXPERTS: dict[str, Any] = {"ep": "expert", "tp": "megatron"}


def made() -> nn.Module:
    torch.manual_seed(0)
    return routing_models.Modules("modules", True).double()


def compiled(model: nn.Module, x: torch.Tensor, axes: dict[str, int], like: Any) -> autoshard.ShardedModule:
    mesh = autoshard.Mesh(axes, hardware="ideal_network")
    return autoshard.compile(model, mesh, (x,), like=like)


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Of lists in which experts come first: torch takes the mesh of the first for that of all."""
    return torch.optim.AdamW([*module.parameters()][::-1], lr=1e-2, eps=1e-6, foreach=True)


def step(model: nn.Module, sharded: Any, steps: dict[nn.Module, torch.optim.Optimizer], x: torch.Tensor) -> None:
    """One of both, compared: loss, gradients, their norm, weights."""
    losses, norms = [], []
    for module in (model, sharded):
        module.zero_grad()
        losses.append(module(x))
        losses[-1].backward()
    close(losses[1], losses[0], "loss")
    same_gradients(sharded, model)
    norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1), autoshard.clip_grad_norm_(sharded, 0.1)]
    close(norms[1], norms[0], "norm")
    for module in (model, sharded):
        steps[module].step()
    same_state(sharded, model)


def experts_of_one_owner() -> None:
    """Steps; memory of a rank; then on in whole weights and on another mesh, by state dicts and torch's checkpoints."""
    ranks, x = dist.get_world_size(), torch.randn(8, 6, routing_models.WIDTH, dtype=torch.float64)
    axes = {"ep": 2} if ranks == 2 else {"ep": 2, "tp": 2}
    like, model = {a: EXPERTS[a] for a in axes}, made()
    sharded = compiled(autoshard.deferred_init(made), x, axes, like)
    same_state(sharded, model, 0.0)
    held = [p.to_local() for n, p in sharded.named_parameters() if n.startswith("experts") and n.endswith("weight")]
    every = [p for n, p in model.named_parameters() if n.startswith("experts") and n.endswith("weight")]
    assert sum(p.numel() for p in held) * ranks == sum(p.numel() for p in every)
    steps = {m: optimizer(m) for m in (model, sharded)}
    for _ in range(3):
        step(model, sharded, steps, x)
    other = compiled(made(), x, {"dp": ranks}, "fsdp")
    turned = compiled(made(), x, dict(reversed(axes.items())), like)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    for number, (source, target) in enumerate(((sharded, other), (other, turned))):
        checkpoint.save(source.state_dict(), checkpoint_id=f"{folder[0]}/{number}")
        state = target.state_dict()
        checkpoint.load(state, checkpoint_id=f"{folder[0]}/{number}")
        target.load_state_dict(state)
        same_state(target, model)
    steps[turned] = optimizer(turned)
    load_full_optimizer_state_dict(turned, steps[turned], full_optimizer_state_dict(sharded, steps[sharded]))
    step(model, turned, steps, x)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(sharded, copy.deepcopy(model).state_dict() if not dist.get_rank() else {}, options=options)
    same_state(sharded, model)
    model.zero_grad()
    sharded.zero_grad()
    for _ in range(2):
        model(x).backward()
    with sharded.no_sync():
        sharded(x).backward()
    sharded(x).backward()
    same_gradients(sharded, model)


def gradients_of_experts_twice() -> None:
    """A penalty on gradients goes back through the exchanges once more."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    whole = [torch.randn(*n, dtype=torch.float64).requires_grad_() for n in ((12, 6), (12, 2), (4, 10, 6), (4, 6, 5))]
    ids = torch.rand(12, 4).topk(2).indices
    mine = [t.detach().chunk(ranks)[rank].clone().requires_grad_() for t in whole]
    comm = runtime.TorchCommunicator({"ep": ranks})

    def penalty(ids: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, *experts: torch.Tensor, **cut: Any) -> None:
        sharding = runtime.ExpertSharding(**cut)
        out = runtime.experts(x, ids, weights, *experts, runtime.ExpertForm("silu", True, False), sharding=sharding)
        gradients = torch.autograd.grad(out.square().sum(), (x, weights, *experts), create_graph=True)
        torch.stack([g.square().sum() for g in gradients]).sum().backward()

    penalty(ids, *whole)
    with runtime.bind(comm):
        penalty(ids.chunk(ranks)[rank], *mine, count=4, expert_axes="ep", exchange_axes="ep")
    for part, full in zip(mine, whole, strict=True):
        assert part.grad is not None
        assert full.grad is not None
        close(part.grad, full.grad.chunk(ranks)[rank], "gradient of gradients")


def sums_without_a_ring() -> None:
    """The same bits on every rank, of a group that numbers them otherwise, too. Two ranks send each other what they have, up
    to a size, and more of them all of little."""
    ranks, rank, rings = dist.get_world_size(), dist.get_rank(), list[int]()
    ring = process_group.all_reduce_sum

    def counted(x: torch.Tensor, *args: Any, **how: Any) -> Any:
        rings.append(x.numel())
        return ring(x, *args, **how)

    few, most = DIRECT_SUM_BYTES // (8 * ranks), PAIR_EXCHANGE_BYTES // 8
    sizes = (1, 2, few, few + 1, most, most + 1)
    for numbers in (range(ranks), range(ranks - 1, -1, -1)):
        comm = runtime.TorchCommunicator({"dp": ranks}, numbers)
        rings.clear()
        with mock.patch.object(process_group, "all_reduce_sum", counted):
            for size in sizes:
                every = torch.randn(ranks, size, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
                given = every[rank].clone()
                found = comm.apply(Move("P", "I", ("dp",)), given)
                close(found, every.sum(0), "sum")
                assert torch.equal(given, every[rank])
                theirs = [torch.empty_like(found) for _ in range(ranks)]
                dist.all_gather(theirs, found)
                assert all(torch.equal(found, x) for x in theirs)
            assert comm.apply(Move("P", "I", ("dp",)), torch.tensor([rank + 1])).tolist() == [ranks * (ranks + 1) // 2]
            assert comm.apply(Move("P", "I", ("dp",)), torch.zeros(0)).shape == (0,)
        assert rings == [*([most + 1] if ranks == 2 else [1, few + 1, most, most + 1]), 1], rings


CHECKS = {check.__name__: check for check in (experts_of_one_owner, gradients_of_experts_twice, sums_without_a_ring)}

"""Files and messages with tensors of a sharded module: whole, or refused when they are written."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from state_harness import Net, case, full, ids, pair, refused, same_state
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

import autoshard
from autoshard import full_optimizer_state_dict
from autoshard.errors import LayoutError

SHARDED = {"head.bias": autoshard.Shard(0), "layers.*": "colwise"}


def written(what: Any) -> Any:
    """What ``torch.load`` reads of what ``torch.save`` writes."""
    torch.save(what, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


def trained(mesh: autoshard.Mesh, hints: dict[str, Any]) -> tuple[nn.Module, Any, list[torch.optim.Optimizer]]:
    """After a step: the model, the sharded one, and their optimizers."""
    model, sharded = pair(mesh, Net, ids(), hints=hints)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, sharded)]
    for module, optimizer in zip((model, sharded), optimizers, strict=True):
        full(module(ids())[0]).backward()
        optimizer.step()
    return model, sharded, optimizers


@case
def shards_are_written_to_no_file(mesh: autoshard.Mesh) -> None:
    """Nor handed to NumPy. The reason is said on the rank that does it, before there is a file."""
    _, sharded, (_, optimizer) = trained(mesh, SHARDED)
    p = sharded.get_parameter("head.bias")
    writers: tuple[Callable[[], Any], ...] = (
        lambda: written(sharded.state_dict()),
        lambda: written(optimizer.state_dict()),
        lambda: written(optimizer),
        lambda: written({"ema": [p.detach().clone()]}),
        lambda: written(p.grad),
        lambda: pickle.dumps(p),
        lambda: safetensors.torch.save({"bias": p.detach()}),
        lambda: safetensors.torch.save({"bias": p.grad}),
        lambda: p.detach().cpu().numpy(),
        lambda: np.asarray(p.detach()),
        lambda: p.tolist(),
        lambda: torch.from_dlpack(p.detach()),
        lambda: p.detach().clone().share_memory_(),
    )
    for write in writers:
        if not dist.is_initialized():  # parameters are plain, and whole
            write()
            continue
        said = r"of shape \[12\](, or pass it to code outside torch, but|: rank \d) holds only"
        with refused(said + r"|full_state_dict\(\) and autoshard.full_opt", LayoutError):
            write()
    if dist.is_initialized():
        with pytest.raises(LayoutError, match=f"rank {dist.get_rank()} is about to save"):
            dist.all_gather_object([None] * dist.get_world_size(), sharded.state_dict())
    for made in (copy.copy(p), copy.deepcopy(p)):
        assert (type(made), made.requires_grad) == (type(p), True)
        assert torch.equal(full(made), full(p))
    if dist.is_initialized():  # torch copies plain parameters without their gradient
        assert torch.equal(full(copy.deepcopy(p).grad), full(p.grad))


@case
def replicated_tensors_are_written_whole(mesh: autoshard.Mesh) -> None:
    """For one device as for ranks: what is read are plain tensors."""
    model, sharded, (of_model, of_sharded) = trained(mesh, {"*": "replicate"})
    weights, state = written(sharded.state_dict()), written(of_sharded.state_dict())
    entries = [*weights.values(), *(x for entry in state["state"].values() for x in entry.values())]
    assert {type(x) for x in entries} == {torch.Tensor}
    assert isinstance(pickle.loads(pickle.dumps(sharded.get_parameter("head.bias"))), nn.Parameter)
    assert sharded.get_parameter("head.bias").detach().numpy().shape == (12,)
    model.load_state_dict(weights)
    of_model.load_state_dict(state)
    sharded.load_state_dict(weights)
    of_sharded.load_state_dict(copy.deepcopy(state))  # plain tensors are not copied
    go_on(model, sharded, of_model, of_sharded)


@case
def optimizers_load_whole_states(mesh: autoshard.Mesh) -> None:
    """Of the unsharded model's optimizer as of ours: every rank keeps its part."""
    model, sharded, (of_model, of_sharded) = trained(mesh, SHARDED)
    whole = written(of_model.state_dict())
    of_sharded.load_state_dict(whole)
    if dist.is_initialized():
        held = of_sharded.state[sharded.get_parameter("head.bias")]["momentum_buffer"]
        assert isinstance(held, DTensor)
        assert held.to_local().shape == (6,)
    go_on(model, sharded, of_model, of_sharded)
    of_model.load_state_dict(written(full_optimizer_state_dict(sharded, of_sharded)))
    go_on(model, sharded, of_model, of_sharded)


def go_on(model: nn.Module, sharded: Any, *optimizers: torch.optim.Optimizer) -> None:
    """A step more, which shows the states."""
    for module, optimizer in zip((model, sharded), optimizers, strict=True):
        optimizer.zero_grad()
        full(module(ids(seed=3))[0]).backward()
        optimizer.step()
    same_state(sharded, model)


@case
def a_save_beside_training(mesh: autoshard.Mesh) -> None:
    """What ``torch.distributed.checkpoint.async_save`` copies is the state at that moment, to the bit."""
    model, sharded = pair(mesh, Net, ids(), hints=SHARDED)
    optimizer = torch.optim.AdamW(sharded.parameters(), 0.1)
    for step in range(2):
        full(sharded(ids(seed=step))[0]).backward()
        state = {"model": sharded.state_dict(), "optimizer": optimizer.state_dict()}
        stager = DefaultStager(StagingOptions(False, False, False, False))
        staged = stager.stage(state)
        kept = [full(x).clone() for x in pytree.tree_leaves(state) if isinstance(x, torch.Tensor)]
        optimizer.step()
        copies = [full(x) for x in pytree.tree_leaves(staged) if isinstance(x, torch.Tensor)]
        assert len(copies) == len(kept) >= len(list(model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(copies, kept, strict=True))
        assert not torch.equal(full(next(iter(sharded.parameters()))), copies[0])
        stager.close()

"""What the workers of training worlds share: models, comparisons with the unsharded one, and running checks by name."""

from __future__ import annotations

import copy
import datetime
import functools
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import world
from harness import double
from spelled_models import Spelled, Sunk, capped
from torch import nn
from torch.distributed.tensor import DTensor
from transformers_models import hugging_face, tokens

import autoshard
import autoshard.models
from autoshard.check.reference import upcasts_in_float64

TOLERANCE = 1e-9
MESHES: dict[int, dict[str, int]] = {2: {"tp": 2}, 4: {"dp": 2, "tp": 2}}
Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def mesh() -> autoshard.Mesh:
    return autoshard.Mesh(MESHES[dist.get_world_size()], hardware="ideal_network")


def case(name: str) -> Case:
    """The model in float64, its arguments and keyword arguments; the same on every rank."""
    torch.manual_seed(0)
    if name == "spelled":
        return Spelled(Sunk(), capped).double().train(), (torch.randn(2, 13, 16, dtype=torch.float64),), {}
    if name.startswith("hf_"):
        return float64_norms(hugging_face(name.removeprefix("hf_"), 128)).double(), (), tokens(4, 128)
    reference = autoshard.models.get(name)
    args, kwargs = double(reference.inputs(batch=4))
    return reference.model().double().train(), args, kwargs


def float64_norms(model: nn.Module) -> nn.Module:
    """Hugging Face's RMSNorm for Llama computes in float32 whatever the model's dtype is; torch's does not."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child).__name__ == "LlamaRMSNorm":
                setattr(parent, name, nn.RMSNorm(child.weight.numel(), eps=child.variance_epsilon))
    return model


def loss_of(output: Any) -> torch.Tensor:
    """The model's loss; of a bare tensor the mean square."""
    loss = output.square().mean() if isinstance(output, torch.Tensor) else output.loss
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def seed(step: int) -> None:
    """Another seed on every rank; rank 0 has the one the reference is given."""
    torch.manual_seed(100 * dist.get_rank() + step)


def assert_close(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], what: str) -> None:
    """Relative to each tensor's largest value, but no less than 1e-3 of the largest value of all."""
    assert found.keys() == expected.keys(), f"{what}: {found.keys() ^ expected.keys()}"
    largest = max(float(x.detach().abs().max()) for x in expected.values() if x.numel())
    for name, x in expected.items():
        assert found[name].shape == x.shape, f"{what} {name}"
        error = float((found[name].detach() - x.detach()).abs().max()) if x.numel() else 0.0
        scale = max(float(x.detach().abs().max()), 1e-3 * largest) if x.numel() else 1.0
        assert error <= TOLERANCE * scale, f"{what} {name}: relative error {error / scale:.2e}"


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # With a larger eps a gradient that is zero but for rounding stays a small step.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)


@upcasts_in_float64()
def assert_trains_alike(
    name: str, steps: int = 3, on: autoshard.Mesh | None = None, like: Any = None
) -> autoshard.ShardedModule:
    """Loss, all gradients, and the state dict after every AdamW step. ``on``: the mesh, if not :func:`mesh`."""
    model, args, kwargs = case(name)
    reference = copy.deepcopy(model)
    sharded = autoshard.compile(model, on or mesh(), args, kwargs, like=like)
    cost = sharded.plan.cost
    assert cost.flops_per_rank < 0.8 * cost.flops, f"work is not divided: {cost}"
    ours, theirs = optimizer(sharded), optimizer(reference)
    for step in range(steps):
        torch.manual_seed(step)
        expected = loss_of(reference(*args, **kwargs))
        seed(step)
        loss = loss_of(sharded(*args, **kwargs))
        assert_close({"loss": loss}, {"loss": expected}, f"step {step}")
        expected.backward()
        loss.backward()
        gradients = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
        assert_close(sharded.full_gradients(), gradients, f"step {step}, gradient of")
        for each in (ours, theirs):
            each.step()
            each.zero_grad()
        assert_close(sharded.full_state_dict(), reference.state_dict(), f"step {step}, weight")
    return sharded


def assert_all_raise(error: type[Exception], text: str, call: Callable[[], Any]) -> None:
    """``call`` raises on this and on every other rank, and the ranks can go on afterwards."""
    with pytest.raises(error) as found:
        call()
    assert str(found.value).startswith(text)
    assert not text or text not in str(found.value).removeprefix(text), "said twice"
    count = torch.ones(())
    dist.all_reduce(count)
    assert float(count) == dist.get_world_size()


def run(checks: Mapping[str, Any], rank: int, ranks: int, rendezvous: str, result: str) -> None:
    torch.set_num_threads(1)
    # A rank that fails alone leaves the others waiting; they must not wait for the half hour that is the default.
    wait = datetime.timedelta(seconds=60)
    world.join(rendezvous, rank, ranks, timeout=wait)
    outcomes: dict[str, str] = {}
    for name in sys.argv[4].split(","):
        torch.manual_seed(0)  # an earlier check may have seeded every rank differently
        try:
            checks[name]()
            mine = ""
        except (Exception, pytest.fail.Exception):
            mine = traceback.format_exc()
            print(mine, flush=True)  # other ranks may wait until their messages time out
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, mine)
        outcomes[name] = next((f"rank {r}:\n{e}" for r, e in enumerate(everyone) if e), "")
        if rank == 0:
            Path(result).write_text(json.dumps(outcomes))
    dist.destroy_process_group()


def main(checks: Mapping[str, Any]) -> None:
    """Run those of ``checks`` that the command names, on every rank of a world."""
    world.main(functools.partial(run, checks))

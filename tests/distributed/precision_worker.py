"""One rank of a gloo world that trains in mixed precision; started by test_precision_gloo.py."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from checks import main, mesh
from microbatch_cases import full
from precision_cases import CASES, net
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import autoshard

BFLOAT16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
CLOSE = 1e-6
"""of FSDP2, relative to the largest value: it divides by the ranks after its sums, we before; of two ranks that is exact"""


def as_fsdp2(like: str = "fsdp", policy: MixedPrecisionPolicy = BFLOAT16) -> None:
    """Four AdamW steps step by step beside FSDP2 with the same policy: losses, gradients and weights."""
    model, (ids, weight, labels) = net()
    args = ids, weight, labels
    theirs = copy.deepcopy(model)
    for layer in theirs.layers:
        fully_shard(layer, mp_policy=BFLOAT16)
    fully_shard(theirs, mp_policy=BFLOAT16)
    ours = autoshard.compile(model, {"dp": dist.get_world_size()}, args, mixed_precision=policy, like=like)
    rows = 8 // dist.get_world_size()
    part = slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2, eps=1e-4) for m in (ours, theirs)]
    for step in range(4):
        with warnings.catch_warnings(action="ignore"):  # what FSDP2 says of a linear layer's output
            expected = theirs(*(x[part] for x in args))
        found = ours(*args)
        found.backward()
        expected.backward()
        total = expected.detach().float() / dist.get_world_size()
        dist.all_reduce(total)
        # one of bfloat16, one of float32
        assert abs(float(found.detach()) - float(total)) <= 0.01 * abs(float(total)), step
        _alike({n: p.grad for n, p in ours.named_parameters()}, {n: p.grad for n, p in theirs.named_parameters()}, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        _alike(dict(ours.named_parameters()), dict(theirs.named_parameters()), step)


def _alike(found: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None], step: int) -> None:
    for name, x in expected.items():
        y = found[name]
        assert (x is None) == (y is None), name
        if x is not None and y is not None:
            assert x.dtype == y.dtype == torch.float32
            a, b = full(y.detach()), full(x.detach())
            error = float((a - b).abs().max() / b.abs().max().clamp_min(1e-6))
            assert error <= CLOSE, f"step {step} {name}: {error:.1e}"


def gpt_as_fsdp2() -> None:
    """Six AdamW steps with its usual epsilon. By FSDP's plan gradients and weights are FSDP2's bit for bit; by another plan
    they are as far from a float64 run of the same casts as FSDP2's are: Adam makes whole steps of gradients that are rounding.
    """
    reference = autoshard.models.get("gpt")
    torch.manual_seed(0)
    model = reference.model().eval()
    args, kwargs = reference.inputs(batch=4)
    rows = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    first = {n: p.detach().clone().double() for n, p in model.named_parameters()}
    theirs, exact, plans = copy.deepcopy(model), copy.deepcopy(model).double(), ("fsdp", None)
    for block in theirs.blocks:
        fully_shard(block, mp_policy=BFLOAT16)
    fully_shard(theirs, mp_policy=BFLOAT16)
    ours = [
        autoshard.compile(copy.deepcopy(model), {"dp": 2}, tuple(args), kwargs, mixed_precision=BFLOAT16, like=like)
        for like in plans
    ]
    modules = [theirs, *ours, exact]
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-3) for m in modules]
    for step in range(6):
        with warnings.catch_warnings(action="ignore"):
            theirs(*(x[rows] for x in args), **{n: x[rows] for n, x in kwargs.items()}).loss.backward()
        for sharded in ours:
            sharded(*args, **kwargs).loss.backward()
        read = {n: p.bfloat16().double() for n, p in exact.named_parameters()}
        torch.func.functional_call(exact, read, tuple(args), kwargs).loss.backward()
        given = [{n: full(p.grad) for n, p in m.named_parameters()} for m in modules]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        moved = [{n: full(p.detach()) - first[n] for n, p in m.named_parameters()} for m in modules]
        for what, (expected, same, other, right) in {"gradients": given, "weights": moved}.items():
            assert all(torch.equal(x, same[n]) for n, x in expected.items()), f"step {step}: {what} are not FSDP2's"
            far, of_fsdp2 = _rms(other, right), _rms(expected, right)
            assert far <= 1.25 * of_fsdp2, f"step {step}: {what} {far:.1e}, of FSDP2 {of_fsdp2:.1e}"


def _rms(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """All differences together, relative to all that is expected."""
    off = sum(float((found[n].double() - x).square().sum()) for n, x in expected.items())
    return (off / sum(float(x.square().sum()) for x in expected.values())) ** 0.5


def sums_in_bfloat16_are_seen() -> None:
    """Negative control."""
    with pytest.raises(AssertionError, match="step 0"):
        as_fsdp2(policy=MixedPrecisionPolicy(torch.bfloat16))


def policy_of_one_rank() -> None:
    """Ranks that come with other policies hear of it, all of them."""
    policy = BFLOAT16 if dist.get_rank() else MixedPrecisionPolicy(torch.bfloat16)
    with pytest.raises(autoshard.AutoshardError, match="mixed_precision"):
        autoshard.compile(nn.Linear(4, 4), mesh(), (torch.ones(4, 4),), mixed_precision=policy)


OWN = {
    "as_fsdp2": as_fsdp2,
    "gpt_as_fsdp2": gpt_as_fsdp2,
    "replicas_as_fsdp2": lambda: as_fsdp2("ddp"),
    "sums_in_bfloat16_are_seen": sums_in_bfloat16_are_seen,
    "policy_of_one_rank": policy_of_one_rank,
}

if __name__ == "__main__":
    main({**OWN, **{name: lambda case=case: case(mesh()) for name, case in CASES.items()}})

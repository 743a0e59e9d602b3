"""Losses that scripts compute of outputs which stay in parts: checks of training_worker.py."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from checks import assert_close
from loss_models import NextToken, gathering_rows, tokens_and_labels
from microbatch_cases import steps_alike
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard

LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean of squares": lambda x: x.square().mean(),
    "sum": lambda x: x.abs().sum() / 3,
    "of a mean": lambda x: torch.mean(x).exp() + torch.sigmoid(x).sum(),
    "by rows": lambda x: torch.tanh(x).sum(-1).square().mean(),
}


def losses_are_computed_on_parts() -> None:
    """Losses of an output, unevenly cut: their values, gradients of the output where hooks see them, of parameters, and of
    a gradient's norm."""
    x = torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    flat = autoshard.Mesh({"dp": dist.get_world_size()}, hardware="cpu")
    sharded = autoshard.compile(copy.deepcopy(model), flat, (x,), like="ddp")
    for name, of_output in LOSSES.items():
        seen: list[dict[str, torch.Tensor]] = []
        for each in (sharded, model):
            each.zero_grad()
            out, hooked = each(x), list[torch.Tensor]()
            out.register_hook(hooked.append)
            out.retain_grad()
            loss = of_output(out)
            (gradient,) = torch.autograd.grad(loss, out, create_graph=True)
            (loss + gradient.square().sum()).backward()
            found = {"loss": loss, "hooked": hooked[-1], "kept": out.grad, "gradient": gradient}
            seen.append({n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in found.items()})
        assert_close(*seen, name)
        assert_close(sharded.full_gradients(), {n: p.grad for n, p in model.named_parameters()}, f"{name}, gradient of")
        assert names_of_nodes(of_output(sharded(x))) & {"_ToLocalShardBackward", "_SumOfShardsBackward"}


def losses_go_back_as_of_plain_outputs() -> None:
    """``backward()`` of a number in parts, which begins with a one that is made here: gradients, hooks of the number, graphs
    that are kept or freed, second derivatives, what is detached; where no gradient is recorded nothing is.
    """
    x = torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    flat = autoshard.Mesh({"dp": dist.get_world_size()}, hardware="cpu")
    sharded = autoshard.compile(copy.deepcopy(model), flat, (x,), like="ddp")
    found: list[list[torch.Tensor]] = []
    for each in (sharded, model):
        each.zero_grad()
        hooked: list[torch.Tensor] = []
        loss = each(x).square().mean()
        loss.register_hook(hooked.append)
        loss.retain_grad()
        loss.backward(retain_graph=True)
        kept = loss.grad
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        twice = each(x).mean()
        with warnings.catch_warnings():  # of the cycles that the next zero_grad ends
            warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph")
            twice.backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in each.parameters())
        penalty.backward()
        with torch.no_grad():
            total = each(x).sum()
        with pytest.raises(RuntimeError, match="does not require grad"):
            total.backward()
        out = each(x)
        with torch.no_grad():
            assert not out.mean().requires_grad
        assert not out.detach().requires_grad
        assert out.mean().requires_grad
        values = [torch.tensor(float(n.detach()), dtype=torch.float64) for n in (loss, twice, total)]
        gradients = [p.grad.detach() for p in each.parameters()]
        tensors = [*values, *hooked[:2], kept, *gradients]  # a third hook sees the backward that is refused
        found.append([t.full_tensor() if isinstance(t, DTensor) else t for t in tensors])
    assert [*map(len, found)] == [3 + 2 + 1 + 4] * 2
    sharded.zero_grad()
    model.zero_grad()
    for i, (ours, theirs) in enumerate(zip(*found, strict=True)):
        assert_close({"value": ours}, {"value": theirs}, f"number {i}")


def names_of_nodes(x: torch.Tensor) -> set[str]:
    """Of the autograd graph."""
    found, left = {}, [x.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found[node] = node.name()
            left += [n for n, _ in node.next_functions]
    return set(found.values())


def losses_run_in_chunks() -> None:
    """Classes are sharded: all rows at each rank, and rows that are gathered a chunk at a time."""
    for gathers in (False, True):
        torch.manual_seed(0)
        model, tp = NextToken().double(), autoshard.Mesh({"tp": dist.get_world_size()}, hardware="cpu")
        with gathering_rows() if gathers else contextlib.nullcontext():
            like = None if gathers else "megatron-sp"
            steps_alike(model, tp, tokens_and_labels(), {}, 3, loss_chunks=3, like=like, parts=None)


OF_OUTPUTS = {
    "losses_run_in_chunks": losses_run_in_chunks,
    "losses_are_computed_on_parts": losses_are_computed_on_parts,
    "losses_go_back_as_of_plain_outputs": losses_go_back_as_of_plain_outputs,
}

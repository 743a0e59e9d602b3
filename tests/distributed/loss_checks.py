"""Losses that scripts compute of outputs which stay in parts: checks of training_worker.py."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from checks import assert_close
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
        assert "_PartBackward" in names_of_nodes(of_output(sharded(x)))


def names_of_nodes(x: torch.Tensor) -> set[str]:
    """Of the autograd graph."""
    found, left = {}, [x.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found[node] = node.name()
            left += [n for n, _ in node.next_functions]
    return set(found.values())


OF_OUTPUTS = {"losses_are_computed_on_parts": losses_are_computed_on_parts}

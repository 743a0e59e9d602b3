"""Stages of ZeRO: bytes on the wire in steps of one and of several micro-batches; run in one process and under gloo."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from microbatch_cases import TOLERANCE, far, farthest, full
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard import Link
from autoshard.hardware import PRESETS
from autoshard.runtime.transport.process_group import TorchCommunicator

WIDTH, LAYERS, BATCH = 16, 2, 32
WIRE = replace(PRESETS["h100"], node=Link(0.0, 1e9))
"""bytes decide, no latencies"""
COUNTS = (1, 4)


class Stack(nn.Module):
    """The backward reads all weights, and nothing but gradients of parameters is sent in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x * self.first
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return F.mse_loss(x, y)


def made() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    x, y = torch.randn(2, BATCH, WIDTH).double()
    return Stack().double(), (x, y)


def mesh_for(like: str, ranks: int) -> autoshard.Mesh:
    return autoshard.Mesh({"replica": 2, "shard": ranks // 2} if like == "hsdp" else {"dp": ranks}, WIRE)


def expected(like: str, ranks: int, count: int) -> Counter[tuple[str, str]]:
    """Bytes per rank, kind and phase of a step, by the formulas of the papers; Ψ: the parameters, as float64."""
    psi = 8 * sum(p.numel() for p in Stack().parameters())
    first = 8 * WIDTH  # the backward does not read it: x, which it scales, needs no gradient
    shards = ranks // 2 if like == "hsdp" else ranks
    ring = (shards - 1) / shards
    gather, back, scatter = ("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "backward")
    reduce = ("all_reduce", "backward")
    found = {
        "ddp": {reduce: 2 * ring * psi},
        "zero1": {gather: ring * psi, scatter: ring * psi},
        "zero2": {gather: ring * psi, scatter: count * ring * psi},
        "fsdp": {gather: count * ring * psi, back: count * ring * (psi - first), scatter: count * ring * psi},
    }
    if like == "hsdp":
        return Counter(found["fsdp"]) + Counter({reduce: 2 * (2 - 1) / 2 * psi / shards})
    return Counter(found[like])


def by_stage(like: str, shards: int, psi: float) -> dict[str, float]:
    """Bytes per rank between backward and step, Ψ bytes of parameters and Adam's two states of their dtype.

    Rajbhandari et al. (arXiv:1910.02054), section 5, and for what is kept between steps of stages 1 and 2 as of 3: here
    parameters and gradients outside of a step are the optimizer's, so cut as its states are.
    """
    share = psi if like == "ddp" else psi / shards
    return {"parameters": share, "gradients": share, "optimizer": 2 * share}


def counted(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of all storages behind this rank's parts of them: a view counts with all that it keeps alive."""
    parts = [x.to_local() if isinstance(x, DTensor) else x for x in tensors if x is not None]
    storages = [x.untyped_storage() for x in parts]
    return sum({s._cdata: s.nbytes() for s in storages}.values())


def sent(log: list[Any]) -> Counter[tuple[str, str]]:
    """Bytes per kind and phase, without the loss's."""
    found: Counter[tuple[str, str]] = Counter()
    for e in log:
        if (e.kind, e.phase) != ("all_reduce", "forward"):
            found[e.kind, e.phase] += e.bytes
    return found


def begun(sharded: Any) -> list[Any]:
    """A list that every collective from now on is appended to."""
    log: list[Any] = []
    (sharded._comm if hasattr(sharded, "_comm") else sharded._world).log = log
    return log


def trains(like: str, ranks: int, count: int, steps: int = 3) -> None:
    """Losses, gradients and weights of AdamW steps are those of one device, and the bytes those of the formulas."""
    model, args = made()
    sharded = autoshard.compile(copy.deepcopy(model), mesh_for(like, ranks), args, like=like, micro_batches=count)
    ours, theirs = (torch.optim.AdamW(m.parameters(), 1e-2) for m in (sharded, model))
    for _ in range(steps):
        loss = model(*args)
        loss.backward()
        log = begun(sharded)
        found = sharded(*args)
        found.backward()
        assert far(found.detach(), loss.detach()) <= TOLERANCE
        bytes_ = sent(log)
        gradients = {n: p.grad for n, p in model.named_parameters()}
        for n, p in sharded.named_parameters():
            assert far(full(p.grad), gradients[n]) <= TOLERANCE, n
        ours.step()
        theirs.step()
        if dist.is_initialized():  # in one process nobody holds a part alone
            states = [x for state in ours.state.values() for x in state.values() if x.ndim]
            own = list(sharded.parameters())
            held = {"parameters": own, "gradients": [p.grad for p in own], "optimizer": states}
            psi = 8 * sum(p.numel() for p in model.parameters())
            wanted = by_stage(like, ranks // 2 if like == "hsdp" else ranks, psi)
            assert {part: counted(xs) for part, xs in held.items()} == wanted
            assert {part: getattr(sharded.plan.memory, part) for part in wanted} == wanted
        ours.zero_grad()
        theirs.zero_grad()
    weights = dict(model.named_parameters())
    assert farthest({n: full(p) for n, p in sharded.named_parameters()}, weights) <= TOLERANCE
    wire = expected(like, ranks, count)
    assert bytes_.keys() == wire.keys(), (bytes_, wire)
    assert all(abs(bytes_[k] - wire[k]) <= 1e-6 * wire[k] for k in wire), (bytes_, wire)
    predicted = sent(list(sharded.collectives))
    assert predicted.keys() == wire.keys(), (predicted, wire)
    assert all(abs(predicted[k] - wire[k]) <= 1e-6 * wire[k] for k in wire), (predicted, wire)
    assert all(("S" in str(sharded.plan.layouts[n])) == (like != "ddp") for n, _ in model.named_parameters())


def has_communicators_of_its_own() -> None:
    """What runs beside compute does not queue with what is waited for, as on backends that have no threads of their own."""
    made_for, plain = [], TorchCommunicator.beside

    def beside(self: TorchCommunicator, axes: tuple[str, ...]) -> Any:
        group, own = self.process_group(axes), self._own(self.process_group(axes))
        made_for.append(axes)
        assert own.handle is not group.handle
        assert own.handle is self._own(group).handle
        return own

    TorchCommunicator.beside = beside  # type: ignore[method-assign]
    try:
        trains("hsdp", 4, 1)
        trains("ddp", 4, 1)
    finally:
        TorchCommunicator.beside = plain  # type: ignore[method-assign]
    assert len(set(made_for)) == 3  # shards, replicas, and all


LIKE = ("ddp", "zero1", "zero2", "fsdp", "hsdp")

CASES: dict[str, Callable[[], None]] = {
    "has_communicators_of_its_own": has_communicators_of_its_own,
    **{f"{like}_in_{count}": functools.partial(trains, like, 4, count) for like in LIKE for count in COUNTS},
}

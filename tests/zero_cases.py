"""Stages of ZeRO: bytes on the wire in steps of one and of several micro-batches; run in one process and under gloo."""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import ideal
from microbatch_cases import TOLERANCE, far, farthest, full
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard import Link
from autoshard.hardware import PRESETS
from autoshard.passes.lower import bucket as lower
from autoshard.runtime.parameters import flat_bucket
from autoshard.runtime.parameters.bucket import Dtypes
from autoshard.runtime.transport.move import Move
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


class Late:
    """A collective that brings NaN until it is waited for. ``arrives``: whether it then brings what it should."""

    def __init__(self, arrives: bool, out: torch.Tensor, begin: Callable[[], Any]) -> None:
        self.arrives, self.begin = arrives, begin
        out.fill_(float("nan"))

    def wait(self) -> None:
        if self.arrives:
            self.begin().wait()


class Pairs(Stack):
    """Two matrices in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))) for _ in range(LAYERS)
        )


def gathers_late(like: str, arrives: bool, kind: type[Stack] = Stack, depth: int = 1) -> tuple[list[str], list[float]]:
    """Begins ("b") and arrivals ("a") of each parameter's gather in the third step, and the losses of two steps."""
    torch.manual_seed(0)
    model, (_, args) = kind().double(), made()
    with patch.object(lower, "bucket_bytes", lambda mesh, axes: 1.0):  # every matrix goes alone
        sharded = autoshard.compile(model, mesh_for(like, 4), args, like=like)
    assert f"PREFETCH = {depth}\n" in sharded.source
    sharded(*args).backward()
    real, events = TorchCommunicator.begin, list[str]()
    names = {p.to_local().data_ptr(): n for n, p in sharded.named_parameters()}

    def begin(self: TorchCommunicator, group: Any, collective: Any, *given: Any) -> Any:
        if collective is not flat_bucket.all_gather_single:
            return real(self, group, collective, *given)
        name = names[given[1].data_ptr()]  # not copied: it is alone
        events.append(f"b {name}")

        def start() -> Any:
            events.append(f"a {name}")
            return real(self, group, collective, *given)

        return Late(arrives, given[0], start)

    with patch.object(TorchCommunicator, "begin", begin):
        losses = []
        for _ in range(2):
            events.clear()
            loss = sharded(*args)
            loss.backward()
            losses.append(float(loss.detach()))
    if arrives:
        assert abs(losses[1] - float(model(*args).detach())) <= TOLERANCE
    return events, losses


def in_turn(names: Sequence[str], depth: int) -> list[str]:
    """Events of gathers of which ``depth`` begin before the first is waited for, and one with each that arrives."""
    begins, arrivals = [f"b {n}" for n in names], [f"a {n}" for n in names]
    between = (e for pair in zip(begins[depth:], arrivals, strict=False) for e in pair)
    return [*begins[:depth], *between, *arrivals[len(names) - depth :]]


def is_prefetched() -> None:
    """In the forward and in the backward the ``depth`` gathers that come next are under way beside the one that is awaited."""
    for kind, depth in ((Stack, 1), (Pairs, 2)):
        names = [n for n, _ in kind().named_parameters()]
        events, _ = gathers_late("fsdp", True, kind, depth)
        back = names[:0:-1]  # the first parameter is not gathered again
        assert events == in_turn(names, depth) + in_turn(back, depth), events
        events, _ = gathers_late("zero2", True, kind, depth)
        assert events == in_turn(names, depth), events


def use_before_arrival_is_seen() -> None:
    """Negative control."""
    for kind, depth in ((Stack, 1), (Pairs, 2)):
        _, losses = gathers_late("fsdp", False, kind, depth)
        assert losses[0] != losses[0]


def one_tensor_is_not_copied() -> None:
    """The chunks of one that lie one after another are sent, and come, where they are; what goes with others is copied."""
    comm, gathered, reduced = TorchCommunicator({"dp": 4}), list[torch.Tensor](), list[torch.Tensor]()
    begin, reduce_scatter = comm.begin, comm.reduce_scatter

    def begins(group: Any, collective: Any, out: torch.Tensor, mine: torch.Tensor) -> Any:
        gathered.extend((mine, out))
        return begin(group, collective, out, mine)

    def reduces(group: Any, out: torch.Tensor, given: torch.Tensor) -> Any:
        reduced.extend((given, out))
        return reduce_scatter(group, out, given)

    def shares(xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor]) -> list[bool]:
        return [x.data_ptr() == y.data_ptr() for x, y in zip(xs, ys, strict=True)]

    forms: list[tuple[bool, int, int, tuple[int, ...], torch.dtype | None]] = [
        (True, 1, 0, (8, 3), None),
        (False, 2, 0, (8, 3), None),
        (False, 1, 1, (3, 8), None),
        (False, 1, 0, (7, 3), None),
        (False, 1, 0, (8, 3), torch.float64),
    ]
    with patch.object(comm, "begin", begins), patch.object(comm, "reduce_scatter", reduces):
        for alone, count, dim, shape, dtype in forms:
            gathered.clear(), reduced.clear()  # type: ignore[func-returns-value]
            move, (start, length) = Move("S", "R", ("dp",), dim, shape[dim]), comm.chunk(shape[dim], ("dp",))
            whole = [torch.arange(math.prod(shape)).reshape(shape) + 100.0 * i for i in range(count)]
            parts = [x.narrow(dim, start, length).contiguous() for x in whole]
            bucket = flat_bucket.FlatBucket(comm, [move] * count, dtypes=Dtypes(dtype, dtype))
            full, gradients = bucket.forward(parts, "forward"), [x.clone() for x in whole]
            found, works, _ = bucket.backward(gradients)
            for work in works:
                work.wait()
            assert shares(gathered[:2], [parts[0], full[0]]) == [alone, alone], (shape, dim)
            assert shares(reduced[:1], gradients[:1]) == [alone], (shape, dim)
            assert all(torch.equal(x, y.to(x.dtype)) for x, y in zip(full, whole, strict=True))
            assert all(x is not None and torch.equal(x, 4 * y.to(x.dtype)) for x, y in zip(found, parts, strict=True))


def nothing_is_sent_that_was_not_written() -> None:
    """Chunks that are not as long as the longest are padded, and memory that is not written is NaN here."""
    comm, sent_ = TorchCommunicator({"dp": 4}), list[torch.Tensor]()
    begin = comm.begin

    def begins(group: Any, collective: Any, out: torch.Tensor, mine: torch.Tensor, *rest: Any) -> Any:
        sent_.append(mine.view(torch.float32) if mine.dtype == torch.uint8 else mine)
        return begin(group, collective, out, mine, *rest)

    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(2).isnan().all()
        with patch.object(comm, "begin", begins):
            move, (start, length) = Move("S", "R", ("dp",), 0, 7), comm.chunk(7, ("dp",))
            bucket = flat_bucket.FlatBucket(comm, [move] * 2)
            bucket.forward([torch.ones(7, 3).narrow(0, start, length)] * 2, "forward")
            for work in bucket.backward([torch.ones(7, 3)] * 2)[1]:
                work.wait()
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(sent_) == 2
    assert not any(x.isnan().any() for x in sent_)


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


def gathered_in_two_steps() -> None:
    """A batch that one axis cuts, and parameters that two do: what comes between the two gathers is not kept, either."""
    model, (x, y) = made()
    mesh, args = ideal({"a": 2, "b": 2}), (x[:6], y[:6])
    sharded = autoshard.compile(copy.deepcopy(model), mesh, args, like="fsdp", micro_batches=2)
    for _ in range(2):  # the second step gathers ahead
        sharded.zero_grad()
        log = begun(sharded)
        sharded(*args).backward()
    executed, planned = Counter[Any](), Counter[Any]()
    for found, events in ((executed, log), (planned, sharded.collectives)):
        for e in events:
            found[e.kind, e.axes, e.phase] += e.bytes
    assert executed.keys() == planned.keys()
    assert all(abs(executed[k] - planned[k]) <= 1e-6 * planned[k] for k in planned), (executed, planned)
    assert {axes for kind, axes, phase in executed if (kind, phase) == ("all_gather", "backward")} == {("a",), ("b",)}
    model(*args).backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    assert farthest({n: full(p.grad) for n, p in sharded.named_parameters()}, gradients) <= TOLERANCE


LIKE = ("ddp", "zero1", "zero2", "fsdp", "hsdp")

CASES: dict[str, Callable[[], None]] = {
    "is_prefetched": is_prefetched,
    "use_before_arrival_is_seen": use_before_arrival_is_seen,
    "gathered_in_two_steps": gathered_in_two_steps,
    "one_tensor_is_not_copied": one_tensor_is_not_copied,
    "nothing_is_sent_that_was_not_written": nothing_is_sent_that_was_not_written,
    "has_communicators_of_its_own": has_communicators_of_its_own,
    **{f"{like}_in_{count}": functools.partial(trains, like, 4, count) for like in LIKE for count in COUNTS},
}

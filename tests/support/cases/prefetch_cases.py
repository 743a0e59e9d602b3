"""Gathers of parameters under way: which, in which order, of what, and when they are used; run under gloo."""

from __future__ import annotations

import copy
import gc
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from harness import ideal
from microbatch_cases import TOLERANCE, far, farthest, full
from torch import nn
from zero_cases import LAYERS, WIDTH, Stack, begun, made, mesh_for

import autoshard
from autoshard.passes.lower import bucket as lower
from autoshard.runtime.parameters import block
from autoshard.runtime.parameters import bucket as flat_bucket
from autoshard.runtime.parameters.bucket import Dtypes
from autoshard.runtime.transport.move import Move
from autoshard.runtime.transport.process_group import TorchCommunicator


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


class Heads(Stack):
    """A loss from each layer."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return [F.mse_loss(layer(x * self.first), y) for layer in self.layers]


def breaks_off(x: torch.Tensor) -> torch.Tensor:
    raise KeyboardInterrupt


def what_begins_in_vain_is_dropped() -> None:
    """By a forward that breaks off, whose next one reads other weights, and by a backward that does not come to it."""
    model, args = made()
    sharded = autoshard.compile(copy.deepcopy(model), mesh_for("fsdp", 4), args, like="fsdp")
    sharded(*args)
    with patch.object(F, "gelu", breaks_off), pytest.raises(KeyboardInterrupt):
        sharded(*args)
    with torch.no_grad():
        for p in (*model.parameters(), *sharded.parameters()):
            p.mul_(1.5)
    loss = sharded(*args)
    assert far(loss.detach(), model(*args).detach()) <= TOLERANCE
    heads = autoshard.compile(Heads().double(), mesh_for("fsdp", 4), args, like="fsdp")
    first, second = heads(*args)
    second.backward()  # begins what the first head reads, which comes before it
    gathers = [x for x in gc.get_objects() if type(x) is block._RegatherSource and x.packed > x.unpacked]
    assert first.requires_grad
    assert len(gathers) == LAYERS - 1 + LAYERS  # with those of the loss above
    assert all(x.arriving is None for x in gathers)


def stages_side_by_side() -> None:
    """In several micro-batches one weight is gathered once a step, and the one after it in each: all in their turn."""
    model, args = made()
    plan = autoshard.plan(model, mesh_for("fsdp", 4), args, like="fsdp", micro_batches=4)
    plan = replace(plan, zero={"layers.0.weight": 2})
    sharded = autoshard.compile(copy.deepcopy(model), mesh_for("fsdp", 4), args, plan=plan, micro_batches=4)
    assert sharded.source.count("zero=2") == 1
    for _ in range(2):
        sharded.zero_grad()
        log = begun(sharded)
        sharded(*args).backward()
    forward = [e for e in log if (e.kind, e.phase) == ("all_gather", "forward")]
    assert len(forward) == 1 + 4 * LAYERS  # the others' in each
    model(*args).backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    assert farthest({n: full(p.grad) for n, p in sharded.named_parameters()}, gradients) <= TOLERANCE


CASES: dict[str, Callable[[], None]] = {
    "is_prefetched": is_prefetched,
    "use_before_arrival_is_seen": use_before_arrival_is_seen,
    "gathered_in_two_steps": gathered_in_two_steps,
    "one_tensor_is_not_copied": one_tensor_is_not_copied,
    "nothing_is_sent_that_was_not_written": nothing_is_sent_that_was_not_written,
    "what_begins_in_vain_is_dropped": what_begins_in_vain_is_dropped,
    "stages_side_by_side": stages_side_by_side,
}

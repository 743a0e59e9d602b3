"""ZeRO in one process: bytes, numbers and memory of its stages."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from harness import captured_once
from memory_truth import kept_bytes
from torch import nn
from zero_cases import COUNTS, LIKE, WIRE, Stack, begun, made, mesh_for, sent, trains

import autoshard
from autoshard.compiler import captured, compiled, planned
from autoshard.models import Gpt, GptConfig
from autoshard.plans.wishes import Wishes
from autoshard.runtime.step import Step


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("like", LIKE)
def test_bytes_and_numbers(like: str, count: int) -> None:
    trains(like, 4, count)


def test_a_gradient_that_is_left_behind_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the sums of all micro-batches but the last are lost."""
    monkeypatch.setattr("autoshard.runtime.step.Gathered.add", lambda self, new: setattr(self, "gradients", list(new)))
    with pytest.raises(AssertionError):
        trains("zero1", 4, 4, steps=1)


def test_parameters_of_the_step_before_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: what was gathered outlives its step, and the optimizer's work is not seen."""
    kept: list[Step] = []

    def enter(self: Any, index: int, count: int, stage: int = 0) -> None:
        self.micro_batch = (index, count)
        kept[:] = kept or [Step()]
        self.step = kept[0] if count > 1 else None
        kept[0].enter(index)

    monkeypatch.setattr("autoshard.runtime.communicator.Communicator.enter", enter)
    with pytest.raises(AssertionError):
        trains("zero2", 4, 4)


@pytest.mark.parametrize("like", ["zero1", "zero2"])
def test_no_copy_outlives_its_step(like: str) -> None:
    model, args = made()
    sharded = autoshard.compile(model, mesh_for(like, 2), args, like=like, micro_batches=2)
    sharded(*args).backward()
    assert all(comm.step is None for comm in sharded._world.ranks)


def test_the_plan_says_it_and_survives_json() -> None:
    model, args = made()
    plan = autoshard.plan(model, mesh_for("zero2", 4), args, like="zero2")
    assert plan.zero == {n: 2 for n, _ in model.named_parameters()}
    assert not plan.notes
    again = autoshard.Plan.from_json(plan.to_json())
    assert again == plan
    followed = autoshard.compile(copy.deepcopy(model), mesh_for("zero2", 4), args, plan=again)
    assert followed.source == autoshard.compile(model, mesh_for("zero2", 4), args, like="zero2").source
    assert "zero=2" in followed.source
    assert "GATHERS" not in followed.source


@pytest.fixture(autouse=True, scope="module")
def once() -> Iterator[None]:
    """No mesh matters to a capture."""
    with captured_once():
        yield


@cache
def small() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Parameters weigh more than activations."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 128, (4, 8), generator=torch.Generator().manual_seed(0))
    return Gpt(replace(GptConfig.tiny(), layers=6)), (tokens, tokens)


def gpt(like: str, micro_batches: int = 1) -> Any:
    model, args = small()
    wishes = Wishes(like=like, micro_batches=micro_batches)
    return compiled(model, autoshard.Mesh({"dp": 2}, WIRE), args, {}, wishes, training=True)


def test_kept_bytes_are_those_that_autograd_keeps() -> None:
    found = gpt("zero1")
    assert found.plan.memory.activations == pytest.approx(kept_bytes(found), rel=0.005)


def test_memory_by_stage() -> None:
    """Adam's state is cut from stage 1 on; stages 1 and 2 keep gathered parameters, 3 does not; whole gradients are DDP's."""
    plans = {like: gpt(like).plan.memory for like in ("ddp", "zero1", "zero2", "fsdp")}
    psi = plans["ddp"].parameters
    assert plans["zero1"] == plans["zero2"]
    assert plans["zero1"].parameters == plans["fsdp"].parameters == pytest.approx(psi / 2, rel=0.05)
    assert plans["zero1"].optimizer == pytest.approx(psi, rel=0.05)
    kept = plans["zero1"].activations - plans["fsdp"].activations
    assert 0.5 * psi < kept <= psi
    assert plans["fsdp"].peak < plans["zero2"].peak < plans["ddp"].peak
    several = {like: gpt(like, 4).plan.memory for like in ("zero1", "zero2")}
    assert several["zero2"].peak < several["zero1"].peak


def test_no_sync_reduces_every_time() -> None:
    """As with FSDP: what a user accumulates himself are gradients of shards."""
    model, args = made()
    sharded = autoshard.compile(copy.deepcopy(model), mesh_for("zero1", 4), args, like="zero1")

    log = begun(sharded)
    with sharded.no_sync():
        sharded(*args).backward()
    once = sent(log)
    sharded(*args).backward()
    assert sent(log) == {key: 2 * n for key, n in once.items()}
    model(*args).backward()
    expected = {n: 2 * p.grad for n, p in model.named_parameters()}
    for n, p in sharded.named_parameters():
        torch.testing.assert_close(p.grad, expected[n], rtol=1e-9, atol=0)


def test_the_plan_says_what_a_step_does_once() -> None:
    model, args = made()
    times = []
    for like in ("zero1", "zero2", "fsdp"):
        plan = autoshard.plan(model, mesh_for(like, 4), args, like=like, micro_batches=4)
        times.append([{c.times for c in plan.collectives if c.kind == k} for k in ("all_gather", "reduce_scatter")])
    assert times == [[{1}, {1}], [{1}, {4}], [{4}, {4}]]


def test_stages_of_several_axes() -> None:
    """What one axis gathers again is gathered again along all; beside tensor parallelism only data's axis is gathered."""
    model, args = made()
    mesh = autoshard.Mesh({"a": 2, "b": 2}, WIRE)
    mixed = autoshard.plan(model, mesh, args, like={"a": "zero2", "b": "fsdp"})
    assert mixed.zero == {}
    beside = autoshard.plan(model, mesh, args, like={"a": "zero1", "b": "megatron"})
    assert set(beside.zero.values()) == {1}
    assert beside.zero.keys() <= {n for n, _ in Stack().named_parameters()}


def test_the_free_plan_keeps_what_it_gathers_where_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = autoshard.models.get("gpt:small")
    with torch.device("meta"):
        model, (args, kwargs) = reference.model(), reference.inputs(batch=64)
    graph, mesh = captured(model, args, kwargs, training=True), autoshard.Mesh({"dp": 8})
    free = planned(graph, mesh, Wishes())[1]
    assert set(free.zero.values()) == {2}
    assert planned(graph, mesh, Wishes(memory_budget=0.9 * free.memory.peak))[1].zero == {}
    monkeypatch.setattr("autoshard.passes.propagate.planner.Planner.keeping", None)
    again = planned(graph, mesh, Wishes())[1]
    assert again.zero == {}
    assert free.cost.total_s < again.cost.total_s

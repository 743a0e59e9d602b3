"""ZeRO in one process: bytes, numbers and memory of its stages."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import captured_once
from memory_truth import kept_bytes, ranks_of
from prefetch_cases import gathered_in_two_steps
from torch import nn
from zero_cases import COUNTS, LIKE, WIRE, Stack, begun, by_stage, made, mesh_for, sent, trains

import autoshard
from autoshard import Link
from autoshard.compiler import capture_graph, compile_model
from autoshard.hardware import PRESETS
from autoshard.models import Gpt, GptConfig
from autoshard.passes.ir.assignment import Assignment
from autoshard.passes.ir.memory import Memory
from autoshard.passes.memory import lower_and_simulate
from autoshard.passes.propagate.named_strategies import NamedStrategy, resolve_like
from autoshard.passes.propagate.objective import objective
from autoshard.passes.propagate.planner import Planner, SearchSettings
from autoshard.plans.options import CompileOptions
from autoshard.plans.planning import plan_graph
from autoshard.runtime.transport.communicator import MicroBatchStep

pytestmark = pytest.mark.usefixtures("remembering")


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("like", LIKE)
def test_bytes_and_numbers(like: str, count: int) -> None:
    trains(like, 4, count)


def test_a_gradient_that_is_left_behind_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the sums of all micro-batches but the last are lost."""
    monkeypatch.setattr(
        "autoshard.runtime.transport.communicator.SharedGather.add",
        lambda self, new: setattr(self, "gradients", list(new)),
    )
    with pytest.raises(AssertionError):
        trains("zero1", 4, 4, steps=1)


def test_parameters_of_the_step_before_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: what was gathered outlives its step, and the optimizer's work is not seen."""
    kept: list[MicroBatchStep] = []

    def enter(self: Any, index: int, count: int, stage: int = 0) -> None:
        self.micro_batch = (index, count)
        kept[:] = kept or [MicroBatchStep()]
        self.step = kept[0] if count > 1 else None
        kept[0].enter(index)

    monkeypatch.setattr("autoshard.runtime.transport.communicator.Communicator.enter", enter)
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
    opts = CompileOptions(like=like, micro_batches=micro_batches, exact_dropout=True)
    return compile_model(model, autoshard.Mesh({"dp": 2}, WIRE), args, {}, opts, training=True)


@pytest.mark.slow_cases("ddp")
@pytest.mark.parametrize("like", ["ddp", "zero1", "zero2"])
def test_kept_bytes_are_those_that_autograd_keeps(like: str) -> None:
    found = gpt(like)
    assert found.plan.memory.activations == kept_bytes(found)


@pytest.mark.slow_cases("1")
@pytest.mark.parametrize("count", COUNTS)
def test_memory_by_stage(count: int) -> None:
    """The formula of ZeRO's paper on two ranks, to the byte; zero_cases.py counts the same on ranks that are processes.

    Whole copies of what the backward reads are kept by stages 1 and 2, not by 3; whole sums of gradients by 1 alone.
    """
    compiled = {like: gpt(like, count) for like in ("ddp", "zero1", "zero2", "fsdp")}
    plans = {like: found.plan.memory for like, found in compiled.items()}
    parameters = dict(small()[0].named_parameters())
    psi = sum(p.nbytes for p in parameters.values())
    unread = sum(p.nbytes for n, p in parameters.items() if is_unread(n))
    for like, memory in plans.items():
        wanted = by_stage(like, 2, psi)
        assert {part: getattr(memory, part) for part in wanted} == wanted
        assert sum(x.nbytes for x in ranks_of(compiled[like])[2][0].values()) == wanted["parameters"]
        whole = psi - unread if like in ("zero1", "zero2") else 0
        assert memory.activations - plans["ddp"].activations == whole
    assert plans["fsdp"].peak < plans["zero2"].peak
    sums = psi - psi / 2 if count > 1 else 0
    assert plans["zero1"].peak - plans["zero2"].peak >= sums
    assert count > 1 or plans["zero1"] == plans["zero2"]


class Both(nn.Module):
    """Autograd brings one tensor as the gradient of both parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.linspace(a, 2, 8)) for a in (0, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * (self.one + self.other)).square().mean()


def test_one_gradient_of_two_parameters_is_summed_for_each() -> None:
    """The micro-batches of a step add up without writing into what autograd brought."""
    model, x = Both().double(), torch.randn(8, 8).double()
    model(x).backward()
    sharded = autoshard.compile(
        copy.deepcopy(model), autoshard.Mesh({"dp": 2}, WIRE), (x,), like="zero1", micro_batches=2
    )
    sharded(x).backward()
    found = sharded.full_gradients()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-12, atol=0)


@pytest.mark.slow_cases("zero2")
@pytest.mark.slow
@pytest.mark.parametrize("like", ["zero1", "zero2"])
def test_micro_batches_in_flight_share_what_is_gathered(like: str) -> None:
    """In a stage of a pipeline: activations are there once for each, gathered parameters once for all."""
    model, (tokens, labels) = small()
    graph, mesh = capture_graph(model, (tokens, labels), {}, training=True), autoshard.Mesh({"dp": 2}, WIRE)
    whole = sum(p.nbytes for n, p in model.named_parameters() if not is_unread(n))

    def memory(like: str, micro_batches_held: int, budget: float | None = None) -> Memory:
        opts = CompileOptions(like=like, memory_budget=budget)
        return plan_graph(graph, mesh, opts, settings=SearchSettings(micro_batches_held))[1].memory

    plain, several, alone = memory("ddp", 8), memory(like, 8), memory(like, 1)
    assert several.gathered == alone.gathered == whole
    assert several.activations - plain.activations == alone.activations - plain.activations / 8 == whole
    assert sum(several.at_peak.values()) == several.peak
    tight = several.peak - 0.8 * plain.activations
    assert memory(like, 8, tight).peak <= tight


def is_unread(name: str) -> bool:
    """Whether the backward of Gpt does without the value: positions are looked up, biases of products added."""
    return name == "position_embedding.weight" or (name.endswith(".bias") and "norm" not in name)


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


class Mixed(nn.Module):
    """Three weights of different sizes, for activations that are as large."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 192, bias=False), nn.Linear(192, 64, bias=False)
        self.head = nn.Linear(64, 96, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.gelu(self.down(F.gelu(self.up(x))))).square().mean()


SLOW = autoshard.Mesh({"dp": 4}, replace(PRESETS["h100"], node=Link(1e-6, 1e8), overlap=0.5))
"""gathers take time"""


@pytest.mark.slow_cases("4")
@pytest.mark.parametrize("count", [1, 4])
def test_what_is_kept_is_the_best_of_all_mixtures(count: int) -> None:
    """The batch is cut; where parameters lie, and the stage of each, is chosen under limits on what is held."""
    x = torch.zeros(64, 64, requires_grad=True)
    graph = replace(capture_graph(Mixed(), (x,), {}, training=True), passes=count)
    asked = NamedStrategy(resolve_like("fsdp", graph, SLOW).asked)

    def seconds(planner: Planner, limit: float) -> float:
        try:
            return planner.within(limit).solution.cost
        except autoshard.PlanError:
            return math.inf

    free, parameters = Planner(graph, SLOW, {}, asked), sorted(graph.parameters)
    stages = itertools.product((0, 2, 1) if count > 1 else (0, 2), repeat=len(parameters))
    pinned = [Planner(graph, SLOW, {}, replace(asked, zero=dict(zip(parameters, s, strict=True)))) for s in stages]
    _, built = free.network(limited=True)

    def held_by(assignment: Assignment) -> float:
        return built.kept[0].used(built.network, assignment.solution.choice)

    least, most = held_by(free.least()), held_by(free.within(1e18))
    mixed = 0
    for share in (0.15, 0.4, 0.7):
        limit = least + share * (most - least)
        assignment = free.within(limit)
        held = held_by(assignment)
        assert held <= limit
        assert assignment.solution.cost == pytest.approx(min(seconds(p, limit) for p in pinned), rel=1e-9)
        assert objective(assignment).total_s == pytest.approx(assignment.solution.cost, rel=1e-9)
        program, memory = lower_and_simulate(assignment, "adamw")
        found = {s.call.kwargs.get("zero", 0) for s in program.statements if s.call.fn == "gather_parameters"}
        mixed += len(found) > 1
        if count == 1:
            assert held == pytest.approx(memory.parameters + memory.optimizer + memory.activations)
    assert mixed


def test_a_mixed_plan_trains() -> None:
    """One weight is kept and two are gathered again; the bias of the one that leads its block goes with it."""
    torch.manual_seed(0)
    model, x = Mixed().double(), torch.randn(16, 64).double()
    model.down.bias = nn.Parameter(torch.randn(64).double())
    mesh = autoshard.Mesh({"dp": 2}, WIRE)
    plan = replace(autoshard.plan(model, mesh, (x,), like="fsdp", training=True), zero={"down.weight": 2})
    sharded = autoshard.compile(model, mesh, (x,), plan=plan, training=True)
    gathers = [c for c in sharded.plan.collectives if c.kind == "all_gather"]
    assert {c.value for c in gathers if c.phase == "backward"} == {"head.weight", "up.weight"}
    assert sharded.source.count("zero=2") == 1
    assert autoshard.verify(model, mesh, (x,), plan=plan, steps=2, rtol=1e-9).ok


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x)).square().mean()


def test_a_vector_takes_the_stage_of_the_matrix_it_goes_with() -> None:
    """Also where it comes first in their bucket, and the plan says otherwise."""
    model, x, mesh = Normed(), torch.randn(16, 64), autoshard.Mesh({"dp": 2}, WIRE)
    plan = autoshard.plan(model, mesh, (x,), like="fsdp", training=True)
    for zero, kept in (({"norm.weight": 2, "norm.bias": 2}, 0), ({"head.weight": 2}, 1)):
        sharded = autoshard.compile(model, mesh, (x,), plan=replace(plan, zero=zero), training=True)
        assert sharded.source.count("runtime.gather_parameters") == 1
        assert sharded.source.count("zero=2") == kept


@pytest.mark.slow
def test_the_free_plan_keeps_what_it_gathers_where_memory_allows() -> None:
    with torch.device("meta"):
        config = replace(GptConfig.small(), layers=6, dropout=0.0)
        model, tokens = Gpt(config), torch.zeros(64, 256, dtype=torch.long)
    graph = capture_graph(model, (tokens, tokens), {}, training=True)
    mesh = autoshard.Mesh({"dp": 8}, replace(PRESETS["h100"], dtypes=(), updates=5e11))
    free = plan_graph(graph, mesh, CompileOptions())[1]
    assert set(free.zero.values()) == {2}
    tight = plan_graph(graph, mesh, CompileOptions(memory_budget=0.8 * free.memory.peak))[1]
    assert tight.memory.peak <= 0.8 * free.memory.peak
    recomputed = sum(r.seconds for r in tight.recomputed)
    assert 0 < recomputed == pytest.approx(tight.cost.total_s - free.cost.total_s, rel=1e-3)  # all that memory costs


def test_what_is_gathered_in_two_steps_is_gathered_again_in_two() -> None:
    gathered_in_two_steps()

"""What happens once a step, whatever the number of micro-batches, is priced so where stages are planned and reported."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from autoshard import Mesh
from autoshard.compiler import capture_graph, compile_graph
from autoshard.hardware import PRESETS, Link
from autoshard.models import Gpt, GptConfig
from autoshard.plans import stages
from autoshard.plans.options import CompileOptions
from autoshard.plans.plan import Plan
from autoshard.report.pipeline import StageTimes, stage_times
from autoshard.report.record import Staged

SLOW = dataclasses.replace(PRESETS["h100"], node=Link(1e-6, 1e10), kernel_latency=1e-6)


class WithLoss(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().sum()


def planned(batches: int = 16, like: str | None = None) -> Plan:
    """Of a step of so many micro-batches of four rows."""
    with torch.device("meta"):
        model = Gpt(GptConfig(500, 128, 256, 4, 4, dropout=0.0))
        tokens = torch.empty(4 * batches, 128, dtype=torch.long)
    graph = capture_graph(model, (tokens,), {"labels": tokens}, training=True)
    asked = None if like is None else {"dp": like}
    return compile_graph(
        graph, Mesh({"pp": 2, "dp": 4}, SLOW), CompileOptions(stages="pp", micro_batches=batches, like=asked)
    ).plan


def staged_in(plan: Plan) -> Staged:
    assert plan.staged is not None
    return plan.staged


def times(plan: Plan) -> list[StageTimes]:
    """Of every stage, without messages, and without what adds the gradients of micro-batches, which the search leaves out."""
    return [stage_times(dataclasses.replace(one, training=False)) for one in staged_in(plan).plans]


@pytest.mark.slow
def test_a_search_is_no_worse_than_an_expert() -> None:
    """To sum gradients once a step takes less than to exchange activations in every micro-batch."""
    found = planned().cost.total_s
    assert found <= 1.02 * min(planned(like=like).cost.total_s for like in ("ddp", "fsdp", "megatron"))


@pytest.mark.slow
def test_where_memory_is_short_a_search_is_no_worse_than_an_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that stay gathered are found, too, which a stage alone is not offered."""
    halves = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2))
    model = WithLoss(nn.Sequential(*halves))
    graph = capture_graph(model, (torch.randn(64, 64),), {}, training=True)

    def step(budget: float, like: str | None = None) -> float:
        opts = CompileOptions(stages="pp", micro_batches=2, like=like, memory_budget=budget)
        plan = compile_graph(graph, Mesh({"pp": 2, "dp": 4}, "cpu"), opts).plan
        assert plan.memory.peak <= budget
        return plan.cost.total_s

    short, ample = step(0.6e6), step(0.7e6)
    assert ample <= short <= min(step(0.6e6, like) for like in ("zero2", "fsdp"))
    monkeypatch.setattr(stages, "_is_memory_tight", lambda done: False)
    assert step(0.6e6) > 1.2 * short


@pytest.mark.slow_cases("ddp")
@pytest.mark.parametrize("like", ["ddp", "zero1"])
def test_a_step_of_a_stage_is_its_micro_batches_and_what_comes_once(like: str) -> None:
    plan = planned(like=like)
    for one, took in zip(staged_in(plan).plans, times(plan), strict=True):
        step = one.micro_batches * took.batch.work + took.once_s
        # sums hide behind the backward, or behind all of a step
        assert step == pytest.approx(one.cost.total_s, rel=0.03)
        assert took.once_s > 0.1 * step


def test_what_collective_matmuls_hide_takes_no_time_of_a_stage() -> None:
    with torch.device("meta"):
        model = Gpt(GptConfig(512, 2048, 4096, 32, 2, dropout=0.0)).bfloat16()
        tokens = torch.empty(8, 2048, dtype=torch.long)
    graph = capture_graph(model, (tokens,), {"labels": tokens}, training=True)
    plan = compile_graph(
        graph,
        Mesh({"pp": 2, "tp": 4}, "h100"),
        CompileOptions(stages="pp", micro_batches=4, like={"tp": "megatron-sp"}),
    ).plan
    for one, took in zip(staged_in(plan).plans, times(plan), strict=True):
        step = one.micro_batches * took.batch.work + took.once_s
        assert step == pytest.approx(one.cost.total_s, rel=0.03)
        assert sum(c.hidden_s for c in one.collectives) > 0.04 * step


@pytest.mark.slow
@pytest.mark.parametrize("like", ["ddp", "zero1", "zero2"])
def test_more_micro_batches_take_as_long_each(like: str) -> None:
    """What comes once stays as it is: the sums of gradients, of which the first cannot hide, what ZeRO gathers, the update."""
    few, more = (times(planned(batches, like)) for batches in (4, 16))
    for a, b in zip(few, more, strict=True):
        assert b.batch.forward == pytest.approx(a.batch.forward, rel=1e-3)  # the loss is a part of the batch's
        assert b.batch.backward == pytest.approx(a.batch.backward, rel=1e-3)
        assert b.once_s == pytest.approx(a.once_s, rel=1e-3)


@pytest.mark.slow
def test_gradients_that_zero_sums_once_are_whole_until_then() -> None:
    """Every rank keeps, and adds to, the sums of its micro-batches' gradients, as in data parallelism."""
    found = {like: planned(like=like) for like in ("ddp", "zero1", "zero2")}
    held = {like: staged_in(plan).plans[1].memory.at_peak["gradients"] for like, plan in found.items()}
    assert held["zero1"] == pytest.approx(held["ddp"], rel=0.1)  # at the peak a bucket is scattered
    assert held["zero1"] > 3 * held["zero2"]
    alone = {like: times(plan)[1].compute_s for like, plan in found.items()}
    added = {like: stage_times(staged_in(plan).plans[1]).compute_s - alone[like] for like, plan in found.items()}
    assert added["zero1"] == pytest.approx(added["ddp"])
    assert added["zero1"] > 3 * added["zero2"]

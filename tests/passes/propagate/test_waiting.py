"""What ranks wait for one another before messages that operations wait for: measured, and priced."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drawn_models import compiled, drawn
from told_clocks import Told

import autoshard
from autoshard.check import collective_timing
from autoshard.hardware import PRESETS, Hardware
from autoshard.layout import Layout, Owned, R, Shard
from autoshard.models import Llama, LlamaConfig
from autoshard.passes.capture.export import capture
from autoshard.passes.ir.graph import TensorType
from autoshard.passes.propagate.edges import conversion_parts
from autoshard.passes.propagate.prices.collective_overheads import SkewSeconds, synchronization_skew
from autoshard.passes.propagate.prices.roofline import optimizer_seconds
from autoshard.passes.redistribute.pricing import MessageShares
from autoshard.passes.search.limits import LIMITS
from autoshard.plans.plan import Plan

WAITS = ((1e-4, 1e-4), (1e-3, 2e-4), (1e-2, 4e-4))


def hardware(waits: tuple[tuple[float, float], ...]) -> Hardware:
    return replace(PRESETS["cpu"], waiting=waits)


def test_after_more_compute_ranks_wait_longer() -> None:
    assert [hardware(WAITS).waits(x) for x in (0.0, 1e-4, 5.5e-4, 1e-3, 1.0)] == pytest.approx(
        [1e-4, 1e-4, 1.5e-4, 2e-4, 4e-4]
    )
    assert PRESETS["cpu"].waits(1.0) == 0.0
    assert Hardware.from_dict(hardware(WAITS).to_dict()) == hardware(WAITS)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_searched_is_what_the_plan_costs(seed: int) -> None:
    """The search, the plan and its list of collectives count the same waits."""
    model, x = drawn(r := random.Random(seed))
    axes = r.choice([{"tp": 4}, {"dp": 2, "tp": 2}])
    graph = capture(model.train(), (x,), {}, training=True)
    found = compiled(graph, autoshard.Mesh(axes, hardware(((0.0, 1e-3), (r.choice((1e-6, 1.0)), 2e-3)))))
    cost = found.plan.cost
    assert cost.total_s == pytest.approx(found.program.assignment.solution.cost, rel=1e-9)
    assert found.plan.lower_bound == pytest.approx(cost.total_s, rel=LIMITS.enough)
    sent = sum(c.seconds for c in found.plan.collectives)
    assert sent + cost.local_s == pytest.approx(cost.comm_s - cost.merged_s, rel=1e-9)
    free = compiled(graph, autoshard.Mesh(axes, hardware(()))).plan.cost.total_s
    assert cost.total_s >= free * (1 - 1e-9)


def planned(like: Any, waits: float, **more: Any) -> Plan:
    with torch.device("meta"):
        model, tokens = Llama(LlamaConfig(512, 256, 768, 4, 4, 3)).train(), torch.zeros(8, 64, dtype=torch.long)
    mesh = autoshard.Mesh({"x": 2}, hardware(((0.0, waits),) if waits else ()))
    return autoshard.plan(model, mesh, (tokens,), {"labels": tokens}, training=True, like=like, **more)


@pytest.mark.slow_cases("megatron-12-20")
@pytest.mark.parametrize(
    ("like", "least", "most"),
    [
        ("megatron", 12, 20),
        ("fsdp", 1, 4),
        *(pytest.param(like, 1, 4, marks=pytest.mark.slow) for like in ("ddp", "zero2")),
    ],
)
def test_only_messages_that_are_waited_for_pay(like: str, least: int, most: int) -> None:
    """Tensor parallelism has two of them per layer and direction; gathers of parameters and sums of gradients none."""
    without, waits = planned(like, 0.0), planned(like, 1e-3)
    paid = (waits.cost.total_s - without.cost.total_s) / 1e-3
    assert least - 1e-6 <= paid <= most
    assert waits.cost.schedule_s - without.cost.schedule_s == pytest.approx(paid * 1e-3, rel=0.2)
    assert [c.kind for c in waits.collectives] == [c.kind for c in without.collectives]


@pytest.mark.slow
def test_what_is_made_again_waits_again() -> None:
    once, again = (planned("megatron-sp", 1e-3, recompute=x).cost.total_s for x in ("none", "blocks"))
    free_once, free_again = (planned("megatron-sp", 0.0, recompute=x).cost.total_s for x in ("none", "blocks"))
    assert again - free_again >= once - free_once + 3e-3 - 1e-9  # a gather inside of each block


@pytest.mark.parametrize("rows", [8, 512, 4096])
def test_ranks_wait_by_the_line_between_two_products_and_all_of_them(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, real = list[float](), Hardware.waits

    def noted(hardware: Hardware, computed: float) -> float:
        asked.append(computed)
        return real(hardware, computed)

    def of(layers: int, waits: tuple[tuple[float, float], ...] = WAITS) -> SkewSeconds:
        model, x = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(layers)]), torch.empty(rows, 512)
        return synchronization_skew(capture(model, (x,), {}, training=True), autoshard.Mesh({"tp": 2}, hardware(waits)))

    monkeypatch.setattr(Hardware, "waits", noted)
    found = of(8)
    assert asked[1] == pytest.approx(4 * asked[0])
    for computed in asked:
        assert found.message + found.share * computed == pytest.approx(real(hardware(WAITS), computed))
    assert of(1).share == 0.0  # two products are more than there are
    assert of(8, ()) == SkewSeconds(0.0, 0.0)


@pytest.mark.slow
def test_who_sends_nothing_waits_at_the_end_of_the_step() -> None:
    """By the share of all it computes, the optimizer included."""
    waits = ((1e-4, 1e-4), (1e-1, 1e-2))
    with torch.device("meta"):
        model, tokens = Llama(LlamaConfig(512, 256, 768, 4, 4, 3)).train(), torch.zeros(8, 64, dtype=torch.long)

    def of(waits: tuple[tuple[float, float], ...]) -> Plan:
        mesh = autoshard.Mesh({"x": 2}, hardware(waits))
        return autoshard.plan(model, mesh, (tokens,), {"labels": tokens}, training=True, like="replicate")

    free, paid = of(()), of(waits)
    assert not paid.collectives
    share = paid.cost.total_s / free.cost.total_s - 1.0
    assert share == pytest.approx(9.9e-3 / 99.9e-3, rel=1e-6)
    assert paid.cost.optimizer_s == pytest.approx((1.0 + share) * free.cost.optimizer_s)
    assert paid.cost.schedule_s == pytest.approx((1.0 + share) * free.cost.schedule_s, rel=1e-3)


def test_waits_are_measured_beyond_latencies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum takes a tenth of the time of the layers before it, as ranks differ: beyond what it does after 2 ms."""
    clock: Any = Told()
    layers = 0

    def layer() -> None:
        nonlocal layers
        clock.now, layers = clock.now + 1e-3, layers + 1

    def add(group: None, x: torch.Tensor) -> Any:
        nonlocal layers
        clock.now, layers = clock.now + 5e-4 + 1e-4 * layers, 0
        return SimpleNamespace(wait=lambda: None)

    comm = SimpleNamespace(process_group=lambda axes: None, all_reduce=add)
    monkeypatch.setattr(collective_timing, "TorchCommunicator", lambda axes, ranks: comm)
    monkeypatch.setattr(collective_timing.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(collective_timing, "agreed", lambda value, pick: value)
    monkeypatch.setattr(collective_timing, "slowest_ranks", lambda found: found)
    monkeypatch.setattr(collective_timing, "_layer_step", lambda clock: layer)
    found = collective_timing.RankSkew(clock).seconds()
    assert [after for after, _ in found] == [2e-3, 8e-3, 2e-2]
    assert [seconds for _, seconds in found] == pytest.approx([0.0, 6e-4, 1.8e-3], rel=1e-2)


def test_what_is_made_of_parameters_alone_pays_nothing() -> None:
    """Such as a weight's cast: it can move in time as the weight does."""
    type_ = TensorType((512, 512), torch.float32, True)
    mesh = autoshard.Mesh({"x": 2}, PRESETS["cpu"])
    whole, cut = [Layout(mesh, [R])], [Layout(mesh, [Shard(0)])]
    free, paid = (
        [float(conversion_parts(type_, cut, whole, None, movable, share).blocking[0, 0]) for movable in (True, False)]
        for share in (MessageShares(), MessageShares(waits=1e-3))
    )
    assert paid[0] == free[0]
    assert paid[1] - free[1] == pytest.approx(2e-3)  # forward and backward


def test_a_rank_that_owns_a_table_alone_has_the_cores_of_those_that_wait() -> None:
    type_ = TensorType((512, 512), torch.float32, True, tables=1)
    shared, apart = (
        optimizer_seconds(
            "adamw", type_, (Owned(),), autoshard.Mesh({"x": 4}, replace(PRESETS["cpu"], sharing=sharing))
        )
        for sharing in (((1, 0.5), (2, 0.5), (4, 1.0)), ())
    )
    assert shared == pytest.approx(apart / 2)

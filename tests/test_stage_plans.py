"""Plans of models in stages: where they are cut, what the step takes, what the ranks hold."""

from __future__ import annotations

import itertools

import pytest
import torch

from autoshard import Mesh
from autoshard.compiler import build, captured
from autoshard.errors import PlanError
from autoshard.models import Gpt, GptConfig
from autoshard.passes.ir.graph import Graph
from autoshard.passes.microbatch import micro_batched
from autoshard.passes.pipeline import Pieces, boundaries
from autoshard.plans.pipeline import pipeline
from autoshard.plans.plan import Plan
from autoshard.plans.record import Staged
from autoshard.plans.wishes import Wishes

LAYERS, STAGES, BATCHES = 6, 3, 6
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


def gpt(vocab: int = 500) -> Graph:
    with torch.device("meta"):
        model = Gpt(GptConfig(vocab, 128, 128, 4, LAYERS, dropout=0.0))
        tokens = torch.empty(BATCHES, 128, dtype=torch.long)
    return captured(model, (tokens,), {"labels": tokens}, training=True)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return gpt()


def planned(graph: Graph, schedule: str = "1f1b", **asked: object) -> Plan:
    wishes = Wishes(stages="pp", schedule=schedule, micro_batches=BATCHES, **asked)  # type: ignore[arg-type]
    return build(graph, Mesh({"pp": STAGES, "tp": 2}), wishes).plan


@pytest.fixture(scope="module")
def plans(graph: Graph) -> dict[str, Plan]:
    return {schedule: planned(graph, schedule) for schedule in SCHEDULES}


@pytest.fixture(params=SCHEDULES)
def plan(request: pytest.FixtureRequest, plans: dict[str, Plan]) -> Plan:
    return plans[request.param]


def staged_in(plan: Plan) -> Staged:
    assert plan.staged is not None
    return plan.staged


def test_stages_are_whole_layers(plans: dict[str, Plan]) -> None:
    for schedule in ("gpipe", "1f1b", "zero_bubble"):
        stages = staged_in(plans[schedule]).plans
        found = [{c.fqn.split(".")[1] for c in p.choices.values() if c.fqn.startswith("blocks.")} for p in stages]
        assert found == [{"0", "1"}, {"2", "3"}, {"4", "5"}]


def test_the_step_is_work_communication_and_waiting(plan: Plan) -> None:
    cost, step = plan.cost, pipeline(plan)
    assert cost.total_s == pytest.approx(cost.compute_s + cost.exposed_s + cost.bubble_s)
    assert cost.total_s >= step.step_s > 0
    assert cost.total_s - step.step_s < 0.2 * cost.total_s  # the update, and sums of gradients
    assert 0 < cost.bubble_s < cost.total_s / 2
    assert plan.from_json(plan.to_json()).cost == cost
    assert pipeline(plan.from_json(plan.to_json())) == step


def test_schedules_differ_as_they_should(plans: dict[str, Plan]) -> None:
    bubbles = {schedule: p.cost.bubble_s for schedule, p in plans.items()}
    assert bubbles["interleaved"] < bubbles["1f1b"]
    assert bubbles["zero_bubble"] < bubbles["1f1b"]
    assert plans["gpipe"].memory.activations > 1.5 * plans["1f1b"].memory.activations
    assert plans["gpipe"].memory.peak > plans["1f1b"].memory.peak


def test_earlier_stages_hold_more_micro_batches(plans: dict[str, Plan]) -> None:
    first, second, last = (p.memory for p in staged_in(plans["1f1b"]).plans)
    all_ahead = [p.memory for p in staged_in(plans["gpipe"]).plans]
    for memory, flying, whole in zip((first, second, last), (3, 2, 1), all_ahead, strict=True):
        assert memory.activations / flying == pytest.approx(whole.activations / BATCHES)
        assert sum(memory.at_peak.values()) == pytest.approx(memory.peak)
        assert memory.at_peak["gradients"] == memory.gradients  # those of the micro-batches before


def test_within_a_budget_the_first_stages_make_more_again(graph: Graph, plans: dict[str, Plan]) -> None:
    free = plans["1f1b"].memory.peak
    tight = planned(graph, memory_budget=0.8 * free)
    assert tight.memory.peak <= 0.8 * free
    assert tight.recomputed
    assert not plans["1f1b"].recomputed
    with pytest.raises(PlanError, match="least peak found"):
        planned(graph, memory_budget=0.05 * free)


def test_a_heavy_head_has_fewer_layers_beside_it(graph: Graph) -> None:
    def layers(graph: Graph) -> list[int]:
        one, _ = micro_batched(graph, BATCHES)
        found = boundaries(
            Pieces(one, Mesh({"tp": 2}), Mesh({"pp": STAGES, "tp": 2}).link("pp")), "1f1b", STAGES, BATCHES
        )
        firsts = [i for i, n in enumerate(one.nodes) if n.fqn.startswith("blocks.") and n.fqn.endswith("norm_1")]
        return [sum(low <= i < high for i in firsts) for low, high in itertools.pairwise((0, *found, len(one.nodes)))]

    assert layers(graph) == [2, 2, 2]
    assert layers(gpt(vocab=500_000))[-1] == 0


def test_more_stages_than_operations_are_refused(graph: Graph) -> None:
    pieces = Pieces(graph, Mesh({"tp": 2}), Mesh({"pp": 2, "tp": 2}).link("pp"))
    with pytest.raises(PlanError, match="operations to cut between"):
        boundaries(pieces, "1f1b", 1000, 8)

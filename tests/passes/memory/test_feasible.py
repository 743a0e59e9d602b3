"""What fits one mesh fits the mesh of as many ranks in more axes: a plan of the one is a plan of the other."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autoshard import Mesh, models
from autoshard.compiler import capture_graph
from autoshard.errors import PlanError
from autoshard.hardware import PRESETS
from autoshard.models.gpt import Gpt, GptConfig
from autoshard.passes.ir.assignment import Assignment
from autoshard.passes.ir.graph import Graph
from autoshard.passes.memory import fit, lower_and_simulate, search_within_memory
from autoshard.passes.propagate.planner import Planner


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU()),
            nn.Linear(256, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture_graph(Loss(), (torch.zeros(64, 64),), {}, training=True)


def planner(graph: Graph, **axes: int) -> Planner:
    return Planner(graph, Mesh(axes, "h100"), {}, recompute="auto")


@pytest.mark.slow
def test_a_tight_budget_of_one_axis_is_kept_on_two(graph: Graph) -> None:
    flat = planner(graph, x=8)
    budget = lower_and_simulate(flat.least(), "adamw")[1].peak
    _, memory = search_within_memory(planner(graph, x=8), budget)
    assert memory.peak <= budget
    program, memory = search_within_memory(planner(graph, a=2, b=4), budget)
    assert memory.peak <= budget
    assert any(len(set(choice)) == 1 and choice[0].divides for choice in program.assignment.choices.values())
    with pytest.raises(PlanError, match="The least peak found"):
        search_within_memory(planner(graph, x=8), 0.5 * budget)


def test_what_does_not_fit_is_not_searched_for_in_full(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[Assignment] = []
    monkeypatch.setattr(Planner, "refined", lambda self, rough: searched.append(rough) or rough)
    most = lower_and_simulate(planner(graph, x=8).cheapest(), "adamw")[1].peak
    _, memory = search_within_memory(planner(graph, x=8), most / 1.01)
    assert memory.peak <= most / 1.01
    assert not searched
    search_within_memory(planner(graph, x=8), most)
    assert searched


def test_a_choice_that_is_found_again_is_lowered_once(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[Assignment] = []
    monkeypatch.setattr(fit, "lower_and_simulate", lambda *what: lowered.append(what[0]) or lower_and_simulate(*what))
    monkeypatch.setattr(Planner, "refined", lambda self, rough: replace(rough, solution=rough.solution.bounded(0.0)))
    program, _ = search_within_memory(planner(graph, x=8), math.inf)
    assert len(lowered) == 1
    assert program.assignment.solution.lower_bound == 0.0


def test_a_plan_above_the_budget_is_cut_off(graph: Graph) -> None:
    """By the row of the moment of its peak, exact for this plan; the bound is of all plans as before."""
    search = planner(graph, a=2, b=4)
    found = search.within(1e18)
    memory = lower_and_simulate(found, "adamw")[1]
    live = memory.live()
    assert search.within(1e18).solution.choice == found.solution.choice
    budget = 0.9 * memory.peak
    before = search.bound(budget)
    assert search.cut(live, budget, found)
    within = search.within(1e18)
    assert within.solution.cost > found.solution.cost
    assert lower_and_simulate(within, "adamw")[1].peak < memory.peak
    assert 0 < before < within.solution.cost
    assert search.bound(budget) == pytest.approx(before)


@pytest.mark.slow
def test_what_fits_block_by_block_is_found_where_the_search_may_choose() -> None:
    """Bytes that are made again at once are in no sum of the search's: it would make all of a model again together."""
    reference = models.get("llama")
    args, kwargs = reference.inputs(batch=1, seq=1024)
    model = type(reference.model())(replace(reference.model().config, layers=6)).train()
    deep, mesh = capture_graph(model, args, kwargs, training=True), Mesh({"cp": 4}, "h100")
    blocks = Planner(deep, mesh, {}, recompute="blocks")
    budget = 1.03 * lower_and_simulate(blocks.least(), "adamw")[1].peak
    assert search_within_memory(Planner(deep, mesh, {}, recompute="auto"), budget)[1].peak <= budget


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.05, 0.4])
def test_a_mesh_of_two_axes_is_no_dearer_than_one_of_as_many_ranks(graph: Graph, share: float) -> None:
    """What is not known of a plan before it is simulated differs from plan to plan: the search goes back and forth."""
    flat = planner(graph, x=8)
    least = lower_and_simulate(flat.least(), "adamw")[1].peak
    budget = least + share * (lower_and_simulate(flat.cheapest(), "adamw")[1].peak - least)
    one, two = (
        search_within_memory(planner(graph, **axes), budget)[0].assignment.solution
        for axes in ({"x": 8}, {"a": 2, "b": 4})
    )
    assert two.cost <= one.cost * (1 + 1e-9)
    assert 0 < two.lower_bound <= one.cost * (1 + 1e-9)


@pytest.mark.slow
def test_between_budgets_that_are_met_all_are() -> None:
    """What attention writes down is held by no sum that the search knows: a limit follows it from plan to plan."""
    with torch.device("meta"):
        model, tokens = Gpt(replace(GptConfig.small(), layers=12)), torch.zeros(64, 256, dtype=torch.long)
    graph = capture_graph(model, (tokens, tokens), {}, training=True)

    def dropping() -> Planner:
        hardware = replace(PRESETS["h100"], dtypes=(), updates=5e11)
        return Planner(graph, Mesh({"dp": 8}, hardware), {}, recompute="auto")

    most = lower_and_simulate(dropping().cheapest(), "adamw")[1].peak
    for share in (0.85, 0.8, 0.75):
        assert search_within_memory(dropping(), share * most)[1].peak <= share * most

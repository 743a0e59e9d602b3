"""Plans of models in stages: where they are cut, what the step takes, what the ranks hold."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from autoshard import Mesh
from autoshard.compiler import capture_graph, compile_graph
from autoshard.errors import PlanError
from autoshard.hardware import PRESETS, Hardware, Link, Rate
from autoshard.models import Gpt, GptConfig
from autoshard.passes.ir.assignment import Assignment
from autoshard.passes.ir.graph import Graph
from autoshard.passes.ir.text import show_seconds
from autoshard.passes.microbatch import micro_batched
from autoshard.passes.pipeline import SegmentedGraph, stage_boundaries
from autoshard.passes.propagate.planner import Planner
from autoshard.passes.search.limits import OUTER_LIMITS
from autoshard.plans import stages
from autoshard.plans.options import CompileOptions, KnownLayouts
from autoshard.plans.plan import Plan
from autoshard.plans.reuse import graph_renaming
from autoshard.report.pipeline import pipeline_timeline, stage_times, staged_times
from autoshard.report.record import Staged
from autoshard.viz.html import html
from autoshard.viz.trace import trace_json

LAYERS, STAGES, BATCHES = 6, 3, 6
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


def gpt(vocab: int = 500) -> Graph:
    with torch.device("meta"):
        model = Gpt(GptConfig(vocab, 128, 128, 4, LAYERS, dropout=0.0))
        tokens = torch.empty(BATCHES, 128, dtype=torch.long)
    return capture_graph(model, (tokens,), {"labels": tokens}, training=True)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return gpt()


def planned(graph: Graph, schedule: str = "1f1b", hardware: Hardware = PRESETS["h100"], **asked: object) -> Plan:
    opts = CompileOptions(stages="pp", schedule=schedule, micro_batches=BATCHES, **asked)  # type: ignore[arg-type]
    return compile_graph(graph, Mesh({"pp": STAGES, "tp": 2}, hardware), opts).plan


@pytest.fixture(scope="module")
def plans(graph: Graph) -> dict[str, Plan]:
    return {schedule: planned(graph, schedule) for schedule in SCHEDULES}


@pytest.fixture(params=SCHEDULES)
def plan(request: pytest.FixtureRequest, plans: dict[str, Plan]) -> Plan:
    return plans[request.param]


def staged_in(plan: Plan) -> Staged:
    assert plan.staged is not None
    return plan.staged


@pytest.mark.slow
def test_stages_are_whole_layers(plans: dict[str, Plan]) -> None:
    for schedule in ("gpipe", "1f1b", "zero_bubble"):
        stages = staged_in(plans[schedule]).plans
        found = [{c.fqn.split(".")[1] for c in p.choices.values() if c.fqn.startswith("blocks.")} for p in stages]
        assert found == [{"0", "1"}, {"2", "3"}, {"4", "5"}]


def test_the_step_is_work_communication_and_waiting(plan: Plan) -> None:
    cost, step = plan.cost, pipeline_timeline(plan)
    assert cost.total_s == pytest.approx(cost.compute_s + cost.exposed_s + cost.bubble_s)
    assert cost.total_s >= step.step_s > 0
    assert cost.total_s - step.step_s < 0.2 * cost.total_s  # the update, and sums of gradients
    assert 0 < cost.bubble_s < cost.total_s / 2
    assert plan.from_json(plan.to_json()).cost == cost
    assert pipeline_timeline(plan.from_json(plan.to_json())) == step


def test_ranks_that_share_cores_take_less_where_others_wait(graph: Graph, plans: dict[str, Plan]) -> None:
    two_cores = replace(PRESETS["h100"], sharing=((1, 1 / 3), (2, 1 / 3), (4, 2 / 3), (6, 1.0)))
    cost, alone = planned(graph, hardware=two_cores).cost, plans["1f1b"].cost
    assert cost.total_s == pytest.approx(cost.compute_s + cost.exposed_s + cost.bubble_s)
    assert cost.total_s < 0.9 * alone.total_s
    assert cost.compute_s < alone.compute_s
    assert cost.bubble_s > 0


@pytest.mark.slow
def test_what_stages_take_of_the_processor_is_priced(graph: Graph, plans: dict[str, Plan]) -> None:
    host = replace(PRESETS["h100"], actions=0.01)
    plan, alone = planned(graph, hardware=host), plans["1f1b"]
    assert max(pipeline_timeline(plan).busy_s) == pytest.approx(
        max(pipeline_timeline(alone).busy_s) + 2 * BATCHES * 0.01, rel=0.05
    )
    assert plan.cost.exposed_s >= 2 * BATCHES * 0.01
    assert plan.cost.bubble_s == pytest.approx(plan.cost.total_s - plan.cost.compute_s - plan.cost.exposed_s)
    two_cores = replace(PRESETS["h100"], sharing=((1, 1 / 3), (2, 1 / 3), (6, 1.0)))
    carried = replace(two_cores, carried=1e-6)
    assert planned(graph, hardware=carried).cost.total_s > planned(graph, hardware=two_cores).cost.total_s


def test_ranks_meet_before_and_after_the_schedule(graph: Graph) -> None:
    messages = Rate("permute", 2, 1e-5, 1e11)
    link = Link(1.0, 1e11, (messages, Rate("all_gather", STAGES, 1.0, 1e11)))
    slow = replace(PRESETS["h100"], node=link, kernel_latency=0.0)
    plan = compile_graph(graph, Mesh({"pp": STAGES}, slow), CompileOptions(stages="pp", micro_batches=BATCHES)).plan
    cost = plan.cost
    assert pipeline_timeline(plan).step_s < 0.1
    # what others train, which call it is, whether one failed, and the loss: a second each
    assert 4.0 <= cost.total_s < 4.1
    assert 4.0 <= cost.exposed_s < cost.comm_s + 0.1
    assert cost.total_s == pytest.approx(cost.compute_s + cost.exposed_s + cost.bubble_s)


def test_micro_batches_add_their_gradients(plan: Plan) -> None:
    staged = staged_in(plan)
    for one, found in zip(staged.plans, staged_times(staged, plan.mesh), strict=True):
        alone = stage_times(replace(one, training=False))
        own = 4 * sum(
            math.prod(one.layouts[n].max_local_shape(one.shapes[n])) for n, k in one.kinds.items() if k == "parameter"
        )
        added = (1 - 1 / BATCHES) * 3 * own / one.mesh.hardware.memory_bandwidth
        assert found.batch.backward - alone.batch.backward == pytest.approx(found.compute_s - alone.compute_s)
        assert 0.9 * added < found.compute_s - alone.compute_s < 2 * added  # the bandwidth is not all reached


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


@pytest.mark.slow
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
        found = stage_boundaries(
            SegmentedGraph(one, Mesh({"tp": 2}), Mesh({"pp": STAGES, "tp": 2}).link("pp")), "1f1b", STAGES, BATCHES
        )
        firsts = [i for i, n in enumerate(one.nodes) if n.fqn.startswith("blocks.") and n.fqn.endswith("norm_1")]
        return [sum(low <= i < high for i in firsts) for low, high in itertools.pairwise((0, *found, len(one.nodes)))]

    assert layers(graph) == [2, 2, 2]
    assert layers(gpt(vocab=500_000))[-1] == 0


def test_more_stages_than_operations_are_refused(graph: Graph) -> None:
    pieces = SegmentedGraph(graph, Mesh({"tp": 2}), Mesh({"pp": 2, "tp": 2}).link("pp"))
    with pytest.raises(PlanError, match="operations to split between"):
        stage_boundaries(pieces, "1f1b", 1000, 8)


def test_the_table_has_a_row_per_stage(plan: Plan) -> None:
    staged = staged_in(plan)
    lines = plan.report().splitlines()
    at = next(
        i for i, line in enumerate(lines) if line.startswith(f"Stages along pp: {staged.schedule}, 6 micro-batches")
    )
    rows = [line.split() for line in lines[at + 2 :]][: 2 * len(staged.plans)]
    numbered = [row for row in rows if row and row[0].isdigit()]
    assert [row[:2] for row in numbered] == [[str(i), str(i % STAGES)] for i in range(len(staged.plans))]
    assert f"+ pipeline bubble {show_seconds(plan.cost.bubble_s)}" in " ".join(lines[:8])


def test_the_trace_has_a_process_per_rank(plan: Plan) -> None:
    events = json.loads(trace_json(plan))["traceEvents"]
    work = [e for e in events if e["ph"] == "X" and e["tid"] == 0]
    step, staged = pipeline_timeline(plan), staged_in(plan)
    assert {e["pid"] for e in work} == set(range(STAGES))
    kinds = 3 if staged.schedule == "zero_bubble" else 2
    assert len(work) == kinds * BATCHES * len(staged.plans)
    assert max(e["ts"] + e["dur"] for e in work) == pytest.approx(step.step_s * 1e6)
    sends = [e for e in events if e["ph"] == "X" and e["tid"] == 1]
    assert len(sends) == len(step.messages) == 2 * BATCHES * (len(staged.plans) - 1)
    assert {e["args"]["bytes"] for e in sends} == {size for pair in staged.sent for size in pair}
    if staged.schedule != "interleaved":  # the values between two layers
        assert {e["args"]["bytes"] for e in sends} == {128 * 128 * 4}
    memory = [e["args"]["bytes"] for e in events if e["ph"] == "C"]
    assert memory[0] == pytest.approx(memory[-1])
    assert max(memory) <= plan.memory.peak * (1 + 1e-9)


def test_the_page_holds_the_schedule(plan: Plan) -> None:
    page = html(plan)
    data = json.loads(page.split('<script type="application/json" id="data">')[1].split("</script>")[0])["plans"][0]
    assert [[tuple(row[:3]) for row in rank] for rank in data["pipeline"]["ranks"]] == [
        [tuple(span.action) for span in spans] for spans in pipeline_timeline(plan).ranks
    ]


@pytest.mark.slow
def test_equal_stages_are_searched_once(graph: Graph, plans: dict[str, Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []
    search = Planner.cheapest

    def counted(planner: Planner, rough: bool = False) -> Assignment:
        searched.append(len(planner.graph.nodes))
        return search(planner, rough)

    monkeypatch.setattr(Planner, "cheapest", counted)
    ends = blocks_apart(graph)
    opts = CompileOptions(stages="pp", micro_batches=BATCHES)
    compile_graph(graph, Mesh({"pp": LAYERS, "tp": 2}), opts, KnownLayouts(boundaries=ends))
    assert len(searched) < LAYERS
    searched.clear()
    monkeypatch.setattr(stages, "graph_renaming", lambda a, b: None)
    compile_graph(graph, Mesh({"pp": LAYERS, "tp": 2}), opts, KnownLayouts(boundaries=ends))
    assert len(searched) == LAYERS + 1  # the last also as it were without the first, with which it shares a weight


def blocks_apart(graph: Graph) -> tuple[int, ...]:
    """Boundaries of stages of one block each."""
    nodes = micro_batched(graph, BATCHES)[0].nodes
    return tuple(next(i for i, n in enumerate(nodes) if n.fqn.startswith(f"blocks.{k}.")) for k in range(1, LAYERS))


@pytest.mark.parametrize("like", ["zero2", "fsdp", "megatron"])
def test_equal_stages_follow_every_named_strategy(graph: Graph, like: str) -> None:
    """Their plans are those of one of them under other names; a strategy by axis is planned in every stage."""
    each = [
        compile_graph(
            graph,
            Mesh({"pp": LAYERS, "x": 2}, PRESETS["h100"]),
            CompileOptions(stages="pp", micro_batches=BATCHES, like=asked),
            KnownLayouts(boundaries=blocks_apart(graph)),
        ).plan
        for asked in (like, {"x": like})
    ]
    assert each[0].cost.total_s == pytest.approx(each[1].cost.total_s)
    assert each[0].memory.peak == each[1].memory.peak


@pytest.mark.slow
def test_many_stages_are_planned_in_blocks(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory binds, as those of their block that hold the most micro-batches: nearly as quick, and within memory."""
    planned_apart: list[int] = []
    plan_graph = stages.plan_graph

    def counted(graph: Graph, mesh: Mesh, opts: CompileOptions, *more: Any) -> Any:
        planned_apart[-1] += opts.plan is None
        return plan_graph(graph, mesh, opts, *more)

    monkeypatch.setattr(stages, "plan_graph", counted)
    seconds, budget = [], 6e6
    for most in (LAYERS, 2):
        monkeypatch.setattr(OUTER_LIMITS, "most_stage_plans", most)
        planned_apart.append(0)
        opts = CompileOptions(stages="pp", micro_batches=BATCHES, recompute="auto", memory_budget=budget)
        mesh = Mesh({"pp": LAYERS, "x": 2}, PRESETS["h100"])
        found = compile_graph(graph, mesh, opts, KnownLayouts(boundaries=blocks_apart(graph))).plan
        assert found.memory.peak <= budget
        assert found.recomputed
        seconds.append(found.cost.total_s)
    assert planned_apart[1] < planned_apart[0]
    assert seconds[1] < 1.02 * seconds[0]


@pytest.mark.slow
def test_a_weight_of_several_stages_is_cut_only_where_all_gain() -> None:
    """Within this memory the first stage alone would have the embedding cut, which costs the head more than that gains."""
    with torch.device("meta"):
        model, tokens = Gpt(GptConfig(1000, 128, 256, 8, 4, dropout=0.0)), torch.empty(16, 128, dtype=torch.long)
    shared = capture_graph(model, (tokens,), {"labels": tokens}, training=True)
    opts = CompileOptions(stages="pp", micro_batches=2, memory_budget=60e6)
    free, ddp = (
        compile_graph(shared, Mesh({"pp": 2, "dp": 4}, PRESETS["cpu"]), w).plan
        for w in (opts, replace(opts, like="ddp"))
    )
    assert max(p.memory.peak for p in staged_in(free).plans) <= 60e6
    assert free.cost.total_s <= ddp.cost.total_s


def test_graphs_that_differ_are_not_alike(graph: Graph) -> None:
    one, other = micro_batched(graph, BATCHES)[0], micro_batched(graph, BATCHES // 2)[0]
    assert graph_renaming(one, one) is not None
    assert graph_renaming(one, other) is None
    last = one.nodes[-1]
    assert graph_renaming(one, replace(one, nodes=(*one.nodes[:-1], replace(last, args=())))) is None


def test_every_form_of_a_plan_takes_stages(plan: Plan, tmp_path: Path) -> None:
    schema = json.loads(files("autoshard.viz").joinpath("plan.schema.json").read_text("utf-8"))
    jsonschema.Draft202012Validator(schema).validate(json.loads(plan.to_json()))
    said = plan.explain("blocks.0.up")
    assert "blocks.0" in said
    assert f" in stage 0 of {len(plan.staged.plans)}; " in said  # type: ignore[union-attr]
    assert "@pp" not in said
    assert "–@" not in said  # the axis of stages cuts nothing of an operation
    assert "waiting" in plan.diff(plan)
    for name in ("plan.dot", "plan.txt", "plan.trace.json"):
        plan.visualize(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000

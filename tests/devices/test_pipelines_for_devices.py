"""Stages, micro-batches and schedule searched with the mesh for a number of devices."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

import autoshard
from autoshard.compiler import capture_graph, compile_graph
from autoshard.devices import pipelined_for
from autoshard.devices.pipelines import PipelineEstimates, PipelineSetup, _PipelineSearch
from autoshard.errors import MeshError, PlanError
from autoshard.hardware import PRESETS, Hardware
from autoshard.models import Gpt, GptConfig
from autoshard.passes.ir.graph import Graph
from autoshard.passes.ir.verify import check_graph
from autoshard.passes.microbatch import micro_batched
from autoshard.passes.pipeline.repeated_blocks import without_repeated_blocks
from autoshard.plans.options import CompileOptions
from autoshard.plans.plan import Plan

LAYERS, ROWS = 4, 4
SLOW = replace(
    PRESETS["h100"],
    name="slow_network",
    devices_per_node=1,
    network=replace(PRESETS["h100"].network, bandwidth=1e10, rates=()),
)
"""a device per node, so that all but messages between stages is dear"""


def gpt(layers: int = LAYERS, width: int = 1024) -> tuple[Gpt, torch.Tensor]:
    with torch.device("meta"):
        return Gpt(GptConfig(500, 256, width, 4, layers, dropout=0.0)), torch.empty(ROWS, 256, dtype=torch.long)


@pytest.fixture(scope="module")
def graph() -> Graph:
    model, tokens = gpt()
    return capture_graph(model, (tokens,), {"labels": tokens}, training=True)


def planned(hardware: Hardware | str = "h100", devices: int = 4, layers: int = LAYERS, **asked: object) -> Plan:
    model, tokens = gpt(layers)
    return autoshard.plan(
        model, None, (tokens,), {"labels": tokens}, devices=devices, hardware=hardware, training=True,
        **{"micro_batches": "auto", **asked},
    )  # type: ignore[arg-type]  # fmt: skip


def test_a_folded_graph_has_two_of_a_row_of_equal_blocks(graph: Graph) -> None:
    found = without_repeated_blocks(graph)
    check_graph(found.graph)
    assert found.blocks == ("blocks.0", *["blocks.1"] * (LAYERS - 1))
    per_block = (len(graph.nodes) - len(found.graph.nodes)) / (LAYERS - 2)
    rows, sequence = found.sequence(found.graph)
    assert sum(len(rows[i]) for i in sequence) == len(graph.nodes)
    assert [len(rows[i]) for i in sequence].count(per_block) == LAYERS
    smaller, _ = micro_batched(found.graph, 4)
    check_graph(smaller)
    assert found.sequence(smaller)[1] == sequence


def test_blocks_that_differ_stay() -> None:
    model, tokens = gpt(4, 64)
    model.blocks[2].norm_1 = torch.nn.Identity()
    graph = capture_graph(model, (tokens,), {"labels": tokens}, training=True)
    assert without_repeated_blocks(graph).blocks == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")


@pytest.mark.slow
@pytest.mark.parametrize("setup", [PipelineSetup(2, (2,), 4), PipelineSetup(1, (2,), 2)])
def test_an_estimate_is_close_to_the_plan_in_full(graph: Graph, setup: PipelineSetup) -> None:
    of = PipelineEstimates(graph, PRESETS["h100"], CompileOptions())
    found = of.of(setup)
    assert of.floor(setup) <= found.seconds
    model, tokens = gpt()
    plan = autoshard.plan(
        model, setup.mesh(setup.of_stage(PRESETS["h100"])), (tokens,), {"labels": tokens}, training=True,
        micro_batches=setup.batches, stages="pp", schedule=found.schedule,
    )  # fmt: skip
    assert found.seconds == pytest.approx(plan.cost.total_s, rel=0.05)
    assert found.bubble_s == pytest.approx(plan.cost.bubble_s, rel=0.25, abs=1e-6)


@pytest.mark.slow
def test_stages_are_chosen_where_all_else_is_dear() -> None:
    plan = planned(SLOW)
    assert plan.staged is not None
    assert plan.mesh.size_of("pp") > 1
    assert plan.mesh.size == 4
    assert plan.candidates
    assert all(c.cost.total_s > 0 and math.prod(c.mesh.shape) == 4 for c in plan.candidates)
    sequence = [c.cost.total_s for c in plan.candidates]
    assert sequence == sorted(sequence)
    assert plan.from_json(plan.to_json()).candidates == plan.candidates


@pytest.mark.slow
def test_no_stages_are_chosen_where_nothing_is_dear() -> None:
    plan = planned("ideal_network", 2, 2)
    assert plan.staged is None
    assert plan.cost.bubble_s == 0
    assert plan.cost.total_s == pytest.approx(plan.cost.compute_s + plan.cost.exposed_s)


@pytest.mark.slow
def test_numbers_that_are_asked_for_stay() -> None:
    plan = planned(SLOW, 2, 2, micro_batches=4, stages="pp", schedule="gpipe")
    assert plan.staged is not None
    assert (plan.staged.micro_batches, plan.staged.schedule) == (4, "gpipe")
    assert plan.mesh.size_of("pp") > 1


def test_no_pipeline_within_the_budget() -> None:
    with pytest.raises(PlanError, match="no pipeline of these h100 has a plan"):
        planned(layers=1, memory_budget=1e5)
    with pytest.raises(MeshError, match="an int of at least 1"):
        planned(devices=0)


def every_plan(of: PipelineEstimates, devices: int) -> dict[PipelineSetup, float]:
    """The seconds of every setup, planned in full with its best schedule and the cut that stages get where none is given."""
    found: dict[PipelineSetup, float] = {}
    for setup in _PipelineSearch(of, devices, None, 1).setups():
        mesh = setup.of_stage(of.hardware)
        for schedule, chunks in of.schedules(setup):
            several = chunks if schedule == "interleaved" else None
            asked = replace(of.opts, micro_batches=setup.batches, schedule=schedule, stages_per_rank=several)
            if setup.stages > 1:
                asked, mesh = replace(asked, stages="pp"), setup.mesh(setup.of_stage(of.hardware))
            seconds = compile_graph(of.graph, mesh, asked).plan.cost.total_s
            found[setup] = min(seconds, found.get(setup, math.inf))
    return found


def check_against_all(graph: Graph, hardware: Hardware, devices: int, least: int) -> None:
    of = PipelineEstimates(graph, hardware, CompileOptions())
    every = every_plan(of, devices)
    assert len(every) >= least
    for setup, seconds in every.items():
        assert of.floor(setup) <= seconds
        assert of.floor(setup) <= of.of(setup).seconds
    plan = pipelined_for(graph, devices, hardware, CompileOptions())
    assert plan.cost.total_s <= min(every.values()) * 1.005  # of nearly equal ones the estimates may take another
    assert not any("were more promising" in note for note in plan.notes)
    again = pipelined_for(graph, devices, hardware, CompileOptions())
    assert again.to_json() == plan.to_json()


@pytest.mark.slow
def test_no_plan_of_all_is_better_and_none_below_its_floor() -> None:
    model, tokens = gpt(3, 256)
    graph = capture_graph(model, (tokens,), {"labels": tokens}, training=True)
    check_against_all(graph, PRESETS["h100"], 4, 7)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("hardware", [SLOW, PRESETS["h100"]], ids=lambda hardware: hardware.name)
def test_no_plan_of_all_is_better_for_random_models(seed: int, hardware: Hardware) -> None:
    draw = random.Random(seed)
    width, length = draw.choice([256, 512, 1024]), draw.choice([64, 128, 256])
    with torch.device("meta"):
        model = Gpt(GptConfig(draw.choice([128, 4096]), length, width, 4, draw.randint(2, 5), dropout=0.0))
        tokens = torch.empty(draw.choice([4, 8]), length, dtype=torch.long)
    graph = capture_graph(model, (tokens,), {"labels": tokens}, training=True)
    check_against_all(graph, hardware, draw.choice([2, 4]), 2)


def test_why_there_is_no_pipeline_is_said(graph: Graph) -> None:
    with pytest.raises(PlanError, match=r"optimizer state take .* if spread over all ranks, but a rank may hold"):
        pipelined_for(graph, 4, PRESETS["h100"], CompileOptions(memory_budget=1e6))
    with pytest.raises(PlanError, match="7 devices cannot form 2 or more stages of a model of"):
        pipelined_for(graph, 7, PRESETS["h100"], CompileOptions(), least=2)

"""Predicted memory against what is counted when the rank modules run: bytes that autograd keeps, and the peak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from memory_truth import kept_bytes, peak_bytes, tracked_peak
from torch import nn
from transformers_models import CASES
from transformers_models import build as build_real

import autoshard
from autoshard import models
from autoshard.compiler import capture_graph, compile_graph
from autoshard.hardware.presets import PRESETS
from autoshard.passes.ir.graph import Graph
from autoshard.passes.propagate.activation_memory import SavedTensorTables
from autoshard.passes.propagate.op_space import OpSpaces
from autoshard.passes.rules.interpreters import AbstractRun, Outcome
from autoshard.plans.options import CompileOptions

FAMILIES = ("mlp", "gpt", "llama", "moe", "dlrm", "vit")
MESHES: tuple[dict[str, int], ...] = ({"tp": 1}, {"dp": 2}, {"tp": 2, "dp": 2})

CPU = replace(PRESETS["ideal_network"], cpu=True)
"""what is counted here runs on one"""

GRAPHS: dict[str, Graph] = {}


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of models that tests can run are freed like large ones."""
    monkeypatch.setattr("autoshard.passes.lower.liveness.MIN_FREED_BYTES", 0)


def graph_of(family: str) -> Graph:
    if family not in GRAPHS:
        reference = models.get(family)
        args, kwargs = reference.inputs(batch=8, seq=32)
        GRAPHS[family] = capture_graph(reference.model().train(), args, kwargs, training=True)
    return GRAPHS[family]


@pytest.mark.slow_cases("gpt-{'dp': 2}-auto", "moe-{'dp': 2}-auto", "*-selective")
@pytest.mark.parametrize("recompute", ["auto", "selective", "blocks"])
@pytest.mark.parametrize(
    "axes", [pytest.param(a, marks=[pytest.mark.slow] * (len(a) == 2 or "tp" in a)) for a in MESHES], ids=str
)
@pytest.mark.parametrize("family", FAMILIES)
def test_kept_bytes_are_those_that_autograd_keeps(family: str, axes: dict[str, int], recompute: str) -> None:
    compiled = compile_graph(graph_of(family), autoshard.Mesh(axes, CPU), CompileOptions(recompute=recompute))
    assert compiled.plan.memory.activations == pytest.approx(kept_bytes(compiled), rel=0.005)


def memory_is_as_simulated(graph: Graph, recompute: str, watched: float = 0.0) -> None:
    """``watched``: the share of the peak that torch's tracker does not see, for kernels allocate it for themselves, or adds by
    being there: autograd does not add to a gradient in place that a dispatch mode has seen."""
    compiled = compile_graph(
        graph, autoshard.Mesh({"tp": 1}, "cpu"), CompileOptions(optimizer="sgd", recompute=recompute)
    )
    memory = compiled.plan.memory
    assert memory.activations == pytest.approx(kept_bytes(compiled), rel=0.02)
    assert memory.peak == pytest.approx(peak_bytes(compiled), rel=0.05)
    assert memory.peak == pytest.approx(tracked_peak(compiled), rel=0.05 + watched)
    assert sum(memory.at_peak.values()) == pytest.approx(memory.peak)


@pytest.mark.slow_cases(
    "dlrm-selective",
    "moe-selective",
    "llama-selective",
    "gpt-selective",
    "vit-selective",
    "mlp-none",
    "llama-none",
    "gpt-none",
    "gpt-blocks",
    "moe-none",
    "dlrm-none",
    "vit-none",
)
@pytest.mark.parametrize("recompute", ["none", "selective", pytest.param("blocks", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_peak_is_the_tracked_one(family: str, recompute: str) -> None:
    memory_is_as_simulated(graph_of(family), recompute)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "gemma2")) for n in CASES])
def test_memory_of_real_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every kind of recomputation."""
    model, args, kwargs = build_real(name, monkeypatch)
    graph = capture_graph(model, args, kwargs, training=True)
    for recompute in ("none", "selective", "blocks"):
        # a gradient, and a batch norm's copy, are 7 % of the peak
        watched = {"mamba": 0.05, "resnet": 0.03}.get(name, 0.0)
        memory_is_as_simulated(graph, recompute, watched)


class Convolved(nn.Module):
    """What follows the order of an image's dims: down by strides and pools, across a skip, up, and with other norms."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 1))
            for _ in range(3)
        )
        self.down, self.up = nn.Conv2d(16, 16, 3, 2, 1, groups=4), nn.ConvTranspose2d(16, 16, 4, 2, 1)
        self.groups, self.last = nn.GroupNorm(4, 16), nn.Conv2d(16, 8, 3, padding="same")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.norm(self.stem(x)).relu(), 3, 2, 1)
        for layer in self.layers:
            x = (x + layer(x)).relu()
        x = self.groups(self.up(self.down(x))).relu()
        return self.last(x).mean((2, 3)).square().sum()


def convolved() -> Graph:
    return capture_graph(Convolved().train(), (torch.randn(8, 3, 32, 32),), {}, training=True)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def test_what_a_norm_sums_over_ranks_is_kept_when_it_runs_again() -> None:
    """Of two rows a rank, the two sums of a channel are as much as what comes into a block."""
    graph = capture_graph(Normed().train(), (torch.randn(4, 8, requires_grad=True),), {}, training=True)
    opts = CompileOptions(optimizer="sgd", recompute="blocks", like="ddp")
    compiled = compile_graph(graph, autoshard.Mesh({"dp": 2}, "cpu"), opts)
    assert compiled.plan.memory.activations == kept_bytes(compiled) == 3 * (64 + 2 * 32)


@pytest.mark.slow_cases("selective", "none")
@pytest.mark.parametrize("recompute", ["none", "selective", "blocks"])
def test_memory_of_convolutions(recompute: str) -> None:
    memory_is_as_simulated(convolved(), recompute, watched=0.05)


def test_the_peak_counts_what_a_batch_norm_allocates_for_itself() -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1))
    graph = capture_graph(model.train(), (torch.randn(4, 3, 32, 32),), {}, training=True)
    compiled = compile_graph(graph, autoshard.Mesh({"tp": 1}, "cpu"), CompileOptions(optimizer="sgd"))
    assert compiled.plan.memory.peak == pytest.approx(peak_bytes(compiled), rel=0.08)


def test_only_on_cpus_memory_counts_copies_with_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, kept = convolved(), dict[str, float]()
    for name in ("cpu", "h100"):
        compiled = compile_graph(graph, autoshard.Mesh({"tp": 1}, name), CompileOptions(recompute="none"))
        monkeypatch.setattr(autoshard.runtime.operations.halo, "_on_onednn", lambda x, on=name == "cpu": on)
        kept[name] = kept_bytes(compiled)
        assert compiled.plan.memory.activations == pytest.approx(kept[name], rel=0.005)
    assert kept["cpu"] == kept["h100"] + 8 * 3 * 32 * 32 * 4


@pytest.mark.parametrize(("optimizer", "numbers"), [("adamw", 2), ("momentum", 1), ("sgd", 0)])
def test_the_optimizers_state_is_counted(optimizer: str, numbers: int) -> None:
    plan = compile_graph(graph_of("mlp"), autoshard.Mesh({"tp": 1}), CompileOptions(optimizer=optimizer)).plan
    assert plan.memory.optimizer == numbers * plan.memory.parameters
    assert plan.optimizer == optimizer
    assert autoshard.Plan.from_json(plan.to_json()).memory == plan.memory


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(autoshard.PlanError, match=r"optimizer='adamax2' is not known\. Known: adamw"):
        compile_graph(graph_of("mlp"), autoshard.Mesh({"tp": 1}), CompileOptions(optimizer="adamax2"))


def rehearsed(results: dict[Any, Any]) -> dict[Any, Outcome | None]:
    """What all choices of all operations keep and need, where ``results`` of single operations are known."""
    graph, mesh = graph_of("llama"), autoshard.Mesh({"cp": 2})
    tables = SavedTensorTables(graph, mesh)
    tables.rehearsal = AbstractRun(dict(zip(mesh.axes, mesh.shape, strict=True)))
    tables.rehearsal.results = results
    spaces = OpSpaces(graph, mesh)
    for node in graph.nodes:
        tables.of(node, spaces[node])
    return {key: outcome for key, (_, outcome) in tables.rehearsal.known.items()}


class Forgetful(dict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        """Everything runs."""


def test_what_ran_before_gives_what_it_gave() -> None:
    results: dict[Any, Any] = {}
    first, again, plain = rehearsed(results), rehearsed(results), rehearsed(Forgetful())
    assert first == again == plain
    assert len(first) >= 10
    wider = {key: known and (known[0]._replace(dtype=torch.float64),) for key, known in results.items()}
    assert rehearsed(wider) != plain  # what is known is used


def test_axes_of_one_size_are_rehearsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, mesh = graph_of("llama"), autoshard.Mesh({"dp": 2, "tp": 2})

    def kept() -> tuple[list[np.ndarray], int]:
        tables, spaces = SavedTensorTables(graph, mesh), OpSpaces(graph, mesh)
        tables.rehearsal = AbstractRun(dict(zip(mesh.axes, mesh.shape, strict=True)))
        found = [tables.of(node, spaces[node]) for node in graph.nodes]
        arrays = [a for keeps in found for a in (*keeps.operands, *keeps.results, keeps.private, keeps.work)]
        return arrays, len(tables.rehearsal.known)

    once, count = kept()
    monkeypatch.setattr(AbstractRun, "_canonical_axes", lambda self, text: (text, ()))
    each, more = kept()
    assert all(map(np.array_equal, once, each))
    assert count < 0.8 * more


def test_parameters_are_there_twice_while_they_arrive() -> None:
    """In the buffer that they come in, and as parameters; beside them the input and this rank's row of it."""
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)))
    graph = capture_graph(model, (torch.empty(2, 64),), {}, training=True)
    memory = compile_graph(graph, autoshard.Mesh({"dp": 2}, "ideal_network"), CompileOptions(like="fsdp")).plan.memory
    assert memory.moment.startswith("the forward of gather_parameters")
    assert memory.at_peak["temporaries"] == 4 * (2 * 2 * 64 * 64 + 2 * 64 + 64)

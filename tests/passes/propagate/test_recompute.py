"""What is made again in the backward: settings, Korthikanti's formulas, the search against brute force, the budget."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from memory_truth import kept_bytes
from torch import nn

import autoshard
from autoshard import models
from autoshard.compiler import capture_graph, compile_graph
from autoshard.models import gpt as reference
from autoshard.models.llama import Llama, LlamaConfig
from autoshard.passes.ir.graph import Graph
from autoshard.passes.lower.lowering import lower_assignment
from autoshard.passes.memory import fit
from autoshard.passes.memory.simulate import simulate_memory
from autoshard.passes.propagate.objective import objective
from autoshard.passes.propagate.planner import FORWARD_END, Planner, decode_assignment
from autoshard.passes.search import Solution
from autoshard.plans.options import CompileOptions


class Block(nn.Module):
    """A GPT block as Korthikanti et al. count it: attention spelled out, three dropouts."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm_1(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = (q @ (k.transpose(2, 3) * k.shape[-1] ** -0.5)).softmax(-1)
        y = F.dropout(weights, 0.1) @ v
        x = x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_2(x)))), 0.1)


class Gpt(nn.Module):
    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


S, B, H, A = 512, 2, 1024, 16
GRAPHS: dict[int, Graph] = {}


def gpt(layers: int) -> Graph:
    if layers not in GRAPHS:
        with torch.device("meta"):
            model = Gpt(layers, H, A).to(torch.bfloat16).train()
            x = torch.empty(B, S, H, dtype=torch.bfloat16, requires_grad=True)
        GRAPHS[layers] = capture_graph(model, (x,), {}, training=True)
    return GRAPHS[layers]


def per_layer(tp: int, like: str | None, recompute: str) -> float:
    """Bytes of activations that one more layer keeps."""
    mesh, opts = autoshard.Mesh({"tp": tp}, "a100"), CompileOptions(like=like, recompute=recompute, exact_dropout=True)
    two, three = (compile_graph(gpt(n), mesh, opts).plan.memory.activations for n in (2, 3))
    return three - two


FULL = 34 + 5 * A * S / H


@pytest.mark.slow_cases("8-megatron-none-18.0", "1-None-*")
@pytest.mark.parametrize(
    ("tp", "like", "recompute", "factor"),
    [
        (1, None, "none", FULL),
        (8, "megatron", "none", 10 + 24 / 8 + 5 * A * S / H / 8),
        (8, "megatron-sp", "none", FULL / 8),
        (1, None, "selective", 34),
        (8, "megatron-sp", "selective", 34 / 8),
        (1, None, "blocks", 2),
    ],
)
def test_korthikantis_formulas(tp: int, like: str | None, recompute: str, factor: float) -> None:
    """Bytes per layer in 16 bit, arXiv:2205.05198, table 2: all, tensor parallel, with sequence parallelism, …"""
    assert per_layer(tp, like, recompute) == pytest.approx(S * B * H * factor, rel=0.02)


# --- the search against brute force ---


class Chain(nn.Module):
    """A few operations that keep what they read, what they make, both, or nothing."""

    def __init__(self, width: int, parts: str) -> None:
        super().__init__()
        self.parts = parts
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            match part:
                case "e":
                    x = x.exp()
                case "g":
                    x = F.gelu(x)
                case "l":
                    x = F.linear(x, self.weight)
                case "m":
                    x = x * x.neg()
                case "v":
                    x = x.view(x.shape[1], x.shape[0]).t().contiguous()
        return x.sum()


def every_choice(planner: Planner) -> Iterator[tuple[int, ...]]:
    """All choices of the network that are not forbidden, tags included."""
    _, built = planner.network(limited=True)
    nodes, before = built.network.nodes, [[] for _ in built.network.nodes]  # type: ignore[var-annotated]
    for a, b, table in built.network.edges:
        before[max(a, b)].append((a, b, table))

    def extended(chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(chosen) == len(nodes):
            yield chosen
            return
        for state in range(len(nodes[len(chosen)])):
            found = (*chosen, state)
            if all(math.isfinite(table[found[a], found[b]]) for a, b, table in before[len(chosen)]):
                yield from extended(found)

    return extended(())


@pytest.mark.slow_cases("e-axes2", "gml-*")
@pytest.mark.parametrize(
    ("parts", "axes"),
    [
        ("gml", {"tp": 1}),
        ("egv", {"tp": 1}),
        ("e", {"tp": 2}),
        pytest.param("l", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("gegmel", {"tp": 1}, marks=pytest.mark.slow),
        pytest.param("ge", {"tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_layouts_and_states_are_the_best_of_all(parts: str, axes: dict[str, int]) -> None:
    """Time and bytes of every choice, by the objective and by the simulation; the search finds the best within a limit."""
    x = torch.randn(64, 64, requires_grad=True)
    graph = capture_graph(Chain(64, parts), (x,), {}, training=True)
    planner = Planner(graph, autoshard.Mesh(axes, "h100"), {}, recompute="auto")
    network, built = planner.network(limited=True)
    found: dict[str, tuple[float, float]] = {}
    for choice in every_choice(planner):
        assignment = decode_assignment(network, Solution(choice, 0.0, 0.0, exact=False))
        key = f"{assignment} {assignment.again} {assignment.shared_again} {assignment.zero}"
        if key not in found:
            memory = simulate_memory(lower_assignment(assignment))
            held = memory.parameters + memory.optimizer + max(memory.activations, memory.gradients)
            found[key] = objective(assignment).total_s, held
    sizes = sorted({size for _, size in found.values()})
    assert len(found) > 3
    for limit in sizes[:: max(1, len(sizes) // 8)]:
        assignment = planner.within(limit + 0.5)
        assert all(row.used(built.network, assignment.solution.choice) <= limit + 0.5 for row in built.kept)
        best = min(seconds for seconds, size in found.values() if size <= limit)
        assert assignment.solution.cost == pytest.approx(best, rel=2e-3 if axes["tp"] > 1 else 1e-9)
        assert objective(assignment).total_s == pytest.approx(assignment.solution.cost, rel=1e-9)
    with pytest.raises(autoshard.PlanError):
        planner.within(sizes[0] * 0.9)


# --- settings ---


def planned(recompute: object, layers: int = 2, **opts: object) -> autoshard.Plan:
    return compile_graph(
        gpt(layers), autoshard.Mesh({"tp": 1}, "a100"), CompileOptions(recompute=recompute, exact_dropout=True, **opts)
    ).plan  # type: ignore[arg-type]


def test_what_is_made_again_is_listed_with_what_it_saves_and_takes() -> None:
    none, selective, blocks = (planned(x) for x in ("none", "selective", "blocks"))
    assert not none.recomputed
    for plan in (selective, blocks):
        saved = sum(r.bytes for r in plan.recomputed)
        assert plan.memory.activations == pytest.approx(none.memory.activations - saved)
        paid = plan.cost.total_s - none.cost.total_s
        assert sum(r.seconds for r in plan.recomputed) == pytest.approx(paid, rel=1e-6)
        assert "Recomputed in the backward" in plan.report()
        assert plan.cost.hfu > plan.cost.mfu
        assert autoshard.Plan.from_json(plan.to_json()) == plan
    assert blocks.memory.activations < selective.memory.activations < none.memory.activations
    assert none.cost.total_s < selective.cost.total_s < blocks.cost.total_s


@pytest.mark.slow_cases("axes0")
@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2, "tp": 2}])
def test_a_part_of_a_stacked_weight_is_not_made_again(axes: dict[str, int]) -> None:
    """Its part is kept in the place of the whole, which is larger: all that is made again saves something."""
    reference = models.get("moe")
    args, kwargs = reference.inputs(batch=4, seq=8)
    graph = capture_graph(reference.model(), args, kwargs, training=True)
    plan = compile_graph(
        graph, autoshard.Mesh(axes), CompileOptions(like={**dict.fromkeys(axes, "fsdp"), "tp": "megatron-sp"})
    ).plan
    assert plan.recomputed
    assert all(made.bytes > 0 for made in plan.recomputed)


def test_a_pattern_names_modules() -> None:
    only = planned({"blocks.0": True})
    assert {r.fqn.split(".")[1] for r in only.recomputed} == {"0"}
    assert not planned({"blocks.*": True, "blocks.?": False}).recomputed
    assert planned({"blocks.*": True}).recomputed == planned("blocks").recomputed
    assert planned({"*": True, "blocks": False, "blocks.0": True}).recomputed == only.recomputed
    with pytest.raises(autoshard.HintError, match=r"the pattern 'layers\.\*' matches no module"):
        planned({"layers.*": True})
    with pytest.raises(
        autoshard.PlanError, match="recompute='all' is not one of 'auto', 'none', 'blocks', 'selective'"
    ):
        planned("all")


@pytest.mark.slow
def test_the_budget_binds_the_peak_and_the_cheapest_is_made_again_first() -> None:
    """With less and less memory more and more is made again, and never more than needed."""
    free = planned("auto", 6)
    assert not free.recomputed
    paid = free.cost.total_s
    for part in (0.92, 0.84):
        plan = planned("auto", 6, memory_budget=part * free.memory.peak)
        assert plan.memory.peak <= part * free.memory.peak
        assert plan.cost.total_s > paid
        paid = plan.cost.total_s
        if part == 0.92:
            computed = [plan.choices[r.name].op for r in plan.recomputed if r.what == "computed"]
            assert computed
            assert "aten.linear.default" not in computed


def test_what_does_not_fit_says_why() -> None:
    """The least peak, what it consists of, and what helps; also where the first plan made something again already."""
    for recompute in ("auto", "blocks"):
        with pytest.raises(autoshard.PlanError, match=r"The least peak found is .* MB, at the .*\. What helps: "):
            planned(recompute, memory_budget=1e6)


@pytest.mark.slow
def test_within_a_budget_from_copies_that_are_always_made_again() -> None:
    """A sequence of 1,048,576 positions, two layers of Llama-3-8B: the fastest plan does not fit, and another one does."""
    config = LlamaConfig(vocab=128256, width=4096, hidden=14336, heads=32, kv_heads=8, layers=2)
    with torch.device("meta"):
        model, tokens = Llama(config).bfloat16(), torch.zeros(1, 2**20, dtype=torch.long)
    plan = autoshard.plan(model, autoshard.Mesh({"cp": 16}), (tokens, tokens), memory_budget=60e9)
    assert plan.memory.peak <= 60e9


class Viewed(nn.Module):
    """Ends with a view of what it computes. ``depth``: how many views follow one another."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.linear, self.depth = nn.Linear(16, 16), depth

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.linear(x)).exp()
        for _ in range(self.depth):
            x = x.transpose(0, 1)
        return x


@pytest.mark.slow_cases("1")
@pytest.mark.parametrize("depth", [1, 2])
def test_a_view_that_leaves_a_block_keeps_what_it_is_of(depth: int) -> None:
    """Blocks of which each keeps what comes in: not one input, from which the next block makes the one before again."""
    model, x = nn.Sequential(*(Viewed(depth) for _ in range(4))), torch.randn(16, 16, requires_grad=True)
    graph = capture_graph(model, (x,), {}, training=True)
    compiled = compile_graph(graph, autoshard.Mesh({"tp": 1}), CompileOptions(recompute="blocks"))
    kept = kept_bytes(compiled)
    assert kept == compiled.plan.memory.activations == 3 * x.nbytes  # what comes into the first is the input
    again = {made.name for made in compiled.plan.recomputed}
    ends = [node.name in again for node in graph.nodes if "exp" in str(node.op)]
    assert ends == [False, False, False, True]


@pytest.mark.slow
def test_what_the_head_keeps_does_not_count_while_attention_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention with dropout works on much: the peak is in its last one, before there are logits, and when they are gone."""
    with torch.device("meta"):
        model = reference.Gpt(reference.GptConfig(20000, 1024, 768, 4, 4)).bfloat16()
        tokens = torch.zeros(64, 1024, dtype=torch.long)
    graph, mesh = capture_graph(model, (tokens,), {"labels": tokens}, training=True), autoshard.Mesh({"dp": 8}, "h100")

    def within(budget: float) -> autoshard.Plan:
        return compile_graph(graph, mesh, CompileOptions(memory_budget=budget, loss_chunks=1)).plan

    budget = 0.8 * within(math.inf).memory.peak
    plan = within(budget)
    monkeypatch.setattr(fit, "_live", lambda memory, at_end: {FORWARD_END: memory.peak})  # as if it were at the end
    other = within(budget)
    assert max(plan.memory.peak, other.memory.peak) <= budget
    assert plan.cost.total_s < 0.98 * other.cost.total_s
    assert not any(made.fqn == "head" for made in plan.recomputed)

"""Cross entropy in chunks of the rows: what is rewritten, exact gradients, memory, prices, and the search."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from harness import captured_once, ideal
from loss_models import NextToken, gathering_rows, tokens_and_labels
from memory_truth import kept_bytes, peak_bytes, tracked_peak
from microbatch_cases import steps_alike
from torch import nn
from torch.nn import functional as F

import autoshard
from autoshard.compiler import capture_graph, compile_graph
from autoshard.errors import PlanError
from autoshard.passes.propagate.loss_chunks import chunk_losses, why_unchunked
from autoshard.plans.options import CompileOptions
from autoshard.runtime.operations.chunked_logits import RowChunks

WEIGHTS = torch.rand(51, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.5
CASES: dict[str, tuple[dict[str, int], int, dict[str, Any], dict[str, Any]]] = {
    "classes": ({"tp": 2}, 3, {}, {"like": "megatron"}),
    "gathered": ({"dp": 2, "tp": 2}, 3, {}, {"like": {"dp": "fsdp"}}),
    "one chunk": ({"tp": 2}, 1, {}, {"like": "megatron"}),
    "a row each": ({"tp": 4}, 100, {"label_smoothing": 0.1}, {"like": "megatron"}),
    "samples": ({"dp": 3}, 3, {"reduction": "sum", "bias": False}, {"like": "ddp"}),
    "weights": ({"dp": 2, "tp": 2}, 2, {"weight": WEIGHTS, "label_smoothing": 0.2}, {"like": {"tp": "megatron"}}),
    "gathered by some ranks": ({"dp": 3, "tp": 2}, 4, {}, {"like": {"dp": "ddp"}}),
    "gathered weights": ({"tp": 2}, 3, {"weight": WEIGHTS, "label_smoothing": 0.2}, {}),
    "each sample": ({"dp": 2, "tp": 2}, 3, {"reduction": "none"}, {"like": {"dp": "fsdp", "tp": "megatron"}}),
    "more ranks than classes": ({"tp": 4}, 2, {"vocab": 3, "label_smoothing": 0.1}, {"like": "megatron"}),
    "micro-batches": ({"dp": 2, "tp": 2}, 3, {}, {"like": {"dp": "ddp", "tp": "megatron-sp"}, "micro_batches": 2}),
    "stages": ({"pp": 2, "tp": 2}, 3, {"layers": 2}, {"stages": "pp", "micro_batches": 2}),
    "zero bubble": ({"pp": 2}, 3, {"layers": 2}, {"stages": "pp", "micro_batches": 2, "schedule": "zero_bubble"}),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "gathered")) for n in CASES])
def test_steps_are_those_of_one_device(name: str) -> None:
    axes, chunks, made, asked = CASES[name]
    torch.manual_seed(0)
    model, inputs = NextToken(**made).double(), tokens_and_labels(vocab=made.get("vocab", 51))
    gathers = gathering_rows(*["d0"] * ("dp" in axes)) if "gathered" in name else contextlib.nullcontext()
    with gathers:
        steps_alike(model, ideal(axes), inputs, {}, 3, loss_chunks=chunks, parts=None, **asked)
        if "gathered" in name:
            plan = autoshard.plan(model, ideal(axes), inputs, loss_chunks=chunks, **asked)
            assert plan.choices["cross_entropy_loss"].labels[-1].startswith("vocab/d")


class Positions(nn.Module):
    """Its classes are positions, as many as its linear layer has results."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 12), nn.Linear(12, 8, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.table(x)).transpose(1, 2).reshape(-1, x.shape[1])
        return F.cross_entropy(logits, y.flatten())


class NoLoss(nn.Linear):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(F.one_hot(x, 8).to(self.weight.dtype)).square().mean() + y.sum()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Positions(), "its logits are not the results of a linear layer"),
        (NoLoss(8, 4), "the model computes no cross entropy"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_is_no_such_loss_is_refused(model: nn.Module, reason: str) -> None:
    ids = torch.randint(8, (2, 4, 8))
    with pytest.raises(PlanError, match=reason):
        autoshard.plan(model, ideal({"tp": 2}), (ids[0], ids[1]), loss_chunks=3)


def test_a_chunk_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RowChunks.slices
    monkeypatch.setattr(RowChunks, "slices", lambda self, x: right(self, x)[: None if x.is_meta else -1])
    torch.manual_seed(0)
    with pytest.raises(AssertionError):
        steps_alike(NextToken().double(), ideal({"tp": 2}), tokens_and_labels(), {}, 1, loss_chunks=3, like="megatron")


def test_a_linear_layer_and_its_loss_are_one_operation() -> None:
    graph = capture_graph(NextToken(), tokens_and_labels(), {}, training=True)
    made = chunk_losses(graph, 4)
    assert [str(node) for node in made.nodes[-2:]] == [
        "slice_1_slice = aten.slice.Tensor(tanh, 1, 0, -1)",
        "cross_entropy_loss = autoshard.linear_cross_entropy.default(slice_1_slice, slice_2, p_head_weight, p_head_bias, "
        "float32, 4, None, 1, -100, 0.0)",
    ]
    assert all("vocab" not in str(made.shape(name)) and 51 not in made.shape(name)[1:] for name in made.types)
    assert chunk_losses(graph, 1) is graph
    assert why_unchunked(graph) == ""


class Other(nn.Module):
    """Losses that do not run in chunks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.head = kind, nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = self.head(x)
        match self.kind:
            case "returned":
                return F.cross_entropy(logits, y), logits
            case "read":
                return F.cross_entropy(logits, y) + logits.square().mean()
            case "activation":
                return F.cross_entropy(torch.tanh(logits), y)
            case "rounded":
                return F.cross_entropy(logits.bfloat16().float(), y)
            case "probabilities":
                return F.cross_entropy(logits, logits.detach().softmax(1))
        return F.cross_entropy(logits.view(2, 5, 4), y.view(2, 4))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("returned", "the model returns its logits, too"),
        ("read", "reads its logits, too"),
        ("activation", "its logits are not the results of a linear layer"),
        ("rounded", "its logits are not the results of a linear layer"),
        ("probabilities", "its targets are probabilities"),
        ("dims", "classes are moved, or classes are not their last dim"),
    ],
)
def test_other_losses_are_left_and_the_option_says_why(kind: str, reason: str) -> None:
    x, y = torch.randn(8, 6), torch.arange(8) % 5
    with captured_once():
        graph = capture_graph(Other(kind), (x, y), {}, training=True)
        assert chunk_losses(graph, 4) is graph
        with pytest.raises(PlanError, match=rf"loss_chunks=4: the cross entropy at test_loss_chunks.py.*{reason}"):
            compile_graph(graph, ideal({"tp": 2}), CompileOptions(loss_chunks=4))


@pytest.mark.parametrize("wrong", [0, True, "some"])
def test_the_number_of_chunks_is_checked(wrong: Any) -> None:
    with pytest.raises(PlanError, match=r"loss_chunks is a number of at least 1, or \"auto\""):
        autoshard.plan(NextToken(), ideal({"tp": 2}), tokens_and_labels(), loss_chunks=wrong)


@pytest.mark.slow
def test_a_plan_is_followed_with_its_chunks() -> None:
    inputs, mesh = tokens_and_labels(), ideal({"tp": 2})
    plan = autoshard.Plan.from_json(autoshard.plan(NextToken(), mesh, inputs, loss_chunks=3).to_json())
    assert plan.loss_chunks == 3
    assert "loss in 3 chunks" in str(plan)
    assert "chunks=3" in autoshard.compile(NextToken(), mesh, inputs, plan=plan).source
    with pytest.raises(PlanError, match="made for loss_chunks=3"):
        autoshard.compile(NextToken(), mesh, inputs, plan=plan, loss_chunks=2)


@pytest.mark.slow_cases("1", "2")
@pytest.mark.parametrize("chunks", [1, 2, 8])
def test_memory_is_what_is_counted(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoshard.passes.lower.liveness.MIN_FREED_BYTES", 0)
    graph = capture_graph(NextToken(4000, 16), tokens_and_labels(4, 257, 4000), {}, training=True)
    options = CompileOptions(optimizer="sgd", loss_chunks=chunks)
    compiled = compile_graph(graph, autoshard.Mesh({"tp": 1}, "cpu"), options)
    memory, logits = compiled.plan.memory, 4 * 256 * 4000 * 4
    assert memory.activations == pytest.approx(kept_bytes(compiled), rel=0.02)
    assert memory.peak == pytest.approx(peak_bytes(compiled), rel=0.05)
    assert memory.peak == pytest.approx(tracked_peak(compiled), rel=0.05)
    assert memory.peak > 2 * logits if chunks == 1 else memory.peak < 2.5 * logits / chunks + 4e6


def large(width: int = 512, vocab: int = 65536, rows: int = 8) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    with torch.device("meta"):
        ids = torch.zeros(rows, 2048, dtype=torch.long)
        return NextToken(vocab, width, bias=False).bfloat16(), (ids, ids)


@pytest.mark.slow
def test_prices_count_logits_twice_and_sums_for_each_chunk() -> None:
    model, inputs = large()
    mesh = autoshard.Mesh({"tp": 4}, "h100")
    one, few, many = (autoshard.plan(model, mesh, inputs, loss_chunks=n, like="megatron") for n in (1, 8, 64))
    assert few.cost.flops == many.cost.flops == pytest.approx(one.cost.flops, rel=1e-3)  # of the shifted rows only
    assert few.cost.hfu / few.cost.mfu == pytest.approx(4 / 3 * one.cost.hfu / one.cost.mfu, rel=0.03)
    assert one.cost.total_s < few.cost.total_s < many.cost.total_s
    assert one.memory.peak > 2.5 * few.memory.peak


@pytest.mark.slow
def test_memory_that_binds_makes_chunks() -> None:
    model, inputs = large()
    mesh = autoshard.Mesh({"tp": 4}, "h100")
    free = autoshard.plan(model, mesh, inputs)
    assert free.loss_chunks == 1
    assert not free.memory.limited
    budget = 0.5 * free.memory.peak
    tight = autoshard.plan(model, mesh, inputs, memory_budget=budget)
    assert tight.memory.peak <= budget
    assert tight.loss_chunks > 1
    with contextlib.suppress(PlanError):
        assert (
            tight.cost.total_s <= autoshard.plan(model, mesh, inputs, memory_budget=budget, loss_chunks=1).cost.total_s
        )


@pytest.mark.slow
def test_a_hint_on_logits_keeps_them_where_memory_binds() -> None:
    with torch.device("meta"):
        model, ids = NextToken(65536, 512, bias=False).bfloat16(), torch.zeros(8, 2048, dtype=torch.long)
    mesh, hints = autoshard.Mesh({"tp": 4}, "h100"), {"head": {"tp": autoshard.Shard(2)}}
    free = autoshard.plan(model, mesh, (ids, ids), hints=hints)
    plan = autoshard.plan(model, mesh, (ids, ids), hints=hints, memory_budget=0.97 * free.memory.peak)
    assert plan.loss_chunks == 1
    assert plan.memory.peak <= 0.97 * free.memory.peak


@pytest.mark.slow
def test_a_report_says_why_a_loss_is_whole_where_memory_binds() -> None:
    class Both(NextToken):
        def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
            h = self.table(tokens)
            for layer in self.layers:
                h = torch.tanh(layer(h))
            logits = self.head(h)
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits

    with torch.device("meta"):
        ids = torch.zeros(8, 2048, dtype=torch.long)
        model = Both(65536, 512, 8, bias=False).bfloat16()
    mesh = autoshard.Mesh({"tp": 4}, "h100")
    budget = 0.97 * autoshard.plan(model, mesh, (ids, ids)).memory.peak
    notes = autoshard.plan(model, mesh, (ids, ids), memory_budget=budget).notes
    assert any("memory binds" in note and "returns its logits" in note for note in notes)


@pytest.mark.slow
def test_a_head_of_many_tokens_and_classes_takes_little() -> None:
    """262,144 tokens, 131,072 classes, 8 ranks: 34 GB of logits and their gradient per rank as float32."""
    with torch.device("meta"):
        ids = torch.zeros(32, 8192, dtype=torch.long)
        model = NextToken(131072, 4096, bias=False).bfloat16()
    mesh = autoshard.Mesh({"tp": 8}, "h100")
    whole = autoshard.plan(model, mesh, (ids, ids), loss_chunks=1, memory_budget=1e12)
    plan = autoshard.plan(model, mesh, (ids, ids), memory_budget=6e9)
    before, after = (p.memory.peak - p.memory.parameters - p.memory.optimizer for p in (whole, plan))
    assert plan.memory.peak <= 6e9
    assert before > 15e9
    assert after < 5e9

"""Rows of experts in the dims that they were flattened from: cut along the sequence, too, with several sequences in a batch."""

from __future__ import annotations

from typing import Any

import pytest
import routing_models
import torch
from expert_models import model_of, text
from harness import assert_equal_training
from state_experts import EVEN, Routed, batch
from torch import nn

import autoshard
from autoshard.compiler import capture_graph
from autoshard.models import Moe, MoeConfig
from autoshard.passes.ir.graph import Graph, Node
from autoshard.runtime.operations.experts import experts_op

RING = {"cp": "ring", "tp": "megatron"}
X = torch.randn(3, 8, routing_models.WIDTH, generator=torch.Generator().manual_seed(0))


class Balanced(routing_models.Routed):
    """Its logits go into a loss, and out, flat; its gates go through what works row by row, and ``mixes`` rows or does not."""

    def __init__(self, mixes: bool) -> None:
        super().__init__("loop")
        self.mixes, self.count = mixes, nn.Buffer(torch.zeros(routing_models.COUNT))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        rows = x.reshape(-1, routing_models.WIDTH)
        logits = self.router(rows)
        scores = logits.sigmoid().cumsum(int(not self.mixes))
        ids = (scores + self.count).view(-1, 2, 2).sort(-1).values.flatten(1).topk(2, dim=1).indices
        weights = scores.gather(1, ids)
        y = self.form(self, rows, weights, ids).view(x.shape)
        again = self.form(self, y.flatten(0, 1), weights, ids).view_as(x)
        balance = logits.softmax(0).square().mean()
        return self.last(x + again).square().mean() + balance, logits


def experts(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op is experts_op._opoverload]


@pytest.mark.slow_cases("True")
@pytest.mark.slow
@pytest.mark.parametrize("mixes", [False, True])
def test_what_works_row_by_row_keeps_the_dims_of_rows(mixes: bool) -> None:
    """What does not, such as sums over rows, a loss and what is returned, reads them flattened."""
    graph = capture_graph(Balanced(mixes), (X,), {}, training=True)
    assert [graph.shape(n.outputs[0]) for n in experts(graph)] == [X.shape] * 2
    flat = [n.op for n in graph.nodes if graph.shape(n.outputs[0])[:1] == (24,)]
    scans = [n for n in graph.nodes if n.op is torch.ops.aten.cumsum.default]
    assert {graph.shape(n.outputs[0])[0] for n in scans} == {24 if mixes else 3}
    assert (torch.ops.aten.gather.default in flat) == mixes
    hints = {"first": autoshard.Shard(0), "second": autoshard.Shard(0), "x": autoshard.Shard(1)}
    report = assert_equal_training(Balanced(mixes), {"cp": 2}, (X,), hints=hints, steps=1)
    assert {c.labels for c in report.plan.choices.values() if "experts" in c.op} == {("exchange 1",)}


def sent_of_rows(plan: autoshard.Plan) -> list[Any]:
    """What is gathered or exchanged over cp inside layers, but for rows on their way to experts and weights."""
    kinds = ("all_gather", "reduce_scatter", "all_to_all")
    found = [c for c in plan.collectives if "cp" in c.axes and c.kind in kinds and "layers" in (c.fqn or "")]
    parameters = tuple(n for n, kind in plan.kinds.items() if kind == "parameter")
    return [c for c in found if not c.reason.startswith(parameters) and "experts" not in c.reason]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch", "length"),
    [
        ("gpt-oss", 2, 8),
        *(
            pytest.param(n, *sizes, marks=pytest.mark.slow)
            for n in ("mixtral", "qwen3", "deepseek-v3", "llama4", "olmoe", "gpt-oss")
            for sizes in ((2, 8), (3, 7))
        ),
    ],
)
def test_a_ring_over_several_sequences_gathers_no_rows(name: str, batch: int, length: int) -> None:
    if name != "qwen3":  # of which a loss reads the logits of all rows
        given = (), text(batch, 8)
        plan = autoshard.plan(model_of(name), autoshard.Mesh({"cp": 2, "tp": 2}), *given, like=RING, training=True)
        assert not sent_of_rows(plan)
        cut = {c.labels[0] for c in plan.choices.values() if "experts" in c.op}
        assert cut <= {"rows 1", "exchange 1"}
    assert_equal_training(model_of(name), {"cp": 2, "tp": 2}, (), text(batch, length), like=RING, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3", "gpt-oss"])
@pytest.mark.parametrize(
    "like", [{"dp": "ddp", "cp": "ring"}, {"ep": "expert", "cp": "ring"}, {"dp": None, "ep": None}], ids=str
)
def test_batch_and_sequence_are_cut_together(name: str, like: dict[str, Any]) -> None:
    report = assert_equal_training(model_of(name), dict.fromkeys(like, 2), (), text(2, 8), like=like, steps=3)
    cut = [c.labels for c in report.plan.choices.values() if "experts" in c.op]
    assert all(not {"I", "R"} & {*labels} for labels in cut)


@pytest.mark.slow
@pytest.mark.parametrize(("features", "label", "dearer"), [(256, "rows", "expert"), (4096, "exchange", "fsdp")])
def test_the_size_of_experts_decides_without_hints(features: int, label: str, dearer: str) -> None:
    """16 experts on two nodes of 8: weights of small ones are gathered, as by FSDP; rows go to large ones."""
    config = MoeConfig(vocab=1024, width=2048, hidden=features, heads=16, kv_heads=16, layers=2, experts=16)
    with torch.device("meta"):
        model, tokens = Moe(config).to(torch.bfloat16), torch.zeros(16, 4096, dtype=torch.long)
    free, other = (
        autoshard.plan(model, {"ep": 16}, (tokens, tokens), like=like, memory_budget=1e15) for like in (None, dearer)
    )
    assert {c.labels[0] for c in free.choices.values() if "experts" in c.op} == {label}
    assert free.cost.total_s < other.cost.total_s


def test_a_row_without_experts_is_not_looked_at() -> None:
    """Whatever it holds, as padding may: neither the others' results nor any gradient is another than without it."""
    x, ids, weights = batch(*EVEN).values()
    x[1], ids[1], weights[1] = torch.inf, -1, torch.nan
    model, rest = Routed().double(), [0, *range(2, len(x))]
    found: list[torch.Tensor] = []
    for some in (slice(None), rest):
        out = experts_op(x[some], ids[some], weights[some], model.first, model.second, "silu", True, False)
        found.append(out if some is rest else out[rest])
        assert some is rest or not out[1].any()
        found += torch.autograd.grad(out.square().sum(), (model.first, model.second))
    for ours, theirs in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)

"""Reductions, scans and rankings along a dim that is cut: exact on every layout, and frugal on the wire."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from harness import assert_equal_training, captured_once
from reduction_samples import RANK, REDUCE, SCAN
from sample_makers import call, distinct, f, unit
from sites import recorded, run, site
from torch import nn

import autoshard
from autoshard import Shard, runtime
from autoshard.check.rule_check import check_rule
from autoshard.errors import RuleError
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType
from autoshard.passes.rules.base import Rule
from autoshard.passes.rules.families import reductions

aten = torch.ops.aten
RULES = {
    rule.op: rule
    for rules in (reductions.REDUCTION_RULES, reductions.SCAN_RULES, reductions.RANKING_RULES)
    for rule in rules
}
DISTRIBUTED = [op for op, rule in RULES.items() if rule.sends]
HALF = [pytest.param(op, marks=[pytest.mark.slow] * (i % 2)) for i, op in enumerate(DISTRIBUTED)]
"""all of them, every other one slow"""
SAMPLES = {f"aten.{name}": calls for table in (RANK, REDUCE, SCAN) for name, calls in table.items()}


def only(op: Any, *labels: str) -> Rule:
    """The rule of ``op`` with the strategies of these labels alone."""

    def strategies(node: Node, graph: Graph) -> tuple[Strategy, ...]:
        return tuple(s for s in RULES[op].strategies(node, graph) if s.label in labels)

    return Rule(op, strategies, RULES[op].local)


@pytest.mark.parametrize("op", HALF, ids=str)
def test_every_dim_is_cut(op: Any) -> None:
    """The dim that the op runs over as well as the others."""
    check = check_rule(RULES[op], SAMPLES[str(op)][:2])
    longest = max(x.dim() for args, _ in SAMPLES[str(op)][:2] for x in args[:1])
    assert {f"d{d}" for d in range(longest)} <= check.strategies


@pytest.mark.parametrize("op", HALF, ids=str)
def test_pairs_of_strategies(op: Any) -> None:
    """The dim on both axes, or rows on one of them."""
    check_rule(RULES[op], SAMPLES[str(op)][:4], meshes=({"a": 2, "b": 2},))


@pytest.mark.parametrize(("size", "mesh"), [(131, {"a": 2, "b": 4}), (9, {"a": 2, "b": 4}), (6, {"a": 5})], ids=str)
def test_uneven_parts_and_ranks_without_any(size: int, mesh: Mapping[str, int]) -> None:
    """Of 9 elements on 2 × 4 ranks the fourth has none, and those after it have one each."""
    x = f(2, size)
    samples = {
        aten.cumsum.default: [call(x, 1)],
        aten.cumprod.default: [call(1 + x / 10, 1)],
        aten.logcumsumexp.default: [call(x, 1)],
        aten.cummax.default: [call(x, 1), call(x.round(), 1)],
        aten.topk.default: [call(x, 3), call(x, 6, 1, False)],
        aten.max.dim: [call(x, 1), call(x.round(), 1, True)],
        aten.argmin.default: [call(x, 1), call(x.round(), 1)],
        aten.logsumexp.default: [call(x, [1])],
        aten.var_mean.correction: [call(x, [1])],
        aten.std.correction: [call(x, [1], correction=0)],
        aten.linalg_vector_norm.default: [call(x, p, [1]) for p in (2, 1, 0, 2.5)],
        aten.prod.dim_int: [call(1 + x / 10, 1)],
        aten.any.dim: [call(x > 2, 1)],
        aten.all.dim: [call(x > -9, 1)],
    }
    for op, calls in samples.items():
        check_rule(only(op, "d1"), calls, meshes=(mesh,))


def test_what_needs_an_element_on_every_rank_says_so() -> None:
    """4 elements on 3 ranks are 2, 2 and none: no maximum there."""
    x = f(4)
    for op, args in (
        (aten.amax.default, (x, [0])),
        (aten.linalg_vector_norm.default, (x, math.inf)),
        (aten.linalg_vector_norm.default, (x, -1)),
        (aten.argmax.default, (x,)),
    ):
        with pytest.raises(RuleError, match="no sample could run"):
            check_rule(only(op, "d0"), [call(*args)], meshes=({"x": 3},))
        check_rule(only(op, "d0"), [call(*args)], meshes=({"x": 2},))


def test_variances_without_degrees_of_freedom_stay_whole() -> None:
    for args, kwargs in (((f(2, 3), [0]), {"correction": 2}), ((f(2, 3).cfloat(), [0]), {})):
        with pytest.raises(RuleError, match="no sample could run"):
            check_rule(only(aten.var.correction, "d0"), [(args, kwargs)], meshes=({"x": 2},))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_types_sum_in_float32(dtype: torch.dtype) -> None:
    """Result and gradient are those of eager up to the narrow type's own rounding."""
    x = unit(6, 40).to(dtype)
    samples = {
        aten.cumsum.default: [call(x, 1), call(x, 1, dtype=torch.float32)],
        aten.logcumsumexp.default: [call(x.float(), 1)],
        aten.logsumexp.default: [call(x, [1])],
        aten.var_mean.correction: [call(x, [1])],
        aten.std.correction: [call(x, [1])],
        aten.linalg_vector_norm.default: [call(x, 2, [1]), call(x, 2, [1], dtype=torch.float32)],
        aten.topk.default: [call(distinct(3, 20).to(dtype), 4)],
    }
    for op, calls in samples.items():
        check_rule(only(op, "d0", "d1"), calls, meshes=({"x": 2},))


# --- NaN ---


class Reduced(nn.Module):
    """A reduction of a shifted input."""

    def __init__(self, reduction: Any) -> None:
        super().__init__()
        self.shift, self.reduction = nn.Parameter(torch.zeros(5, 6).double()), reduction

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.reduction(x + self.shift).sum()  # type: ignore[no-any-return]


OF_NAN: dict[str, Any] = {
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "amax": lambda x: x.amax(0),
    "max of a dim": lambda x: x.max(0).values,
    "norm": lambda x: torch.linalg.vector_norm(x, math.inf, 0),
    "sum of magnitudes": lambda x: torch.linalg.vector_norm(x, 1, 0),
}


@pytest.mark.slow_cases("min", "amax", "sum of magnitudes")
@pytest.mark.parametrize("name", OF_NAN)
def test_gradients_of_a_nan_are_those_of_eager(name: str) -> None:
    """Some give it to the elements that are NaN, some to all."""
    x = f(5, 6)
    x[1, 2] = x[4, 2] = x[3, 0] = math.nan
    eager, hints = Reduced(OF_NAN[name]), {"shift": Shard(0)}
    with captured_once():
        shardeds = [autoshard.compile(eager, Mesh({"tp": n}, "ideal_network"), (x,), hints=hints) for n in (2, 3)]
    eager(x).backward()
    for sharded in shardeds:
        sharded(x).backward()
        found, expected = sharded.full_gradients()["shift"], eager.shift.grad
        assert torch.allclose(found, expected, rtol=1e-12, equal_nan=True), (found, expected)


# --- ties ---


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 3}, {"x": 5}], ids=str)
@pytest.mark.parametrize("largest", [True, False], ids=str)
def test_topk_takes_the_lower_index_of_equal_values(mesh: Mapping[str, int], largest: bool) -> None:
    """Where every rank has 64 times k elements: eager takes the same ones, in an order of its own."""
    x, k = torch.randint(0, 40, (50, 1500), generator=torch.Generator().manual_seed(3)).double(), 4
    rule = RULES[aten.topk.default]
    at = site(rule, (x, k, 1, largest), ("d1",), Mesh(mesh))
    assert rule.local is not None
    world = runtime.World(mesh)
    pieces = x.split(-(-1500 // world.size), 1)
    _, _, dim, size, axes = rule.local(at).args
    found = world.run(lambda piece: runtime.topk(piece, k, dim, size, axes, largest), [(p,) for p in pieces])
    ordered, places = torch.sort(x, dim=1, descending=largest, stable=True)
    whole = x.topk(k, 1, largest)
    for values, indices in found:
        assert torch.equal(values, whole.values)
        assert torch.equal(values, ordered[:, :k])
        assert torch.equal(indices, places[:, :k])
        assert torch.equal(indices.sort(1).values, whole.indices.sort(1).values)


# --- what goes over the wire ---

_X, _FLAT = f(6, 8), f(6, 8, 4)
CASES: list[tuple[Any, tuple[Any, ...], tuple[str, str]]] = [
    (aten.cumsum.default, (_X, 1), ("d0", "d1")),
    (aten.cumsum.default, (_X.bfloat16(), 1), ("d1", "d1")),
    (aten.cumsum.default, (_X.long(), 1), ("d0", "d1")),
    (aten.cumprod.default, (_X, 0), ("d1", "d0")),
    (aten.logcumsumexp.default, (_X, 0), ("d0", "d0")),
    (aten.cummax.default, (_X, 1), ("d0", "d1")),
    (aten.topk.default, (_X, 1), ("d0", "d1")),
    (aten.topk.default, (_X, 5), ("d1", "d1")),
    (aten.max.dim, (_FLAT, 1), ("d0", "d1")),
    (aten.argmax.default, (_X, 1), ("d0", "d1")),
    (aten.argmax.default, (_X,), ("d0", "d1")),
    (aten.logsumexp.default, (_FLAT, [0, 1]), ("d0", "d1")),
    (aten.amax.default, (_FLAT, [0, 1]), ("d0", "d2")),
    (aten.aminmax.default, (_X,), ("d0", "d1")),
    (aten.any.dim, (_X > 0, 1), ("d0", "d1")),
    (aten.any.dim, (_X.to(torch.uint8), 1), ("d0", "d1")),
    (aten.prod.dim_int, (_X, 1), ("d0", "d1")),
    (aten.var.correction, (_X, [1]), ("d0", "d1")),
    (aten.std_mean.correction, (_FLAT.bfloat16(), [1, 2]), ("d1", "d2")),
    (aten.linalg_vector_norm.default, (_X, 2, [1]), ("d0", "d1")),
    (aten.linalg_vector_norm.default, (_X, 0, [1]), ("d0", "d1")),
    (aten.linalg_vector_norm.default, (_X, math.inf), ("d0", "d1")),
    (aten.norm.Scalar, (_X,), ("d0", "d1")),
]


@pytest.mark.parametrize(("op", "args", "labels"), CASES, ids=[f"{op} {', '.join(labels)}" for op, _, labels in CASES])
def test_predicted_collectives_are_those_executed(op: Any, args: tuple[Any, ...], labels: tuple[str, str]) -> None:
    """Kind, axes, phase and bytes of every collective inside a local form."""
    mesh = Mesh({"a": 2, "b": 2})
    at = site(RULES[op], args, labels, mesh)
    assert recorded(at)
    assert recorded(at) == sorted((e.kind, e.axes, e.phase, e.bytes) for e in run(RULES[op], at, args)[1])


# --- whole models ---


class Head(nn.Module):
    """A language model's last layer, and what a decoder reads from its logits."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.body = nn.Linear(64, 64)
        self.lm_head = nn.Linear(64, vocab, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.lm_head(torch.tanh(self.body(x)))
        values, indices = logits.topk(5, dim=-1)
        return logits.argmax(-1), indices, values.softmax(-1), logits.max(-1).values - logits.logsumexp(-1)


@pytest.mark.slow_cases("*-258")
@pytest.mark.parametrize(("ranks", "vocab"), [(2, 258), (3, 258), (3, 257)])
def test_logits_cut_by_vocabulary_are_never_gathered(ranks: int, vocab: int) -> None:
    """Greedy and top-k decoding, values and gradients; the rows do not divide among the ranks."""
    x, axes = torch.randn(5 - ranks, 64, dtype=torch.float64), {"tp": ranks}
    report = assert_equal_training(Head(vocab), axes, (x,), share=1.2)
    assert report.plan.layouts["lm_head.weight"]["tp"] == Shard(0)
    logits = x.shape[0] * vocab * 8
    for c in report.plan.collectives:
        assert "linear_1" not in c.reason, c
        assert c.bytes < logits / 4 or "tanh" in c.reason, c
    candidates = ("topk", "argmax", "max.dim")  # values and indices of each
    assert sum(any(op in c.reason for op in candidates) for c in report.plan.collectives) == 6


def test_a_large_vocabulary_on_real_hardware() -> None:
    """Llama-3-8B's head for 1025 tokens on 8 H100: candidates are exchanged, not 263 MB of logits."""

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm_head = nn.Linear(4096, 128256, bias=False, device="meta", dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.lm_head(x).topk(50, dim=-1)  # type: ignore[no-any-return]

    x = torch.empty(1025, 4096, device="meta", dtype=torch.bfloat16)
    plan = autoshard.plan(Decoder(), {"tp": 8}, (x,), hints={"lm_head": "colwise"}, training=False)
    ring = 7 * 1025 * 50
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("all_gather", 2 * ring), ("all_gather", 8 * ring)]


class Gate(nn.Module):
    """Routing of a mixture of experts: the best two of the scores, spread over all experts again."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 66, bias=False)
        self.experts = nn.Linear(66, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).softmax(-1)
        values, indices = scores.topk(2, dim=-1)
        weights = values / values.sum(-1, keepdim=True)
        return self.experts(torch.zeros_like(scores).scatter_add(-1, indices, weights))


@pytest.mark.slow_cases("{'ep': 3}", "{'ep': 2}")
@pytest.mark.parametrize("axes", [{"ep": 2}, {"ep": 3}, {"dp": 2, "ep": 2}], ids=str)
def test_a_gate_with_its_experts_cut(axes: dict[str, int]) -> None:
    """The tokens do not divide among the ranks."""
    x = torch.randn(2 if axes["ep"] == 3 else axes.get("dp", 1), 16)
    report = assert_equal_training(Gate(), axes, (x,))
    assert sum("topk" in c.reason for c in report.plan.collectives) == 2


class Sequence(nn.Module):
    """Scans and statistics over a sequence [batch, time, features]."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(2, 4) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, y = x * self.scale[0], x * self.scale[1]
        total = x.cumsum(1) + y.cummax(1).values * torch.logcumsumexp(x, 1) + (1 + x / 8).cumprod(1)
        scale = x.std(1, keepdim=True) + torch.linalg.vector_norm(y, dim=1, keepdim=True) + x.amax(1, keepdim=True)
        return total / scale + x.var((0, 1)) + y.prod(1, keepdim=True)


@pytest.mark.slow_cases("axes0-cut0", "axes1-*")
@pytest.mark.parametrize(("axes", "cut"), [({"sp": 2}, {}), ({"sp": 3}, {}), ({"dp": 2, "sp": 2}, {"dp": Shard(0)})])
def test_a_sequence_that_stays_cut(axes: dict[str, int], cut: dict[str, Shard]) -> None:
    """Nothing but slices of one step is exchanged."""
    x, hints = torch.randn(2, 67, 4) / 4, {"x": {"sp": Shard(1), **cut}}
    report = assert_equal_training(Sequence(), axes, (x,), hints=hints)
    inside = [c for c in report.plan.collectives if c.reason.startswith("aten.")]
    assert {"aten.cumsum.default", "aten.cummax.default"} <= {c.reason.partition(":")[0] for c in inside}


class Selected(nn.Module):
    """Rows whose number depends on the data, and scans and statistics over their features."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 66)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = self.up(x[mask])
        spread = rows.var(1, keepdim=True) + rows.norm(dim=1, keepdim=True)
        return (rows.cumsum(1) / spread).sum(1), rows.topk(3, 1).values, rows.argmax(1), rows.std(0)


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_of_unknown_number(ranks: int) -> None:
    """Their features stay cut."""
    x, mask = f(40, 8), torch.arange(40) % 3 == 0
    report = assert_equal_training(Selected(), {"tp": ranks}, (x, mask), share=1)
    inside = {c.reason.partition(":")[0] for c in report.plan.collectives if c.reason.startswith("aten.")}
    assert {"aten.var.dim", "aten.topk.default", "aten.argmax.default"} <= inside


@pytest.mark.parametrize("op", [aten.argmax.default, aten.var.correction], ids=str)
def test_what_needs_the_number_of_rows_runs_on_whole_tensors(op: Any) -> None:
    """A flat index, a count of all elements: no dim is cut where one is of unknown length."""
    node = Node("y", op, (Ref("x"),), {}, ("y",), (0,))
    for unknown, labels in (((), {"I", "R", "d0", "d1"}), ((0,), {"I", "R"})):
        types = {"x": TensorType((20, 66), torch.float64, unknown=unknown), "y": TensorType((), torch.float64)}
        graph = Graph((), (node,), types, (Ref("y"),), None, None)
        assert {s.label for s in RULES[op].strategies(node, graph)} == labels


# --- negative controls ---


def test_indices_without_an_offset_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("autoshard.runtime.operations.ranking"), "offset", lambda n, axes: 0)
    for op in (aten.topk.default, aten.max.dim, aten.argmax.default):
        with pytest.raises(RuleError, match="elements differ"):
            check_rule(RULES[op], SAMPLES[str(op)])


@pytest.mark.parametrize("op", [aten.cumsum.default, aten.cumprod.default, aten.cummax.default], ids=str)
def test_a_lost_gradient_of_the_totals_is_caught(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every later rank uses a total: gathered as Invariant, its gradient would stay on the rank."""
    original = runtime.all_gather
    module = importlib.import_module("autoshard.runtime.operations.reductions")
    monkeypatch.setattr(module, "all_gather", lambda x, dim, axes, to: original(x, dim, axes, to="I"))
    with pytest.raises(RuleError, match="gradient of operand 0"):
        check_rule(RULES[op], SAMPLES[str(op)])


@pytest.mark.parametrize("op", [aten.amax.default, aten.std.correction, aten.logsumexp.default], ids=str)
def test_statistics_of_one_rank_are_caught(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.import_module("autoshard.runtime.operations.reductions"), "reduce_statistic", lambda x, axes, **_: x
    )
    with pytest.raises(RuleError, match="is wrong in"):
        check_rule(RULES[op], SAMPLES[str(op)])

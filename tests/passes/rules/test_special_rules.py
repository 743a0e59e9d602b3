"""Rules with local forms of their own: exact on every layout, and frugal on the wire."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sites import recorded, run, site
from special_samples import SAMPLES, TARGET, call, f, i, unit

from autoshard import runtime
from autoshard.check.rule_check import check_rule
from autoshard.errors import RuleError
from autoshard.layout import Layout, chunk
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType
from autoshard.passes.rules.base import Rule, Site
from autoshard.passes.rules.families import attention, embedding, factory, loss, norm
from autoshard.runtime.operations.losses import cross_entropy_op

aten = torch.ops.aten
RULES = {
    rule.op: rule
    for rules in (attention.RULES, embedding.RULES, loss.LOSS_RULES, norm.RULES, factory.RANDOM_RULES)
    for rule in rules
}
MEAN, SUM = 1, 2


@pytest.mark.slow
@pytest.mark.parametrize("op", RULES, ids=str)
def test_every_strategy_on_two_and_three_ranks(op: torch._ops.OpOverload) -> None:
    check = check_rule(RULES[op], SAMPLES[op])
    assert {"I", "R"} <= check.strategies


@pytest.mark.slow_cases("aten.cross_entropy_loss.default", "aten.scaled_dot_product_attention.default")
@pytest.mark.parametrize(
    "op",
    [
        aten.embedding.default,
        aten.cross_entropy_loss.default,
        cross_entropy_op,
        aten.nll_loss_nd.default,
        aten.softmax.int,
        aten.log_softmax.int,
        aten.mse_loss.default,
        aten.scaled_dot_product_attention.default,
        aten.layer_norm.default,
        aten.rms_norm.default,
        aten.group_norm.default,
        aten._native_batch_norm_legit_functional.default,
        aten.dropout.default,
        aten.uniform.default,
    ],
    ids=str,
)
def test_pairs_of_strategies(op: torch._ops.OpOverload) -> None:
    """Batch on one axis and vocabulary on the other, vocabulary on both, …"""
    attends = op is aten.scaled_dot_product_attention.default  # the most combinations by far
    check_rule(RULES[op], SAMPLES[op][1::2] if attends else SAMPLES[op], meshes=({"a": 2, "b": 2},))


def _only(op: torch._ops.OpOverload, *labels: str) -> Rule:
    """The rule of ``op`` with the strategies of these labels alone."""

    def strategies(node: Node, graph: Graph) -> tuple[Strategy, ...]:
        return tuple(s for s in RULES[op].strategies(node, graph) if s.label in labels)

    return Rule(op, strategies, RULES[op].local)


@pytest.mark.parametrize(
    ("size", "mesh", "empty"),
    [(131, {"a": 2, "b": 4}, False), (9, {"a": 2, "b": 4}, True), (6, {"a": 5}, True)],
    ids=str,
)
def test_uneven_vocabulary_and_ranks_without_any(size: int, mesh: Mapping[str, int], empty: bool) -> None:
    lengths = [size]
    for ranks in mesh.values():
        lengths = [chunk(n, ranks, r)[1] for n in lengths for r in range(ranks)]
    assert (0 in lengths) == empty
    assert len(set(lengths)) > 1
    target = torch.tensor([0, size - 1, 2, -100])
    samples = {
        _only(aten.embedding.default, "vocab"): call(f(size, 4), torch.tensor([[0, size - 1], [3, 3]]), 3),
        _only(aten.cross_entropy_loss.default, "vocab"): call(f(4, size), target, unit(size), MEAN, -100, 0.1),
        _only(aten.nll_loss_nd.default, "vocab"): call(f(4, size), target, unit(size)),
        _only(aten.log_softmax.int, "d1"): call(f(3, size), 1),
        _only(aten.layer_norm.default, "d1"): call(f(3, size), [size], f(size), f(size)),
    }
    for rule, sample in samples.items():
        check_rule(rule, [sample], meshes=(mesh,))
    probable = call(f(4, size), f(4, size).softmax(1), unit(size), SUM, -100, 0.1)
    check_rule(_only(aten.cross_entropy_loss.default, "vocab"), [probable], meshes=(mesh,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_types_sum_in_float32(dtype: torch.dtype) -> None:
    """Result and gradient are those of eager up to the narrow type's own rounding."""
    x, weight = (f(6, 40) * 3).to(dtype), f(40).to(dtype)
    samples = {
        aten.cross_entropy_loss.default: [call(x, i(40, 6), None, MEAN, -100, 0.1)],
        aten.softmax.int: [call(x, 1), call(x, 1, torch.float32)],
        aten.layer_norm.default: [call(x, [40], weight, weight)],
        aten.rms_norm.default: [call(x, [40], weight)],
    }
    for op, calls in samples.items():
        check_rule(_only(op, "vocab", "d0", "d1"), calls, meshes=({"x": 2},))


# --- embedding bags ---


@pytest.mark.parametrize("op", [aten.embedding_bag.default, aten.embedding_bag.padding_idx], ids=str)
def test_bags_by_rows_and_columns(op: torch._ops.OpOverload) -> None:
    """With the pooled rows alone read, as models do, tables are cut by rows and columns."""
    check = check_rule(RULES[op], SAMPLES[op], results=(0,))
    assert {"vocab", "embed"} <= check.strategies
    check_rule(RULES[op], SAMPLES[op], results=(0,), meshes=({"a": 2, "b": 2},))


def _bags(start: int) -> tuple[Node, Graph]:
    """Four bags of indices into a table [9, 4], whose offsets are ``arange(start, 12, 3)``."""
    types = {"w": TensorType((9, 4), torch.float64, True), "i": TensorType((12,), torch.int64)}
    types |= {"o": TensorType((4,), torch.int64), "y": TensorType((4, 4), torch.float64, True)}
    args = (Ref("w"), Ref("i"), Ref("o"), False, 0, False, None, False, None)
    bag = Node("bag", aten.embedding_bag.padding_idx, args, {}, ("y",), (0,))
    offsets = Node("o", aten.arange.start_step, (start, 12, 3), {}, ("o",), (0,))
    return bag, Graph((), (offsets, bag), types, (Ref("y"),), None, None)


def test_bags_are_cut_only_where_all_are_equally_long() -> None:
    rule = RULES[aten.embedding_bag.padding_idx]
    labels = {start: {s.label for s in rule.strategies(*_bags(start))} for start in (0, 1)}
    assert labels[0] - labels[1] == {"bags"}


def test_local_bags_start_at_their_own_first_index() -> None:
    rule, (bag, graph) = RULES[aten.embedding_bag.padding_idx], _bags(0)
    strategy = next(s for s in rule.strategies(bag, graph) if s.label == "bags")
    mesh = Mesh({"x": 2})
    layouts = tuple(Layout(mesh, [p]) for p in (*strategy.inputs, *strategy.outputs))
    at = Site(bag, graph, mesh, layouts[:3], layouts[3:], (strategy,))
    table, indices, offsets = f(9, 4), i(9, 12), torch.arange(0, 12, 3)
    whole = aten.embedding_bag.padding_idx(table, indices, offsets, *bag.args[3:])[0]
    parts, _ = run(rule, at, (table, indices, offsets))
    assert torch.allclose(torch.cat(parts), whole, rtol=0, atol=1e-12)


# --- what goes over the wire ---

_ATTENTION = (f(2, 4, 6, 4), f(2, 4, 8, 4), f(2, 4, 8, 4))
CASES: list[tuple[Any, tuple[Any, ...], tuple[str, str]]] = [
    (aten.cross_entropy_loss.default, (f(6, 8), i(8, 6)), ("d0", "vocab")),
    (aten.cross_entropy_loss.default, (f(6, 8), i(8, 6)), ("vocab", "vocab")),
    (aten.cross_entropy_loss.default, (f(6, 8).bfloat16(), i(8, 6), None, MEAN, -100, 0.1), ("d0", "vocab")),
    (aten.cross_entropy_loss.default, (f(6, 8), f(6, 8).softmax(1)), ("d0", "vocab")),
    (cross_entropy_op, (f(6, 4, 8), i(8, 6, 4)), ("d1", "vocab")),
    (aten.nll_loss_nd.default, (f(6, 8, 4), i(8, 6, 4)), ("d2", "vocab")),
    (aten.softmax.int, (f(6, 8), 1), ("d0", "d1")),
    (aten.log_softmax.int, (f(6, 8).bfloat16(), 1), ("d1", "d1")),
    (aten.layer_norm.default, (f(6, 4, 8), [4, 8], f(4, 8)), ("d1", "d2")),
    (aten.layer_norm.default, (f(6, 4, 8), [8]), ("d1", "d2")),
    (aten.rms_norm.default, (f(6, 8), [8], f(8)), ("d0", "d1")),
    (aten.group_norm.default, (f(6, 8, 4), 4), ("groups", "d2")),
    (aten._native_batch_norm_legit.no_stats, (f(6, 8, 4), f(8), f(8), True, 0.1, 1e-5), ("d0", "c")),
    (aten._native_batch_norm_legit.no_stats, (f(6, 8, 4), f(8), f(8), True, 0.1, 1e-5), ("d0", "d2")),
    (aten.scaled_dot_product_attention.default, _ATTENTION, ("heads", "keys")),
    (aten.scaled_dot_product_attention.default, _ATTENTION, ("queries", "keys")),
    (aten.scaled_dot_product_attention.default, _ATTENTION, ("queries", "heads")),
    (aten.embedding.default, (f(8, 4), i(8, 6)), ("d0", "vocab")),
    (aten.embedding_bag.default, (f(8, 4), i(8, 6), torch.tensor([0, 2, 5]), False, 2), ("embed", "vocab")),
]


@pytest.mark.parametrize(("op", "args", "labels"), CASES, ids=[f"{op} {', '.join(labels)}" for op, _, labels in CASES])
def test_predicted_collectives_are_those_executed(op: Any, args: tuple[Any, ...], labels: tuple[str, str]) -> None:
    """Kind, axes, phase and bytes of every collective inside a local form."""
    mesh = Mesh({"a": 2, "b": 2})
    at = site(RULES[op], args, labels, mesh)
    assert recorded(at) == sorted((e.kind, e.axes, e.phase, e.bytes) for e in run(RULES[op], at, args)[1])


def test_vocabulary_parallel_cross_entropy_never_gathers_logits() -> None:
    """Two all-reduces forward (maxima; sums packed), none backward."""
    rule, args = RULES[aten.cross_entropy_loss.default], (f(6, 64).float(), i(64, 6))
    _, executed = run(rule, site(rule, args, ("vocab",), Mesh({"x": 4})), args)
    ring = 2 * 3 / 4
    assert [e.phase for e in executed] == ["forward", "forward"]
    assert [e.bytes for e in executed] == [ring * 4 * 6, ring * 8 * 6]


@pytest.mark.parametrize(("labels", "gathers"), [(("query heads", "heads"), 2), (("heads", "query heads"), 0)])
def test_key_heads_are_gathered_only_where_the_cuts_do_not_nest(labels: tuple[str, str], gathers: int) -> None:
    """Key heads on the inner axis, more query heads on the outer: a query head's key head may be elsewhere."""
    rule, args = RULES[aten.scaled_dot_product_attention.default], (f(2, 8, 6, 4), f(2, 4, 6, 4), f(2, 4, 6, 4))
    at = site(rule, args, labels, Mesh({"a": 2, "b": 2}), enable_gqa=True)
    assert [kind for kind, _, phase, _ in recorded(at) if phase == "forward"] == ["all_gather"] * gathers
    assert recorded(at) == sorted((e.kind, e.axes, e.phase, e.bytes) for e in run(rule, at, args)[1])


# --- negative controls ---


def test_a_local_count_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dividing by this rank's own count, as a plain F.cross_entropy on shards would."""
    rule, sample = RULES[aten.cross_entropy_loss.default], [call(f(5, 7), TARGET)]
    check_rule(rule, sample)
    loss = importlib.import_module("autoshard.runtime.operations.losses")
    monkeypatch.setattr(loss, "begin_sum", lambda x, axes: lambda: x)
    with pytest.raises(RuleError, match="is wrong in"):
        check_rule(rule, sample)


@pytest.mark.parametrize("op", [aten.layer_norm.default, aten.softmax.int], ids=str)
def test_a_lost_gradient_of_the_sums_is_caught(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank uses the sums: as Invariant their gradient would stay on the rank, with the same values."""
    original = runtime.all_reduce

    def invariant(x: torch.Tensor, axes: Any, to: str = "I", op: str = "sum") -> torch.Tensor:
        return original(x, axes, op=op)

    monkeypatch.setattr(
        importlib.import_module("autoshard.runtime.operations.reductions"), "reduce_statistic", invariant
    )
    with pytest.raises(RuleError, match="gradient of operand 0"):
        check_rule(RULES[op], SAMPLES[op])


def test_a_local_dropout_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "dropout", lambda x, p, shape, dims: F.dropout(x, p))
    with pytest.raises(RuleError, match="is wrong in"):
        check_rule(RULES[aten.dropout.default], [call(f(4, 6), 0.5, True)])


def test_local_batch_statistics_are_caught() -> None:
    op = aten._native_batch_norm_legit_functional.default
    with pytest.raises(RuleError, match="is wrong in"):
        check_rule(Rule(op, RULES[op].strategies), SAMPLES[op][:1], meshes=({"x": 2},))

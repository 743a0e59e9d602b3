"""Every registered rule, every strategy, on shards: value and gradients equal those of the unsharded op."""

from __future__ import annotations

from typing import Any

import linalg_samples
import pytest
import sites
import torch
from every_sample import SAMPLES
from rule_samples import NO_DERIVATIVE, SHAPES_ONLY, call, f

from autoshard.check import rule_check
from autoshard.check.rule_check import check_rule
from autoshard.errors import RuleError
from autoshard.layout import I, P, R, Shard
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.rules import add_rule, all_rules, rule_for
from autoshard.passes.rules.base import Factors, Rule, numbered_factors, sizes_of
from autoshard.passes.rules.families.experts import grouped_rule
from autoshard.passes.rules.families.reshape import view_groups
from autoshard.passes.rules.notation import rule
from autoshard.runtime.operations.experts import experts_op
from autoshard.testing import register_rule

aten = torch.ops.aten
TWO_AXES = ({"a": 2, "b": 2},)


def _has_derivative(op: torch._ops.OpOverload) -> bool:
    name = op._schema.name.removeprefix("aten::")
    return not {name, str(op).removeprefix("aten.")} & (NO_DERIVATIVE | linalg_samples.NO_DERIVATIVE)


@pytest.mark.parametrize("op", [rule.op for rule in all_rules()], ids=str)
@pytest.mark.filterwarnings(
    "ignore:The use of `x.T`", "ignore:at::frobenius_norm", "ignore:torch.meshgrid", "ignore:torch.cholesky"
)
def test_rule(op: torch._ops.OpOverload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_check, "_strategy_error", sites.strategy_error)
    assert op in SAMPLES, f"{op} has a rule and no samples; add some to tests/support/samples/rule_samples.py"
    check = check_rule(op, SAMPLES[op], values=op not in SHAPES_ONLY, gradients=_has_derivative(op))
    assert {"I", "R"} <= check.strategies


@pytest.mark.slow_cases(
    "aten.conv*1d.default",
    "autoshard.experts.default",
    "aten.conv2d.default",
    "aten.matmul.default",
    "aten.slice.Tensor",
    "aten.conv2d.padding",
    "aten.index.Tensor",
    "aten.add.Tensor",
    "aten.scatter_add.default",
    "aten.where.self",
)
@pytest.mark.parametrize(
    "op",
    [
        aten.linear.default,
        aten.matmul.default,
        aten.view.default,
        aten.add.Tensor,
        aten.mul.Tensor,
        aten.sum.dim_IntList,
        aten.mean.dim,
        aten.index.Tensor,
        aten.index_put.default,
        aten.gather.default,
        aten.scatter_add.default,
        aten.index_add.default,
        aten.index_select.default,
        aten.select.int,
        aten.expand.default,
        aten.arange.default,
        aten.where.self,
        aten.slice.Tensor,
        aten.cat.default,
        aten.conv1d.default,
        aten.conv2d.default,
        aten.conv2d.padding,
        aten.conv_transpose1d.default,
        aten.max_pool2d.default,
        experts_op._opoverload,
    ],
    ids=str,
)
def test_pairs_of_strategies(op: torch._ops.OpOverload) -> None:
    """Strategies of two mesh axes combine freely."""
    check_rule(op, SAMPLES[op], meshes=TWO_AXES)


def test_grouped_products_by_rows_and_by_experts() -> None:
    """The ops of mixtures of experts that other libraries define: found by name, exact on every factor."""

    @torch.library.custom_op("autoshard_tests::grouped_mm", mutates_args=())
    def grouped(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        out = x.new_zeros(x.shape[0], weight.shape[2])
        for start, end, w in zip([0, *ends.tolist()], ends.tolist(), weight, strict=False):
            out[start:end] = x[start:end] @ w
        return out

    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight, ends = ctx.saved_tensors
        to_weight = torch.zeros_like(weight)
        for g, (start, end) in enumerate(zip([0, *ends.tolist()], ends.tolist(), strict=False)):
            to_weight[g] = x[start:end].T @ gradient[start:end]
        return grouped(gradient, weight.transpose(1, 2).contiguous(), ends), to_weight, None

    grouped.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    op = torch.ops.autoshard_tests.grouped_mm.default
    samples = [
        call(f(7, 4), f(5, 4, 3), torch.tensor([2, 2, 5, 6, 7])),
        call(f(6, 3), f(4, 3, 4), torch.tensor([0, 3, 3, 5])),
    ]
    check = check_rule(grouped_rule(op), samples)
    assert {"s", "e", "k", "n"} <= check.strategies
    check_rule(grouped_rule(op), samples, meshes=TWO_AXES)


# Negative controls: each wrong rule is caught.


def test_unrecorded_communication_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_check, "_strategy_error", sites.strategy_error)
    check_rule(aten._softmax.default, [call(f(4, 6), 1, False)])
    monkeypatch.setattr(sites, "recorded", lambda at: [])
    with pytest.raises(RuleError, match=r"ranks send .*all_reduce.*and \[\] was recorded"):
        check_rule(aten._softmax.default, [call(f(4, 6), 1, False)])


def _wrong(op: torch._ops.OpOverload, *strategies: Strategy) -> Rule:
    """The true rule of ``op`` with wrong strategies added."""
    true = rule_for(op)
    assert true is not None
    return Rule(op, lambda node, graph: (*true.strategies(node, graph), *strategies), true.local)


WRONG = {
    "add of a summand and a whole": (_wrong(aten.add.Tensor, Strategy("wrong", (P, R), (P,))), [call(f(4), f(4))]),
    "product of summands": (_wrong(aten.mul.Tensor, Strategy("wrong", (P, P), (P,))), [call(f(4), f(4))]),
    "softmax over a sharded dim": (rule(aten._softmax.default, "... -> ..."), [call(f(4, 6), 1, False)]),
    "bias under a sharded contraction": (
        rule(aten.linear.default, "... k, n k, n -> ... n"),
        [call(f(5, 4), f(6, 4), f(6))],
    ),
    "gradient of a whole operand": (
        _wrong(aten.mul.Tensor, Strategy("wrong", (P, R), (R,))),
        [call(f(4), f(4))],
    ),
    "mean over a sharded dim as a mean of means": (
        Rule(aten.mean.dim, rule_for(aten.mean.dim).strategies),
        [call(f(4, 6), [1])],
    ),  # type: ignore[union-attr]
    "view with global sizes": (Rule(aten.view.default, rule_for(aten.view.default).strategies), [call(f(2, 6), [12])]),  # type: ignore[union-attr]
    "uneven heads": (
        Rule(
            aten.view.default,
            lambda node, graph: Factors((("h",),), (("h", None),), {"h": 3}).strategies(node, graph),
            rule_for(aten.view.default).local,  # type: ignore[union-attr]
        ),
        [call(f(12), [3, 4])],
    ),
    "slice of a sharded dim": (
        Rule(
            aten.slice.Tensor,
            lambda node, graph: Factors(
                (numbered_factors((4, 6)),), (numbered_factors((4, 3)),), sizes_of((4, 3))
            ).strategies(node, graph),
        ),
        [call(f(4, 6), 1, 0, 3)],
    ),
    "gradient of an input that lacks the factor": (
        _wrong(aten.linear.default, Strategy("wrong", (P, Shard(0), Shard(0)), (Shard(1),), 6)),
        [call(f(5, 4), f(6, 4), f(6))],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_caught(name: str) -> None:
    wrong, samples = WRONG[name]
    with pytest.raises(RuleError, match=r"is wrong in \d+ of \d+ cases"):
        check_rule(wrong, samples)


def test_a_wrong_gradient_alone_is_caught() -> None:
    """A value that is right with a gradient that is not: R and I hold the same value."""
    with pytest.raises(RuleError, match="gradient of operand 1"):
        check_rule(_wrong(aten.mul.Tensor, Strategy("wrong", (Shard(0), I), (Shard(0),), 4)), [call(f(4), f())])


def test_report_says_what_where_and_with_which_shapes() -> None:
    with pytest.raises(RuleError) as error:
        check_rule(*WRONG["add of a summand and a whole"])
    text = str(error.value)
    for part in ("aten.add.Tensor", "f64[4]", "mesh x=2", "wrong@x: (P, R) → (P)", "result 0 (P@x)", "largest error"):
        assert part in text


def test_nothing_to_check_is_an_error() -> None:
    with pytest.raises(RuleError, match="no sample could run"):
        check_rule(aten.neg.default, [])


@pytest.fixture
def scaled() -> torch._ops.OpOverload:
    """A user's op: x · weight, row by row."""
    if not hasattr(torch.ops.autoshard_tests, "scaled"):

        @torch.library.custom_op("autoshard_tests::scaled", mutates_args=())
        def op(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return x * weight

        op.register_autograd(
            lambda ctx, g: (g * ctx.saved_tensors[1], (g * ctx.saved_tensors[0]).flatten(0, -2).sum(0)),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        )
    return torch.ops.autoshard_tests.scaled.default


def test_users_rules_are_checked_and_registered(scaled: torch._ops.OpOverload) -> None:
    check = register_rule(scaled, "... d, d -> ... d", linear=((0,), (1,)))
    assert check.strategies == {"I", "R", "...0", "d", "P(0)", "P(1)"}
    assert rule_for(scaled) is not None


def test_users_wrong_rules_are_refused(scaled: torch._ops.OpOverload) -> None:
    before = rule_for(scaled)
    with pytest.raises(RuleError, match="is wrong in"):
        register_rule(scaled, "... d, d -> ... d", linear=((0, 1),))
    assert rule_for(scaled) is before
    with pytest.raises(RuleError, match=r"the given rule is for aten\.neg\.default"):
        register_rule(scaled, rule(aten.neg.default, "... -> ..."))


def test_register_replaces() -> None:
    op = aten.neg.default
    before = rule_for(op)
    assert before is not None
    mine = rule(op, "... -> ...")
    try:
        add_rule(mine)
        assert rule_for(op) is mine
    finally:
        add_rule(before)


@pytest.mark.parametrize(
    ("source", "result", "groups"),
    [
        ((2, 12, 5), (2, 3, 4, 5), [((0,), (0,)), ((1,), (1, 2)), ((2,), (3,))]),
        ((2, 3, 4), (24,), [((0, 1, 2), (0,))]),
        ((1, 5, 1), (5, 1), [((1,), (0,))]),
        ((6, 4), (4, 6), [((0, 1), (0, 1))]),
        ((0, 4), (0, 2, 2), []),
        ((), (1,), []),
    ],
)
def test_view_groups(source: tuple[int, ...], result: tuple[int, ...], groups: list[object]) -> None:
    assert view_groups(source, result) == groups

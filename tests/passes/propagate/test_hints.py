"""Hints as text: hints in, constraints and the plan's layouts out, or the error."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Invariant, Partial, Replicate, Shard
from autoshard.compiler import compile_graph
from autoshard.passes.capture.export import capture
from autoshard.passes.ir.graph import Graph
from autoshard.passes.propagate.hints import resolve_hints
from autoshard.plans.options import CompileOptions
from autoshard.plans.plan import Plan

TP = {"tp": 2}
BOTH = {"dp": 2, "tp": 2}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.table(tokens)).relu()) * self.scale


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture(Block(), (torch.zeros(4, 6, dtype=torch.long),), {}, training=True)


def constraints(graph: Graph, axes: dict[str, int], hints: dict[Any, Any]) -> str:
    """One line per value: what is asked of it, and by which pattern."""
    lines = []
    for value, c in resolve_hints(hints, graph, autoshard.Mesh(axes)).items():
        asked = " ".join(f"{p}@{axis}" for axis, p in c.axes) or f"{c.anywhere} on an axis"
        lines.append(f"{value}: {asked}    ({c.pattern!r}, {c.name})")
    return "\n".join(lines)


def check(text: str, expected: str) -> None:
    assert text == textwrap.dedent(expected).strip()


def planned(graph: Graph, axes: dict[str, int], hints: dict[str, Any] | None) -> Plan:
    return compile_graph(graph, autoshard.Mesh(axes, "h100"), CompileOptions(hints=hints)).plan


def layouts(plan: Plan) -> str:
    return "\n".join(f"{n}: {x}" for n, x in plan.layouts.items() if plan.kinds[n] != "value")


def test_a_style_on_modules_is_for_their_parameters(graph: Graph) -> None:
    check(
        constraints(graph, TP, {"table": "colwise", "up": "colwise", "down": "rowwise"}),
        """
        p_table_weight: S(1)@tp    ('table', table.weight)
        p_up_weight: S(0)@tp    ('up', up.weight)
        p_up_bias: S(0)@tp    ('up', up.bias)
        p_down_weight: S(1)@tp    ('down', down.weight)
        """,
    )


def test_the_other_styles(graph: Graph) -> None:
    check(
        constraints(graph, TP, {"table": "rowwise", "up": "rowwise", "down": "replicate"}),
        """
        p_table_weight: S(0)@tp    ('table', table.weight)
        p_up_weight: S(1)@tp    ('up', up.weight)
        p_up_bias: R@tp    ('up', up.bias)
        p_down_weight: R@tp    ('down', down.weight)
        """,
    )


class Bag(nn.Module):
    """A table that is looked up by one of several operations."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by, self.table = by, nn.EmbeddingBag(12, 8, mode="mean") if by == "module" else nn.Embedding(12, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weight = self.table.weight
        if self.by == "function":
            return nn.functional.embedding_bag(tokens, weight, mode="sum")
        if self.by == "scaled":
            return nn.functional.embedding(tokens, weight * 3)
        found: torch.Tensor = self.table(tokens)
        return found.sum(1) if self.by == "sums" else found


@pytest.mark.parametrize("by", ["module", "function", "sums", "scaled"])
@pytest.mark.parametrize("pattern", ["table.weight", "table"])
def test_rows_of_every_table_are_its_dim_0(by: str, pattern: str) -> None:
    """Bags are tables, too: what is pooled, and what is looked up in something made of the table."""
    tokens = torch.zeros(4, 6, dtype=torch.long)
    found, model = capture(Bag(by), (tokens,), {}, training=True), Bag(by).double()
    for style, dim in (("rowwise", 0), ("colwise", 1)):
        (asked,) = resolve_hints({pattern: style}, found, autoshard.Mesh(TP)).values()
        assert asked.axes == (("tp", Shard(dim)),)
        sharded = autoshard.compile(model, TP, (tokens,), hints={pattern: style})
        assert str(sharded.plan.layouts["table.weight"]) == f"S({dim})@tp"
        torch.testing.assert_close(sharded(tokens), model(tokens), rtol=1e-12, atol=1e-14)


def test_a_pattern_means_parameters_and_buffers_first_then_inputs_then_modules(graph: Graph) -> None:
    check(
        constraints(graph, TP, {"*": Replicate(), "tok*": Shard(0), "up": Shard(2)}),
        """
        p_table_weight: R@tp    ('*', table.weight)
        p_up_weight: R@tp    ('*', up.weight)
        p_up_bias: R@tp    ('*', up.bias)
        p_down_weight: R@tp    ('*', down.weight)
        b_scale: R@tp    ('*', scale)
        tokens: S(0)@tp    ('tok*', tokens)
        linear: S(2)@tp    ('up', up)
        """,
    )


def test_a_name_means_itself() -> None:
    """Also one with brackets, which an input of ``*args`` has, and which are a set of characters in a pattern."""

    class Sum(nn.Module):
        def forward(self, *xs: torch.Tensor) -> torch.Tensor:
            return xs[0] + xs[1]

    found = capture(Sum(), (torch.zeros(4, 2), torch.zeros(4, 2)), {}, training=False)
    check(constraints(found, TP, {"xs[1]": Shard(0)}), "xs_1: S(0)@tp    ('xs[1]', xs[1])")


def test_a_later_hint_replaces_an_earlier_one(graph: Graph) -> None:
    hints = {"up.*": Shard(0), "up.weight": {"tp": Shard(1), "dp": Shard(0)}}
    check(
        constraints(graph, BOTH, hints),
        """
        p_up_weight: S(1)@tp S(0)@dp    ('up.weight', up.weight)
        p_up_bias: S(0) on an axis    ('up.*', up.bias)
        """,
    )


def test_the_plan_keeps_hints_and_says_what_it_proves(graph: Graph) -> None:
    hints = {"up": "colwise", "down": "rowwise", "tokens": {"dp": Shard(0)}}
    plan = planned(graph, BOTH, hints)
    check(
        layouts(plan),
        """
        table.weight: I@dp I@tp
        up.weight: S(0)@tp I@dp
        up.bias: S(0)@tp I@dp
        down.weight: S(1)@tp I@dp
        scale: R@dp R@tp
        tokens: R@dp R@tp
        """,
    )
    assert str(plan.shared["tokens"]) == "S(0)@dp R@tp"
    assert plan.given == ("down.weight", "tokens", "up.bias", "up.weight")
    assert "optimal in the cost model with the layouts given;" in " ".join(str(plan).split())
    free = planned(graph, BOTH, None)
    assert free.given == ()
    assert "optimal in the cost model;" in " ".join(str(free).split())


def test_shards_too_small_to_be_chosen_freely(graph: Graph) -> None:
    plan = planned(graph, {"tp": 16}, {"scale": Shard(0), "down.weight": Shard(0)})
    assert [str(plan.shared["scale"]), str(plan.layouts["down.weight"])] == ["S(0)@tp", "S(0)@tp"]


@pytest.mark.parametrize(
    ("hints", "error"),
    [
        (
            {"upp.weight": Shard(0)},
            "hint 'upp.weight' matches no parameter, buffer, input or module. Nearest: up.weight, down.weight, table.weight",
        ),
        ({0: Shard(0)}, "hint 0 is not a pattern: name a parameter, buffer, input or module"),
        ({"up.weight": {"sp": Shard(0)}}, "hint 'up.weight' names axis 'sp', but the mesh has dp, tp"),
        ({"up.weight": {"tp": 0}}, "hint 'up.weight': 0 on axis 'tp' is not Shard(d), Replicate() or Partial()"),
        (
            {"up.weight": "columnwise"},
            "hint 'up.weight': 'columnwise' is not a hint. Use Shard(d), Replicate(), 'colwise', 'rowwise', 'replicate', "
            "or {axis: placement}.",
        ),
        (
            {"up.weight": {"tp": Shard(2)}},
            "hint 'up.weight' asks for Shard(2) on axis 'tp', but parameter 'up.weight' has 2 dims, shape [16, 8]. "
            "Use Shard(0) to Shard(1).",
        ),
        (
            {"up": Shard(3)},
            "hint 'up' asks for Shard(3), but the output of module 'up' has 3 dims, shape [4, 6, 16]. "
            "Use Shard(0) to Shard(2).",
        ),
        (
            {"scale": Partial()},
            "hint 'scale' asks for Partial, but buffer 'scale' is replicated or sharded. Use Shard(d) or Replicate().",
        ),
    ],
)
def test_errors(graph: Graph, hints: dict[Any, Any], error: str) -> None:
    with pytest.raises(autoshard.HintError) as caught:
        constraints(graph, BOTH, hints)
    assert str(caught.value) == error


class Listed(nn.Module):
    """A list of blocks, which nobody calls, and a module whose weight is read from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))
        self.held = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.held.weight)


def test_a_module_that_is_never_called_is_one() -> None:
    """All parameters under it are meant by "replicate", its own by the other styles; it has no output."""
    found = capture(Listed(), (torch.zeros(4, 8),), {}, training=True)
    check(
        constraints(found, TP, {"blocks": "replicate", "held": "rowwise"}),
        """
        p_blocks_0_0_weight: R@tp    ('blocks', blocks.0.0.weight)
        p_blocks_0_0_bias: R@tp    ('blocks', blocks.0.0.bias)
        p_blocks_1_0_weight: R@tp    ('blocks', blocks.1.0.weight)
        p_blocks_1_0_bias: R@tp    ('blocks', blocks.1.0.bias)
        p_held_weight: S(1)@tp    ('held', held.weight)
        p_held_bias: R@tp    ('held', held.bias)
        """,
    )
    for hints, error in (
        ({"blocks": "colwise"}, "hint 'blocks': module 'blocks' has no parameters of its own to lay out 'colwise'"),
        (
            {"blocks": Shard(0)},
            "hint 'blocks': module 'blocks' is never called, so it has no output to lay out as Shard(dim=0). Hint its "
            "parameters, or modules in it",
        ),
        (
            {"block": Shard(0)},
            "hint 'block' matches no parameter, buffer, input or module. Nearest: blocks, blocks.1, ",
        ),
    ):
        with pytest.raises(autoshard.HintError) as caught:
            constraints(found, TP, hints)
        assert str(caught.value).startswith(error)


class Experts(nn.Module):
    """A loop over experts, which becomes one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16, bias=False), nn.SiLU(), nn.Linear(16, 8, bias=False)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(1, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == number)
            out[rows] += weights[rows, slots, None] * expert(x[rows])
        return out


def test_experts_that_became_one_operation() -> None:
    """Their weights are hinted one by one; an output of their own they have none, and it is said why."""
    found = capture(Experts(), (torch.zeros(4, 8),), {}, training=True)
    resolve_hints({"experts.0.0.weight": Shard(1), "experts.1.0": "colwise"}, found, autoshard.Mesh(TP))
    for pattern in ("experts.0.0", "experts.1", "experts"):
        told = rf"module '{pattern}' became part of one operation \(experts in the model at test_hints.py:\d+\).*Hint its param"
        with pytest.raises(autoshard.HintError, match=told):
            resolve_hints({pattern: Shard(0)}, found, autoshard.Mesh(TP))


def test_a_module_without_parameters_has_no_style() -> None:
    found = capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.zeros(2, 4),), {}, training=True)
    with pytest.raises(autoshard.HintError) as caught:
        resolve_hints({"1": "colwise"}, found, autoshard.Mesh(TP))
    assert str(caught.value) == "hint '1': module '1' has no parameters of its own to lay out 'colwise'"


def test_replicate_leaves_the_gradient_open(graph: Graph) -> None:
    """Whole is whole, whatever lies in front of its gradient."""
    assert planned(graph, TP, {"*": "replicate"}).layouts["up.weight"].placements == (Invariant(),)


class Tied(nn.Module):
    """A table that is the weight of a layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 16), nn.Linear(16, 20, bias=False)
        self.head.weight = self.table.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(rows)).square().mean()


@pytest.mark.parametrize(
    ("pattern", "style", "layout"),
    [
        ("head.weight", "colwise", "S(0)@tp"),
        ("head.weight", "rowwise", "S(1)@tp"),
        ("head", "colwise", "S(0)@tp"),
        ("table.weight", "colwise", "S(1)@tp"),
        ("table", "rowwise", "S(0)@tp"),
        ("*.weight", "rowwise", "S(0)@tp"),
    ],
)
def test_a_tied_weight_is_what_the_module_that_is_named_reads_it_as(pattern: str, style: str, layout: str) -> None:
    rows = torch.zeros(4, 6, dtype=torch.int64)
    plan = autoshard.plan(Tied(), autoshard.Mesh({"tp": 2}, "ideal_network"), (rows,), hints={pattern: style})
    assert str(plan.layouts["table.weight"]) == layout

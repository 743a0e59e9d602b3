"""The choice of layouts as text: a small graph in, the assignment out."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from programs import cost_matrix
from torch import nn

import autoshard
from autoshard.layout import Layout
from autoshard.passes.capture.export import capture
from autoshard.passes.ir.assignment import Assignment
from autoshard.passes.ir.graph import Graph
from autoshard.passes.ir.sizes import record_conditions
from autoshard.passes.propagate import edges
from autoshard.passes.propagate.edges import EdgeTables
from autoshard.passes.propagate.hints import resolve_hints
from autoshard.passes.propagate.op_space import OpSpaces
from autoshard.passes.propagate.planner import Planner, with_proven_bound
from autoshard.passes.propagate.prices.collective_overheads import copy_seconds
from autoshard.passes.search.arrays import dense_matrix


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Tied(nn.Module):
    """A table that is read twice, a buffer that is written, a loss beside another output."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.table(i)
        self.seen.add_(h.detach().sum(0))
        return F.cross_entropy(self.head(h), i), h


class Squared(nn.Module):
    """A parameter that one operation reads twice."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w @ self.w + x


ROWS = torch.zeros(8, 16)


def assigned(
    model: nn.Module,
    axes: dict[str, int],
    *args: torch.Tensor,
    hints: dict[str, Any] | None = None,
    hardware: str = "ideal_network",
    training: bool = True,
) -> Assignment:
    mesh = autoshard.Mesh(axes, hardware)
    graph = capture(model, args, {}, training=training)
    return with_proven_bound(Planner(graph, mesh, resolve_hints(hints, graph, mesh)).cheapest())


def check(assignment: Assignment, expected: str) -> None:
    assert str(assignment) == textwrap.dedent(expected).strip()


def test_column_then_row_parallel() -> None:
    check(
        assigned(Mlp(), {"tp": 2}, ROWS),
        """
        p_up_weight: S(0)@tp
        p_up_bias: S(0)@tp
        p_down_weight: S(1)@tp
        x: R@tp
        linear: S(1)@tp = aten.linear.default(x, p_up_weight, p_up_bias)    [n@tp]
        gelu: S(1)@tp = aten.gelu.default(linear)    [...1@tp]
        linear_1: P@tp = aten.linear.default(gelu, p_down_weight)    [k@tp]
        add: S(0)@tp = aten.add.Tensor(x: R@tp → S(0)@tp, linear_1: P@tp → S(0)@tp)    [...0@tp]
        return add
        """,
    )


def test_what_is_not_worth_splitting_stays_whole() -> None:
    check(
        assigned(Mlp(), {"tp": 2}, ROWS, hardware="h100"),
        """
        p_up_weight: I@tp
        p_up_bias: I@tp
        p_down_weight: I@tp
        x: R@tp
        linear: I@tp = aten.linear.default(x, p_up_weight, p_up_bias)    [I@tp]
        gelu: I@tp = aten.gelu.default(linear)    [I@tp]
        linear_1: I@tp = aten.linear.default(gelu, p_down_weight)    [I@tp]
        add: I@tp = aten.add.Tensor(x, linear_1)    [I@tp]
        return add
        """,
    )


def test_hints_fix_parameters_and_the_rest_follows() -> None:
    check(
        assigned(Mlp(), {"tp": 2}, ROWS, hints={"up": "colwise", "down": "rowwise"}, hardware="h100"),
        """
        p_up_weight: S(0)@tp
        p_up_bias: S(0)@tp
        p_down_weight: S(1)@tp
        x: R@tp
        linear: S(1)@tp = aten.linear.default(x, p_up_weight, p_up_bias)    [n@tp]
        gelu: S(1)@tp = aten.gelu.default(linear)    [...1@tp]
        linear_1: P@tp = aten.linear.default(gelu, p_down_weight)    [k@tp]
        add: I@tp = aten.add.Tensor(x, linear_1: P@tp → I@tp)    [I@tp]
        return add
        """,
    )


def test_readers_of_a_hinted_input_convert_from_the_shared_layout() -> None:
    """In inference I and R are one."""
    hints = {"up": "colwise", "x": {"dp": autoshard.Shard(0)}}
    check(
        assigned(Mlp(), {"dp": 2, "tp": 2}, ROWS, hints=hints, training=False),
        """
        p_up_weight: S(0)@tp R@dp
        p_up_bias: S(0)@tp R@dp
        p_down_weight: R@dp R@tp
        x: R@dp R@tp, shared: S(0)@dp R@tp
        linear: S(0)@dp S(1)@tp = aten.linear.default(x, p_up_weight, p_up_bias)    [...0@dp n@tp]
        gelu: S(0)@dp S(0)@tp = aten.gelu.default(linear: S(0)@dp S(1)@tp → S(0)@dp S(0)@tp)    [...0@dp ...0@tp]
        linear_1: S(0)@dp S(0)@tp = aten.linear.default(gelu, p_down_weight)    [...0@dp ...0@tp]
        add: S(0)@dp S(0)@tp = aten.add.Tensor(x: S(0)@dp R@tp → S(0)@dp S(0)@tp, linear_1)    [...0@dp ...0@tp]
        return add
        """,
    )


def test_a_tied_table_and_a_written_buffer() -> None:
    check(
        assigned(Tied(), {"tp": 2}, torch.zeros(4, dtype=torch.long)),
        """
        p_table_weight: S(1)@tp
        b_seen: R@tp
        i: R@tp
        embedding: S(1)@tp = aten.embedding.default(p_table_weight, i)    [embed@tp]
        detach: S(1)@tp = aten.detach.default(embedding)    [...1@tp]
        sum_1: S(0)@tp = aten.sum.dim_IntList(detach)    [d1@tp]
        add: S(0)@tp = aten.add.Tensor(b_seen: R@tp → S(0)@tp, sum_1)    [...0@tp]
        linear: P@tp = aten.linear.default(embedding, p_table_weight)    [k@tp]
        cross_entropy_loss: I@tp = aten.cross_entropy_loss.default(linear: P@tp → I@tp, i)    [I@tp]
        return cross_entropy_loss, embedding
        seen ← add: S(0)@tp → R@tp
        """,
    )


def test_an_operation_that_reads_a_value_in_two_layouts() -> None:
    """Brought to R once, for both."""
    check(
        assigned(Squared(), {"tp": 2}, torch.zeros(8, 8)),
        """
        p_w: I@tp, shared: R@tp
        x: R@tp
        matmul: S(0)@tp = aten.matmul.default(p_w: R@tp → S(0)@tp, p_w)    [m@tp]
        add: S(0)@tp = aten.add.Tensor(matmul, x: R@tp → S(0)@tp)    [...0@tp]
        return add
        """,
    )


def test_what_edges_cannot_tell_apart_is_stored_once() -> None:
    """Of a value that is read as query, key and value, too, whose later readings pay only where they ask for another layout."""

    class Attends(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x, x).square().mean()

    graph = capture(Attends(), (torch.empty(2, 4, 16, 8, requires_grad=True),), {})
    network = Planner(graph, autoshard.Mesh({"tp": 4}), {}).network(limited=False)[0]
    tables = EdgeTables(graph, network.mesh)
    masked = [link for link in network.links if link.mask is not None]
    assert masked
    for link in masked:
        table = tables.of(link, held=False)
        sides = [[Layout(network.mesh, p) for p in side.placed] for side in (link.given, link.asked)]
        type_ = graph.types[link.value]
        expected = cost_matrix(*sides, type_.shape, type_.dtype, type_.moves, type_.unknown)
        expected += sum(copy_seconds(type_, *sides, parameter=False))
        whole = sum(table.parts)[np.ix_(table.rows, table.columns)]
        np.testing.assert_allclose(whole, np.where(link.mask, expected, 0.0), rtol=1e-12)


def spaces_of(dynamic: bool) -> tuple[OpSpaces, OpSpaces, Graph]:
    """Of one graph on one mesh, twice."""
    model = nn.Sequential(nn.Flatten(0, 1), nn.Linear(16, 32))
    graph = capture(model, (torch.zeros(4, 12, 16),), {}, training=True, dynamic=dynamic)
    mesh = autoshard.Mesh({"tp": 2})
    return OpSpaces(graph, mesh), OpSpaces(graph, mesh), graph


def test_what_asks_after_the_search_asks_the_spaces_that_it_searched() -> None:
    first, second, graph = spaces_of(dynamic=False)
    assert all(first[node] is second[node] for node in graph.nodes)
    other = OpSpaces(graph, autoshard.Mesh({"tp": 4}))
    assert not any(first[node] is other[node] for node in graph.nodes)


def test_every_search_notes_what_it_decides_about_open_lengths() -> None:
    *twice, graph = spaces_of(dynamic=True)
    conditions = []
    for spaces in twice:
        with record_conditions() as decided:
            assert all(spaces[node].choices for node in graph.nodes)
        conditions.append([str(c) for c in decided])
    (first,), (second,) = conditions
    assert first == second


def test_networks_with_bytes_and_without_share_what_conversions_take(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, mesh = capture(Mlp(), (torch.zeros(64, 16),), {}, training=True), autoshard.Mesh({"dp": 2, "tp": 2})
    made: list[int] = []
    asked = edges.conversion_parts
    monkeypatch.setattr(edges, "conversion_parts", lambda *terms: made.append(1) or asked(*terms))

    def tables(without: bool) -> list[np.ndarray]:
        planner = Planner(graph, mesh, {}, recompute="auto")
        if without:
            planner.network(limited=False)
        made.clear()
        built = planner.network(limited=True)[1]
        rows = (*built.hiding, *built.kept)
        matrices = [table for *_, table in built.network.edges] + [
            m for row in rows for m in row.edges if m is not None
        ]
        return [*built.network.nodes, *map(dense_matrix, matrices)]

    alone, count = tables(without=False), len(made)
    after = tables(without=True)
    assert len(made) < count
    assert all(map(np.array_equal, alone, after))

"""Look-ups in tables of one owner each: those that go together, and how what came lies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from drawn_models import changed
from lowering_steps import change
from table_models import DCN, fields
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autoshard
from autoshard.compiler import capture_graph
from autoshard.hardware import PRESETS, Link
from autoshard.layout import I, Layout, Owned, R, Shard
from autoshard.passes.capture import capture
from autoshard.passes.ir.graph import TensorType
from autoshard.passes.lower.coalescing import group_look_ups
from autoshard.passes.propagate import embedding_tables, op_space
from autoshard.passes.propagate.objective import alternatives, objective
from autoshard.passes.propagate.op_space import OpSpaces
from autoshard.passes.propagate.prices import coalescing
from autoshard.passes.propagate.prices.roofline import optimizer_seconds
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.families import embedding
from autoshard.plans.options import CompileOptions
from autoshard.plans.planning import plan_graph
from autoshard.runtime.operations.tables import LookupArrival, LookupGroup, _UnpackedTables, unpack_tables


class Tables(nn.Module):
    """``nested``: the second look-up needs what the first one found."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.users, self.items, self.nested = nn.Embedding(8, 4), nn.Embedding(6, 4), nested

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        found = self.users(user)
        return (found * self.items(found.argmax(-1) if self.nested else item)).sum()


def test_look_ups_in_tables_of_one_owner_each_go_together() -> None:
    """Negative control: not where one needs the other."""
    given, asked = (torch.arange(4), torch.arange(4)), {"like": {"tp": "table-wise"}}
    assert change(group_look_ups, Tables(nested=False), *given, **asked) == [
        "- embedding: f32[4, 4] S(0)@tp = runtime.table_wise([p_users_weight], [user], [0], 'tp', 'sum')",
        "- embedding_1: f32[4, 4] S(0)@tp = runtime.table_wise([p_items_weight], [item], [1], 'tp', 'sum')",
        "+ embedding: f32[4, 4] S(0)@tp, embedding_1: f32[4, 4] S(0)@tp = "
        "runtime.table_wise([p_users_weight, p_items_weight], [user, item], [0, 1], 'tp', 'sum')",
    ]
    assert change(group_look_ups, Tables(nested=True), *given, **asked) == []


class Pools(nn.Module):
    """Sums of rows of two tables. ``apart``: what makes two look-ups of them."""

    def __init__(self, apart: str = "") -> None:
        super().__init__()
        self.users = nn.Embedding(8, 4, padding_idx=2, sparse=apart == "sparse")
        self.items, self.apart = nn.Embedding(6, 8 if apart == "width" else 4, sparse=apart == "sparse"), apart

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        found = self.users(users).sum(1)
        if self.apart == "nested":
            items = items + (found > 1e9).sum(1, keepdim=True)
        rows = self.items(items)
        return (found.sum(1) * (rows.mean(1) if self.apart == "mode" else rows.sum(1)).sum(1)).sum()


@pytest.mark.slow
def test_look_ups_in_tables_that_are_cut_alike_go_in_one_call() -> None:
    """Negative controls: not where one needs the other, and not those that pool otherwise."""
    given = torch.arange(8).view(4, 2), torch.arange(8).view(4, 2) % 6
    tables, indices = "[p_users_weight, p_items_weight]", "[users, items]"
    calls = {
        "column-wise": f"S(1)@tp = runtime.pooled_together({tables}, {indices}, 'sum', padding=[2, -1])",
        "row-wise": f"P@tp = runtime.pooled_together({tables}, {indices}, 'sum', padding=[2, -1], sizes=[8, 6], axes='tp')",
    }
    for like, call in calls.items():
        lines = change(group_look_ups, Pools(), *given, like=like)
        assert next(line for line in lines if line[0] == "+").endswith(call), lines
        assert len(lines) == 3, lines
        for apart in ("nested", "mode", "width", "sparse"):
            assert change(group_look_ups, Pools(apart), *given, like=like) == [], (like, apart)


@pytest.mark.parametrize("like", ["column-wise", "row-wise", "replicate"])
@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 4}, {"dp": 2, "x": 2}], ids=str)
def test_one_call_computes_what_look_ups_do_one_by_one(like: str, mesh: dict[str, int]) -> None:
    """Rows that do not divide, and a row of padding."""

    class Few(Pools):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.Embedding(7, 4)

    torch.manual_seed(0)
    model, args = Few().double(), (torch.randint(8, (8, 2)), torch.randint(6, (8, 2)))
    asked = {a: like if a == "x" else "ddp" for a in mesh}
    sharded = autoshard.compile(model, autoshard.Mesh(mesh), args, like=asked, training=True)
    assert "runtime.pooled_together(" in sharded.source
    report = autoshard.verify(model, autoshard.Mesh(mesh), args, plan=sharded.plan)
    assert report.ok, str(report)
    with pytest.raises((IndexError, RuntimeError), match=r"out of range|Expected idx"):
        sharded(args[0], args[1] + 7)


def test_tables_asked_for_whole_give_summands_only_where_the_batch_does_not_divide() -> None:
    """Summands take as many times the bytes as there are ranks, which prices of small batches do not see."""

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(20000, 64) for _ in range(8))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.cat([table(ids[:, i]).sum(1) for i, table in enumerate(self.tables)], 1).square().mean()

    with torch.device("meta"):
        model = Many()
    for rows, label in ((2048, "table"), (2, "table sums")):
        ids = torch.zeros(rows, 8, 8, dtype=torch.int64)
        plan = autoshard.plan(model, autoshard.Mesh({"x": 4}), (ids,), like="table-wise", training=True)
        assert {c.labels[0] for c in plan.choices.values() if "pooled" in c.op} == {label}


class Features(nn.Module):
    """What is looked up in six tables of which the first ones are the largest, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(2000 // (i + 1), 16) for i in range(6))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([table(ids[:, i]).sum(1) for i, table in enumerate(self.tables)], 1).square().mean()


LATE = replace(PRESETS["cpu"], node=Link(latency=2e-3, bandwidth=1e9), kernel_latency=1e-7)


def features(like: str, hints: dict[str, Any] | None = None) -> autoshard.Plan:
    mesh = autoshard.Mesh({"x": 4}, hardware=LATE)
    with torch.device("meta"):
        model, ids = Features(), torch.zeros(64, 6, 4, dtype=torch.int64)
    return autoshard.plan(model, mesh, (ids,), like=like, hints=hints, training=True)


def first_two(placement: Shard) -> dict[str, Any]:
    """Hints for these of :class:`Features`' tables."""
    return {f"tables.{i}.weight": {"x": placement} for i in range(2)}


@pytest.mark.parametrize("like", ["table-wise", "row-wise", "column-wise"])
def test_what_is_looked_up_pays_for_the_one_message_that_brings_it(like: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the search counts what runs. Negative control: each by itself pays five latencies too much, each way."""
    found = features(like)
    messages = [c for c in found.collectives if c.kind != "all_reduce"]
    assert [c.phase for c in messages] == ["forward", "backward"]
    assert found.cost.merged_s == pytest.approx(0.0, abs=1e-4 * LATE.node.latency)
    monkeypatch.setattr(coalescing, "MAX_GROUPED_AXES", 0)
    monkeypatch.setattr(coalescing, "_coalesced_shares", lambda graph, waits: {})
    rules = {op: replace(rule_for(op), annotate=None) for op in embedding.LOOKUP_OPS}
    monkeypatch.setattr(op_space, "rule_for", lambda op: rules.get(op) or rule_for(op))
    monkeypatch.setattr(embedding_tables, "groupable_lookups", lambda graph, mesh: ())
    latencies = sum(found.mesh.link("x").rate(c.kind)[0] for c in messages)
    assert features(like).cost.merged_s == pytest.approx(5 * latencies, rel=1e-2)


def test_ways_of_what_is_looked_up_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two of six tables go another way, both pay by themselves. Negative control: told apart no more, all six pay
    less than the messages take."""

    def merged() -> float:
        plan = features("column-wise", first_two(Shard(0)))
        assert {c.kind for c in plan.collectives if c.fqn} == {"reduce_scatter", "all_to_all", "all_gather"}
        assert plan.cost.total_s == pytest.approx(plan.cost.lower_bound)
        return plan.cost.merged_s

    latencies = sum(LATE.node.rate(kind, 4)[0] for kind in ("reduce_scatter", "all_gather"))
    assert merged() == pytest.approx(latencies, rel=1e-2)
    monkeypatch.setattr(coalescing, "MAX_GROUPED_AXES", 0)
    assert merged() == pytest.approx(-latencies, rel=1e-2)


def test_tables_of_one_owner_each_share_with_those_that_lie_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two of six tables are cut, four pay for their message. Negative control: they pay as if it brought six."""

    def merged() -> float:
        plan = features("table-wise", first_two(Shard(1)))
        assert [c.labels for c in plan.choices.values() if "pooled" in c.op] == [("embed",)] * 2 + [("table",)] * 4
        assert plan.cost.total_s == pytest.approx(plan.cost.lower_bound)
        return plan.cost.merged_s

    latency = LATE.node.rate("all_to_all", 4)[0]
    assert merged() == pytest.approx(0.0, abs=1e-2 * latency)
    monkeypatch.setattr(embedding_tables, "groupable_lookups", lambda graph, mesh: ())
    assert merged() == pytest.approx(-2 * 2 / 6 * latency, rel=1e-2)


class Sized(nn.Module):
    """Tables of so many rows, whose look-ups go in one call."""

    def __init__(self, *rows: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, 16) for n in rows)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], 1).square().mean()


@pytest.mark.parametrize("sharing", [(), ((1, 0.5), (2, 0.5), (4, 1.0))])
@pytest.mark.parametrize("cut", [(), (0,), (1, 2, 3), (2, 3)])
@pytest.mark.parametrize("rows", [(900, 300, 200, 100), (900, 800, 700, 100), (400, 400, 400, 400)])
def test_the_update_takes_what_the_fullest_rank_has(
    rows: tuple[int, ...], cut: tuple[int, ...], sharing: tuple[tuple[int, float], ...]
) -> None:
    """Of tables of one owner each, whether or not others are ``cut``; and where cores are shared, while the other ranks wait:
    about, where some of the smaller ones are cut, as those that are not count what they do beside all of them."""
    mesh = autoshard.Mesh({"x": 4}, hardware=replace(LATE, sharing=sharing))
    with torch.device("meta"):
        model, ids = Sized(*rows), torch.zeros(64, 4, dtype=torch.int64)
    columns = {f"tables.{i}.weight": {"x": Shard(1)} for i in cut}
    plan = autoshard.plan(model, mesh, (ids,), like="table-wise", hints=columns, training=True)
    layouts = [plan.layouts[f"tables.{i}.weight"]["x"] for i in range(4)]
    owned = [0] * 4
    for n, x in zip(rows, layouts, strict=True):
        if isinstance(x, Owned):
            owned[x.owner] += n
    assert [isinstance(x, Owned) for x in layouts] == [i not in cut for i in range(4)]
    working = sum(owned) / max(owned)
    expected = max(owned) * mesh.hardware.relative_duration(working, 4) + sum(rows[i] for i in cut) / 4
    each = optimizer_seconds("adamw", TensorType((1, 16), torch.float32, True), (R,), mesh)
    assert plan.cost.optimizer_s == pytest.approx(expected * each, rel=0.2 if sharing and cut == (2, 3) else 1e-6)


@pytest.mark.parametrize("cpu", [True, False])
def test_a_look_up_pays_for_the_kernels_of_its_form(cpu: bool) -> None:
    """With the sum two; in a table cut by rows four more; all but one of these once for six where a node does all of them;
    where tables have one owner each, a rank's part of them."""
    mesh = autoshard.Mesh({"x": 4}, hardware=replace(LATE, kernel_latency=1.0, cpu=cpu))
    graph = capture_graph(Features(), (torch.zeros(64, 6, 4, dtype=torch.int64),), {}, training=True)
    node = next(n for n in graph.nodes if "pooled" in str(n.op))
    space = OpSpaces(graph, mesh)[node]
    launches = {choice[0].label: tuple(x) for choice, x in zip(space.choices, space.phases[1].T, strict=True)}
    plain, rows = (1 + 1 / 6, 1 + 5 / 6) if cpu else (2.0, 6.0)
    for label, kernels in {"I": plain, "embed": plain, "vocab": rows, "table": 0.5}.items():
        assert launches[label] == pytest.approx((kernels, kernels)), label


@pytest.mark.slow_cases("0.99")
@pytest.mark.slow
@pytest.mark.parametrize("part", [0.99, 0.4])
def test_tables_of_one_owner_each_within_memory(part: float) -> None:
    """Where few plans fit: the way that look-ups go is what they do."""
    mesh = autoshard.Mesh({"x": 2, "y": 2}, hardware=LATE)
    with torch.device("meta"):
        model, ids = Sized(900, 300, 200, 100), torch.zeros(64, 4, dtype=torch.int64)
    budget = part * autoshard.plan(model, mesh, (ids,), training=True).memory.peak
    plan = autoshard.plan(model, mesh, (ids,), training=True, memory_budget=budget)
    assert plan.memory.peak <= budget


def test_what_is_looked_up_in_frozen_tables_goes_by_itself() -> None:
    """Beside more that are trained: of the frozen ones, which shared a latency whichever way each went, both pay one."""
    mesh = autoshard.Mesh({"x": 2}, hardware=LATE)
    model, ids = Sized(200_000, 200_000, 40, 40, 40), torch.zeros(64, 5, dtype=torch.int64)
    for i in (0, 1):
        model.tables[i].weight.requires_grad_(False)
    hints = {f"tables.{i}.weight": {"x": Shard(i)} for i in (0, 1)}
    plan = autoshard.plan(model, mesh, (ids,), hints=hints, training=True)
    assert plan.collectives
    assert plan.cost.merged_s >= -1e-9
    assert plan.cost.schedule_s <= plan.cost.total_s * (1 + 1e-6)


@pytest.mark.slow_cases("axes2", "axes1")
@pytest.mark.parametrize("axes", [{"x": 4}, {"x": 2, "y": 2}, {"x": 4, "y": 1}])
def test_no_plan_of_a_recommender_is_above_one_by_name(axes: dict[str, int]) -> None:
    with torch.device("meta"):
        model, ids = Features(), torch.zeros(64, 6, 4, dtype=torch.int64)
    mesh = autoshard.Mesh(axes, hardware=LATE)
    graph = capture(model, (ids,), {}, training=True)
    found = plan_graph(graph, mesh, CompileOptions())[0].assignment
    assert objective(found).total_s == pytest.approx(found.solution.cost, rel=1e-12)
    for like in ("table-wise", "row-wise", "column-wise", "ddp", "fsdp"):
        named = plan_graph(graph, mesh, CompileOptions(like=dict.fromkeys(axes, like)))[0].assignment
        assert objective(named).total_s == pytest.approx(named.solution.cost, rel=1e-12)
        assert found.solution.cost <= named.solution.cost * (1 + 1e-12)


@pytest.mark.parametrize("nested", [False, True])
def test_look_ups_that_go_together_are_counted_where_they_are_captured(nested: bool) -> None:
    graph = capture(Tables(nested), (torch.arange(4), torch.arange(4)), {}, training=True)
    assert [graph.types[name].together for name in graph.parameters] == [1 if nested else 2] * 2


def test_bags_that_are_pooled_otherwise_go_by_themselves() -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = nn.ModuleList(nn.EmbeddingBag(9, 4, mode=mode) for mode in ("sum", "sum", "mean"))

        def forward(self, ids: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
            return torch.cat([bag(ids, starts) for bag in self.bags], 1).sum()

    graph = capture(Bags(), (torch.arange(8), torch.arange(0, 8, 2)), {}, training=True)
    assert [graph.types[name].together for name in sorted(graph.parameters)] == [2, 2, 1]


class Written(TorchDispatchMode):
    """Elements that are written to inside, by operations that make no view."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if str(func) in ("aten.copy_.default", "aten.zero_.default", "aten.cat.default", "aten.stack.default"):
            self.elements += found.numel()
        return found


@pytest.mark.parametrize("by_row", [True, False])
def test_gradients_of_what_came_are_copied_once(by_row: bool) -> None:
    """To where they are sent from; and they have derivatives. One of the tables gets no gradient."""
    groups = LookupGroup((0, 1, 2), 4, 3, by_row), LookupGroup((3,), 4, 2, by_row)
    arrivals = (
        LookupArrival(groups[0], (0, 2), 2, 12),
        LookupArrival(groups[0], (1,), 2, 6),
        LookupArrival(groups[1], (3,), 2, 4),
    )
    moved = torch.randn(22, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def results(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _UnpackedTables.apply(x, arrivals)[:3]  # type: ignore[no-untyped-call, no-any-return]

    assert [tuple(x.shape) for x in unpack_tables(moved, arrivals)] == [(2, width) for width in (3, 3, 3, 2)]
    assert sorted(i for x in unpack_tables(torch.arange(22), arrivals) for i in x.flatten().tolist()) == list(range(22))
    assert torch.autograd.gradcheck(results, moved)
    assert torch.autograd.gradgradcheck(results, moved)
    found = torch.cat(results(moved), 1).square().sum()
    with Written() as written:
        found.backward()
    assert written.elements == len(moved)


@pytest.mark.slow_cases("*True", "{'dp': 2, 'x': 2}-False")
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("axes", [{"x": 4}, {"dp": 2, "x": 2}], ids=str)
def test_what_a_table_costs_elsewhere_is_the_difference_of_totals(axes: dict[str, int], sparse: bool) -> None:
    """By row, by column and whole on every rank: where it is read so, it lies so. With any optimizer."""
    optimizer = "adamw" if sparse else "sgd"
    model, args = fields(DCN, sparse, 8)
    graph, mesh = capture_graph(model, args, {}, training=True), autoshard.Mesh(axes, "h100")
    like = {axis: "table-wise" if axis == "x" else "ddp" for axis in axes}
    assignment = plan_graph(graph, mesh, CompileOptions(like=like))[0].assignment
    found, total = alternatives(assignment, 100, optimizer), objective(assignment, optimizer).total_s
    for node in (n for n in graph.nodes if "embedding" in str(n.op)):
        table, seen = node.inputs[node.positions["weight"]], set()
        for labels, more in found[node.name]:
            other = changed(assignment, node, labels)
            read = other.use(node, node.positions["weight"])
            lies = Layout(mesh, [p if isinstance(p, Shard | Owned) else I for p in read])
            other = replace(other, layouts={**other.layouts, table: lies})
            assert objective(other, optimizer).total_s - total == pytest.approx(more, abs=1e-9 * total)
            seen.add(labels[-1])
        assert {"vocab", "embed", "I"} <= seen


def test_plans_tell_it_for_their_optimizer() -> None:
    (model, args), told = fields(DCN, False, 8), set[Any]()
    for optimizer in ("adamw", "sgd"):
        plan = autoshard.plan(model, {"x": 2}, args, like="table-wise", optimizer=optimizer, hardware="h100")
        told.add(tuple(tuple(c.alternatives) for c in plan.choices.values() if "embedding" in c.op))
    assert len(told) == 2


class Twice(nn.Module):
    """One table is read by two look-ups."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.items = nn.Embedding(8, 4), nn.Embedding(6, 4)

    def forward(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        return (self.words(one) * self.words(two) * self.items(one)).sum()


def test_a_table_that_two_read_does_not_lie_as_one_of_them_likes() -> None:
    plan = autoshard.plan(Twice(), {"x": 2}, (torch.arange(4), torch.arange(4)), like="table-wise")
    found = {n: {label for (label,), _ in c.alternatives} for n, c in plan.choices.items() if "embedding" in c.op}
    assert found["embedding"] == found["embedding_1"] == {"table sums"}
    assert "I" in found["embedding_2"]

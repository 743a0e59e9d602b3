"""One price for one thing: the plan's total is what was searched, and no hint beats a plan that is called optimal."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from drawn_models import Attention, Heads, changed, compiled, drawn
from programs import layouts_on
from torch import nn

import autoshard
from autoshard import Layout, Replicate, Shard
from autoshard.compiler import Compiled
from autoshard.hardware import PRESETS
from autoshard.layout import I, P, Placement, R
from autoshard.passes.capture.export import capture
from autoshard.passes.ir.assignment import Assignment, normalize_placement
from autoshard.passes.ir.graph import Graph, Ref
from autoshard.passes.propagate import edges
from autoshard.passes.propagate.activation_memory import EdgeSide
from autoshard.passes.propagate.edges import EdgeTables, ValueEdge, conversion_parts, operand_reads
from autoshard.passes.propagate.objective import alternatives, objective
from autoshard.passes.propagate.op_space import axis_strategies, op_space
from autoshard.passes.propagate.prices import roofline as costs
from autoshard.passes.propagate.prices.coalescing import latency_shares
from autoshard.passes.propagate.prices.collective_overheads import copy_seconds
from autoshard.passes.propagate.prices.overlap import StepParts, movable_values
from autoshard.passes.propagate.prices.roofline import fused_traffic, local_numel
from autoshard.passes.redistribute import redistribution
from autoshard.passes.redistribute.pricing import UNSHARED_MESSAGES
from autoshard.passes.search import Solution
from autoshard.passes.search.limits import LIMITS
from autoshard.plans.plan import Plan


def hints_for(graph: Graph, axes: tuple[str, ...], r: random.Random) -> Iterator[dict[str, Any]]:
    """Hints at random, some of which cannot be met."""
    names = [i.fqn for i in graph.inputs if i.kind != "constant"]
    names += ["*", *dict.fromkeys(path for n in graph.nodes for path, _ in n.module_types if path)]
    kinds = ["colwise", "rowwise", "replicate", Shard(0), Shard(1), Replicate()]
    while True:
        asked = [r.choice(kinds), {r.choice(axes): r.choice(kinds[3:])}]
        yield {r.choice(names): r.choice(asked) for _ in range(r.choice([1, 2, 3]))}


def check_sums(found: Compiled) -> None:
    """What must hold of every plan."""
    cost, plan = found.plan.cost, found.plan
    assert cost.total_s == cost.compute_s + cost.exposed_s + cost.bubble_s
    assert 0 <= cost.hidden_s <= cost.comm_s
    assert cost.total_s >= plan.lower_bound * (1 - 1e-9)
    assert cost.total_s == pytest.approx(found.program.assignment.solution.cost, rel=1e-9)
    ran = sum(c.seconds for c in plan.choices.values())
    assert cost.compute_s == pytest.approx(ran + cost.optimizer_s, rel=1e-9)
    sent = sum(c.seconds for c in plan.collectives)
    assert sent + cost.local_s == pytest.approx(cost.comm_s - cost.merged_s, rel=1e-9, abs=1e-9 * cost.total_s)
    # may hold less than is shared there
    buckets = [c for c in plan.collectives if plan.kinds.get(c.value) == "parameter"]
    latencies = sum(plan.mesh.link(c.axes).rate(c.kind)[0] for c in buckets)
    assert cost.merged_s >= -latencies - 1e-9 * cost.total_s


@pytest.mark.parametrize("seed", range(12))
def test_no_hint_beats_a_plan_that_is_called_optimal(seed: int) -> None:
    r = random.Random(seed)
    model, x = drawn(r)
    mesh = autoshard.Mesh(r.choice([{"tp": 4}, {"tp": 3}, {"dp": 2, "tp": 2}]), r.choice(["h100", "cpu"]))
    graph = capture(model, (x,), {}, training=r.random() < 0.8)
    free = compiled(graph, mesh)
    check_sums(free)
    assert "optimal in the cost model;" in " ".join(str(free.plan).split())
    assert all(more >= -1e-12 for c in free.plan.choices.values() for _, more in c.alternatives)
    tried = 0
    for hints in itertools.islice(hints_for(graph, mesh.axes, r), 20):
        try:
            hinted = compiled(graph, mesh, hints)
        except autoshard.HintError:
            continue
        check_sums(hinted)
        assert hinted.plan.cost.total_s >= free.plan.cost.total_s * (1 - 1e-9), hints
        assert hinted.plan.cost.total_s <= hinted.plan.lower_bound * (1 + LIMITS.enough)
        assert "the cost model with the layouts given" in " ".join(str(hinted.plan).split())
        tried += 1
        if tried == 4:
            break
    assert tried


def test_a_bound_above_what_was_found_is_no_proof() -> None:
    """It bounds other choices, or is wrong: it is not cut to the cost, which would call the choice optimal."""
    found = Solution((0,), 2.0, -math.inf, exact=False, prove=lambda: 2.1)
    assert (found.proven().lower_bound, found.proven().exact) == (-math.inf, False)
    assert (found.bounded(1.5).lower_bound, found.bounded(1.5).exact) == (1.5, False)
    rounded = found.bounded(2.0 * (1 + 1e-12))
    assert (rounded.lower_bound, rounded.exact) == (2.0, True)


def eight_heads() -> Graph:
    with torch.device("meta"):
        return capture(Heads(8, 1024, 1024, "losses"), (torch.empty(256, 1024),), {}, training=True)


def test_what_goes_together_is_saved_on_top() -> None:
    """Eight losses reduced at once: one latency instead of eight."""
    graph, mesh = eight_heads(), autoshard.Mesh({"tp": 4}, replace(PRESETS["h100"], overlap=0.0))
    free, hinted = compiled(graph, mesh), compiled(graph, mesh, {"*": "colwise"})
    assert free.plan.cost.total_s <= hinted.plan.cost.total_s
    latency = mesh.link("tp").seconds(0.0, "all_reduce")
    assert hinted.plan.cost.merged_s == pytest.approx(7 * latency, rel=1e-2)
    assert "\nmerged on top: −154 µs\n" in hinted.plan.report()
    whole = compiled(graph, mesh, {"*": "replicate"})
    assert "merged on top" not in whole.plan.report()


def test_a_bucket_pays_one_latency() -> None:
    """DDP: the gradients of a block are reduced by one call, of which each has a share by its bytes."""
    mesh = autoshard.Mesh({"dp": 4}, "h100")
    link = mesh.link("dp")
    model = nn.Sequential(OrderedDict(up=nn.Linear(64, 128), act=nn.ReLU(), down=nn.Linear(128, 64)))
    graph = capture(model, (torch.empty(1 << 20, 64, device="meta"),), {}, training=True)
    plan = compiled(graph, mesh, {"input": Shard(0), "*.weight": "replicate", "*.bias": "replicate"}).plan
    sent = [c for c in plan.collectives if c.phase == "backward"]
    assert [c.value for c in sent] == ["down.bias", "down.weight", "up.bias", "up.weight"]
    together = link.seconds(sum(c.bytes for c in sent), "all_reduce") + link.seconds(0.0, "all_reduce")
    assert sum(c.seconds for c in sent) == pytest.approx(together, rel=1e-2)  # one for matrices and one for vectors
    assert plan.cost.merged_s == pytest.approx(0.0, abs=1e-2 * together)  # as the search counts them
    shares, named = latency_shares(graph, mesh), {i.fqn: i.name for i in graph.inputs}
    bytes_ = 4 * (2 * 64 * 128 + 64 + 128)
    for fqn, gathered in (("up.weight", 4 * 64 * 128 / bytes_), ("up.bias", 2 / 3)):
        share, type_ = shares[named[fqn]], graph.types[named[fqn]]
        assert share.gathers == pytest.approx(gathered, rel=1e-4)
        assert share.sums == pytest.approx(gathered, rel=2e-2)
        for before, target, kind, part in (
            ((I,), (R,), "all_reduce", share.sums),
            ((Shard(0),), (I,), "all_gather", gathered),
        ):
            whole, shared = (
                conversion_parts(type_, layouts_on(mesh, [before]), layouts_on(mesh, [target]), 0, True, x)
                for x in (UNSHARED_MESSAGES, share)
            )
            spared, times = float((whole - shared).communication()[0, 0]), 1 if kind == "all_reduce" else 2
            assert spared == pytest.approx(times * (1 - part) * link.seconds(0.0, kind), rel=1e-2)


def test_a_plan_given_back_keeps_objective_and_bound() -> None:
    graph, mesh = eight_heads(), autoshard.Mesh({"tp": 4}, "h100")
    for hints in (None, {"*": "colwise"}):
        plan = compiled(graph, mesh, hints).plan
        again = compiled(graph, mesh, plan=Plan.from_json(plan.to_json())).plan
        assert (again.cost, again.lower_bound, again.given) == (plan.cost, plan.lower_bound, plan.given)
        assert plan.cost.lower_bound == plan.lower_bound > 0
        assert again.report() == plan.report()


def test_a_plan_given_back_elsewhere_has_no_bound() -> None:
    graph, mesh = eight_heads(), autoshard.Mesh({"tp": 4}, "h100")
    plan = compiled(graph, mesh).plan
    slower = compiled(graph, autoshard.Mesh({"tp": 4}, "cpu"), plan=plan).plan
    with torch.device("meta"):
        fewer = capture(Heads(8, 1024, 1024, "losses"), (torch.empty(8, 1024),), {}, training=True)
    for other in (slower, compiled(fewer, mesh, plan=plan).plan):
        assert other.lower_bound == 0
        assert other.cost.total_s != plan.cost.total_s
        assert " not compared with the optimum of the cost model; " in " ".join(str(other).split())


def test_a_saved_plan_of_before_is_read() -> None:
    plan = compiled(eight_heads(), autoshard.Mesh({"tp": 4}, "h100")).plan
    data = json.loads(plan.to_json())
    data["pinned"] = ["x"]
    del data["given"], data["cost"]["local_s"], data["cost"]["merged_s"]
    assert Plan.from_json(json.dumps(data)).given == ("x",)


# --- the same sum by other means ---


EVEN = replace(PRESETS["h100"], variation=0.0)


class Small(nn.Module):
    """A parameter, and an input with two readers."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(64, 64, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.w * x).sum()


def small(mesh: dict[str, int], rows: int, training: bool = True) -> tuple[Graph, autoshard.Mesh]:
    x = torch.empty(rows, 64, device="meta", requires_grad=training)
    return capture(Small(), (x,), {}, training=training), autoshard.Mesh(mesh, EVEN)


def by_hand(graph: Graph, mesh: autoshard.Mesh, assignment: Assignment) -> float:
    """The objective from the planner's steps and the roofline, edge by edge, without tables."""

    def moved(value: str, src: Layout, dst: Layout) -> float:
        type_ = graph.types[value]
        total = redistribution(src, dst, type_.shape, mesh, type_.dtype, type_.grad, minimize="seconds").seconds
        ahead, back = (float(x[0, 0]) for x in copy_seconds(type_, [src], [dst], value in graph.parameters))
        pairs = zip(src.placements, dst.placements, strict=True)
        gathers = any(isinstance(a, Shard) and not isinstance(b, Shard) for a, b in pairs)
        if gathers and type_.grad and value in graph.parameters:
            total += redistribution(src, dst, type_.shape, mesh, type_.dtype, False, minimize="seconds").seconds + ahead
        return total + ahead + back

    def read(value: str, dst: Layout) -> float:
        return moved(value, assignment.shared.get(value, assignment.layouts[value]), dst)

    compute, touched = 0.0, fused_traffic(graph)
    total = sum(moved(value, assignment.layouts[value], shared) for value, shared in assignment.shared.items())
    for node in graph.nodes:
        choice = assignment.choices[node.name]
        uses = [Layout(mesh, assignment.use(node, i)) for i in range(len(node.inputs))]
        placed = [x.placements for x in (*uses, *(assignment.layouts[o] for o in node.outputs))]
        compute += costs.node_seconds(node, graph, mesh, choice, placed, touched[node.name]).step
        total += sum(read(value, dst) for value, dst in set(zip(node.inputs, uses, strict=True)))
    outputs = zip(graph.outputs, assignment.outputs, strict=True)
    total += sum(read(out.name, layout) for out, layout in outputs if isinstance(out, Ref) and layout is not None)
    # The only weight is the first: its gather and the reduction of its gradient hide behind nothing.
    shard, size = local_numel(graph.types["p_w"], assignment.layouts["p_w"].placements, mesh), 4
    written = shard * (4 + 3) * size  # read: value, gradient, two moments; written: value, two moments
    return total + compute + mesh.hardware.memory_seconds(written)


@pytest.mark.parametrize("rows", [64, 1 << 20])
@pytest.mark.parametrize("axes", [{"tp": 4}, {"dp": 2, "tp": 2}])
def test_the_total_is_the_sum_by_hand(axes: dict[str, int], rows: int) -> None:
    graph, mesh = small(axes, rows)
    for hints in (None, {"w": Shard(0)}, {"w": Shard(1), "x": Shard(0)}):
        found = compiled(graph, mesh, hints)
        assert found.plan.cost.total_s == pytest.approx(by_hand(graph, mesh, found.program.assignment), rel=1e-9)


@pytest.mark.slow_cases("1048576-True", "65536-False")
@pytest.mark.slow
@pytest.mark.parametrize(("rows", "training"), [(64, True), (1 << 20, True), (1 << 16, False)])
def test_the_total_is_the_least_of_all_choices(rows: int, training: bool) -> None:
    graph, mesh = small({"tp": 4}, rows, training)
    found = compiled(graph, mesh)
    every = [objective(a) for a in every_assignment(found.program.assignment)]
    assert len(every) > 500
    best = min(o.total_s for o in every)
    assert found.plan.cost.total_s == pytest.approx(best, rel=1e-9)
    assert found.plan.lower_bound == pytest.approx(best, rel=1e-9)


def every_assignment(start: Assignment) -> Iterator[Assignment]:
    """Every strategy of every operation, stored layout of the parameter, and shared layout of the input."""
    graph = start.graph
    (w,), (x,) = ([i.name for i in graph.inputs if i.kind == kind] for kind in ("parameter", "input"))
    labels = [[(s.label,) for s in axis_strategies(node, graph)] for node in graph.nodes]
    stored: tuple[Placement, ...] = (start.layouts[w].placements[0], I, Shard(0), Shard(1))
    read: tuple[Placement, ...] = (R, I, P, Shard(0), Shard(1)) if graph.types[x].grad else (R, P, Shard(0), Shard(1))
    for asked in itertools.product(*labels):
        one = start
        for node, choice in zip(graph.nodes, asked, strict=True):
            one = changed(one, node, choice)
        for a, b in itertools.product(stored[not graph.types[w].grad :], read):
            layouts = {**one.layouts, w: Layout(start.mesh, [normalize_placement(a, graph.types[w].grad)])}
            yield replace(one, layouts=layouts, shared={x: Layout(start.mesh, [b])})


@pytest.mark.parametrize("hints", [None, {"w": Shard(0)}, {"x": Shard(1)}])
@pytest.mark.parametrize(("axes", "rows"), [({"tp": 4}, 64), ({"tp": 3}, 1 << 16), ({"dp": 2, "tp": 2}, 1 << 16)])
def test_what_an_alternative_costs_is_the_difference_of_totals(
    axes: dict[str, int], rows: int, hints: dict[str, Any] | None
) -> None:
    graph, mesh = small(axes, rows)
    assignment = compiled(graph, mesh, hints).program.assignment
    total = objective(assignment).total_s
    found = alternatives(assignment, limit=100)
    assert all(found.values())
    for node in graph.nodes:
        for labels, more in found[node.name]:
            other = objective(changed(assignment, node, labels)).total_s
            assert other - total == pytest.approx(more, abs=1e-9 * total)


@pytest.mark.parametrize("slower", [0.0, 1e-3])
def test_a_term_counts_in_the_search_the_objective_and_the_alternatives(
    slower: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every redistribution of an activation takes as much more, or no more."""

    def slow(edge: edges.PricedEdge) -> StepParts | None:
        moves = np.array([[a != b for b in edge.layouts[1]] for a in edge.layouts[0]])
        return None if edge.link.value == "p_w" else edge.tiled(StepParts(blocking=slower * moves))

    graph, mesh = small({"tp": 4}, 1 << 20)
    plain = compiled(graph, mesh, {"x": Shard(0)}).plan.cost.total_s
    monkeypatch.setattr(edges, "EDGE_TERMS", {**edges.EDGE_TERMS, "slow": slow})
    found = compiled(graph, mesh, {"x": Shard(0)})
    assignment, total = found.program.assignment, found.plan.cost.total_s
    terms = objective(assignment).terms
    added = sum(float(parts.blocking) for term, _, parts in terms if term == "slow")
    assert {term for term, _, _ in terms} == {"operation", "update", "conversion", "slow"}
    assert (added > 0) == (slower > 0) == (total > plain)
    assert total == pytest.approx(assignment.solution.cost, rel=1e-9)
    for node in graph.nodes:
        for labels, more in alternatives(assignment, limit=100)[node.name]:
            other = objective(changed(assignment, node, labels)).total_s
            assert other - total == pytest.approx(more, abs=1e-9 * total)


@pytest.mark.parametrize("mesh", [{"tp": 4}, {"dp": 2, "tp": 2}])
def test_the_searchs_tables_hold_the_prices_that_alternatives_ask_for(mesh: dict[str, int]) -> None:
    graph, on = small(mesh, 1 << 12)
    layouts = list(itertools.product((R, I, P, Shard(0), Shard(1)), repeat=on.ndim))
    for value in (i.name for i in graph.inputs):
        stages = (0,) if value in graph.parameters else ()
        link = ValueEdge("definition", EdgeSide(layouts, stages=stages), "reader", EdgeSide(layouts), value)
        tables = EdgeTables(graph, on)
        table = tables.of(link, held=False)
        share = latency_shares(graph, on).get(value, UNSHARED_MESSAGES)
        case = graph.types[value], stages[0] if stages else None, value in movable_values(graph), share
        for (i, a), (j, b) in itertools.product(enumerate(layouts), repeat=2):
            asked = conversion_parts(case[0], layouts_on(on, [a]), layouts_on(on, [b]), *case[1:])
            assert list(table.parts[table.rows[i], table.columns[j]]) == list(asked[0, 0])


def test_a_weight_that_moves_from_cut_to_cut_is_not_gathered_again() -> None:
    """Two all-to-alls of 15 µs and their bytes, forward and backward; a gradient that is cut takes a kernel of 7 µs."""
    graph, mesh = small({"tp": 2}, 64)
    type_ = graph.types["p_w"]
    ends = lambda *placed: (layouts_on(mesh, [(p,)]) for p in placed)  # noqa: E731
    price = lambda a, b: float(conversion_parts(type_, *ends(a, b), 0, False).blocking[0, 0])  # noqa: E731
    assert price(Shard(0), Shard(1)) == pytest.approx(30.0e-6, rel=5e-3)
    assert price(Shard(0), R) == pytest.approx(45.0e-6, rel=5e-3)
    assert price(Shard(0), I) == pytest.approx(37.0e-6, rel=5e-3)


def test_a_value_that_one_operation_reads_three_times_is_paid_once_per_layout() -> None:
    model = Attention(64, alike=True)
    graph = capture(model, (torch.empty(4, 256, 64),), {}, training=True)
    (node,) = (n for n in graph.nodes if "attention" in str(n.op))
    assert len(set(node.inputs)) == 1
    space = op_space(node, graph, autoshard.Mesh({"tp": 2}, "h100"))
    paid = [
        r.placed if r.mask is None else list(itertools.compress(r.placed, r.mask)) for r in operand_reads(node, space)
    ]
    layouts = sum(len(set(choice)) for choice in zip(*space.inputs, strict=True))
    assert sum(map(len, paid)) == layouts < 3 * len(space.choices)
    assert layouts > len(space.choices)

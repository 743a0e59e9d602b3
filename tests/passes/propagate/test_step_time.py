"""The time of a step: what hides behind compute, kernels by kind and shape, the timeline, measurements."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import autoshard
from autoshard import Hardware, Mesh, Shard
from autoshard.hardware import PRESETS, Overlap
from autoshard.passes.capture import capture
from autoshard.passes.ir.graph import Graph
from autoshard.passes.ir.memory import orthogonalization_flops
from autoshard.passes.propagate.op_space import op_space
from autoshard.passes.propagate.prices import roofline as costs
from autoshard.passes.propagate.prices.overlap import (
    StepParts,
    movable_values,
    network_of_steps,
    tables_of_step,
    total_parts,
)
from autoshard.passes.propagate.prices.roofline import fused_traffic
from autoshard.passes.rules.families import context_parallel
from autoshard.passes.search import solve
from autoshard.plans.plan import Plan
from autoshard.report.schedule import COMPUTE_STREAM, PARAMETER_STREAMS, step_end, step_timeline

H100 = PRESETS["h100"]
ALONE = replace(H100, overlap=0.0)


class Mlp(nn.Module):
    """Blocks of two products; the first weight is the embedding's."""

    def __init__(self, layers: int = 3, width: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(
            nn.ModuleList((nn.Linear(width, width), nn.Linear(width, width))) for _ in range(layers)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for up, down in self.blocks:  # type: ignore[misc]
            x = x + down(F.silu(up(x)))
        return x.square().mean()


def mlp(rows: int = 1 << 16, **sizes: int) -> Graph:
    with torch.device("meta"):
        return capture(Mlp(**sizes), (torch.empty(rows, dtype=torch.long),), {}, training=True)


def planned(hardware: Hardware | str = "h100", ranks: int = 4, rows: int = 1 << 16) -> Plan:
    with torch.device("meta"):
        model, tokens = Mlp(), torch.empty(rows, dtype=torch.long)
    return autoshard.plan(model, Mesh({"dp": ranks}, hardware), (tokens,), like="fsdp", training=True)


# --- what hides ---


@pytest.mark.parametrize("seed", range(40))
def test_the_search_finds_the_least_time_of_all_choices(seed: int) -> None:
    r = np.random.default_rng(seed)
    sizes, near = r.integers(2, 4, 4), float(r.choice([0.0, 0.5, 0.84, 1.0]))
    overlap = Overlap(near, float(r.choice([near, (1 + near) / 2])) if near else 0.0)

    def parts(*shape: int, compute: bool) -> StepParts:
        draw = [r.integers(0, 6, shape).astype(float) for _ in range(5)]
        zero = np.zeros(())
        return StepParts(*draw[:3], zero, zero) if compute else StepParts(zero, zero, draw[2], 3 * draw[3], 2 * draw[4])

    nodes = [parts(n, compute=True) for n in sizes]
    edges = [(i, i + 1, parts(sizes[i], sizes[i + 1], compute=False)) for i in range(3)]
    own = [tables_of_step(p, (int(n),), overlap) for n, p in zip(sizes, nodes, strict=True)]
    between = [(i, j, tables_of_step(p, (int(sizes[i]), int(sizes[j])), overlap)) for i, j, p in edges]
    network, rows = network_of_steps(own, between, overlap)
    assert bool(rows) == bool(near)

    def step(choice: tuple[int, ...]) -> float:
        found = [p[s] for p, s in zip(nodes, choice, strict=True)] + [p[choice[i], choice[j]] for i, j, p in edges]
        total = total_parts(found)
        return float(total.step(overlap))

    every = {choice: step(choice) for choice in itertools.product(*(range(n) for n in sizes))}
    found = solve(network, rows=rows)
    assert found.cost == pytest.approx(min(every.values()), rel=1e-9)
    assert every[found.choice] == pytest.approx(found.cost, rel=1e-9)
    assert found.lower_bound <= found.cost * (1 + 1e-9)


def test_time_is_the_longer_of_both_where_all_can_hide() -> None:
    one = np.array(1.0)
    for moved in (0.0, 0.5, 1.0, 3.0):
        found = StepParts(compute=one, node=np.array(moved))
        beside = max(1.0 + 0.2 * moved, moved)  # compute runs at 0.8 of its speed as long as the collectives run
        assert float(found.step(Overlap(0.8, 0.9))) == pytest.approx(beside)
        assert float(found.step(Overlap(0.0, 0.0))) == pytest.approx(1.0 + moved)
        far = StepParts(compute=one, network=np.array(moved))
        assert float(far.step(Overlap(0.8, 0.9))) == pytest.approx(max(1.0 + 0.1 * moved, moved))


def test_what_can_move_are_parameters_behind_the_first_weight() -> None:
    graph = mlp()
    movable = movable_values(graph)
    assert "p_embedding_weight" not in movable
    assert sum("blocks" in name for name in movable) == 12 == len(movable)


def test_gathers_hide_behind_compute() -> None:
    beside, alone = planned().cost, planned(ALONE).cost
    assert beside.hidden_s > 0.3 * beside.comm_s
    assert alone.hidden_s == pytest.approx(0.0, abs=1e-12)
    for cost in (beside, alone):
        assert cost.total_s == cost.compute_s + cost.exposed_s + cost.bubble_s
    assert beside.total_s < alone.total_s
    assert beside.optimizer_s > 0


def test_the_optimizer_takes_the_time_of_its_state() -> None:
    type_, mesh = mlp().types["p_embedding_weight"], Mesh({"dp": 4})
    whole, cut = ((costs.Shard(0),), (autoshard.Replicate(),))
    seconds = {name: costs.optimizer_seconds(name, type_, cut, mesh) for name in ("adamw", "sgd", "none")}
    size = 64 * 512 * 4
    assert seconds["adamw"] == pytest.approx(H100.memory_seconds((3 + 4) * size))
    assert seconds["sgd"] == pytest.approx(H100.memory_seconds(3 * size))
    assert seconds["none"] == 0
    assert costs.optimizer_seconds("adamw", type_, whole, mesh) == pytest.approx(seconds["adamw"] / 4)


def test_muon_takes_the_time_of_dealt_matrices() -> None:
    """A rank's share of what torch's Muon computes, and the shards of parameter, gradient and result on the wire."""
    type_, mesh = mlp().types["p_embedding_weight"], Mesh({"dp": 4})
    with FlopCounterMode(display=False) as counter:
        torch.optim._muon._zeropower_via_newtonschulz(torch.ones(64, 512), (3.4, -4.8, 2.0), 5, 1e-7)
    assert orthogonalization_flops((64, 512)) == counter.get_total_flops() == orthogonalization_flops((512, 64))
    computed = H100.product_seconds(counter.get_total_flops(), (64, 512), torch.bfloat16) / 4
    per_byte = mesh.link(("dp",)).rate("all_to_all")[1]
    for placed, sent in (((costs.Shard(0),), 3 * 3 / 16), ((autoshard.Replicate(),), 3 / 4)):
        muon, momentum = (costs.optimizer_seconds(name, type_, placed, mesh) for name in ("muon", "momentum"))
        assert muon - momentum == pytest.approx(computed + sent * 64 * 512 * 4 * per_byte)


# --- kernels ---


def seconds_of(graph: Graph, op: str, mesh: Mesh) -> dict[tuple[str, ...], costs.PhaseSeconds]:
    (node,) = (n for n in graph.nodes if op in str(n.op))
    space = op_space(node, graph, mesh)
    return {
        tuple(s.label for s in choice): costs.node_seconds(
            node, graph, mesh, choice, [p[i] for p in (*space.inputs, *space.outputs)]
        )
        for i, choice in enumerate(space.choices)
    }


def attention(causal: bool) -> Graph:
    x = torch.empty(2, 8, 4096, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with torch.device("meta"):
        return capture(Attention(causal), (x,), {}, training=True)


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=self.causal).square().mean()


def test_the_causal_half_is_neither_counted_nor_computed() -> None:
    (causal, full), mesh = (attention(c) for c in (True, False)), Mesh({"tp": 2})
    half, whole = (seconds_of(g, "attention", mesh) for g in (causal, full))
    assert half["heads",].forward < 0.55 * whole["heads",].forward
    # of two ranks the one with the last rows computes three quarters of the pairs
    last = 0.75 * whole["queries",].forward
    assert last < half["queries",].forward < last + 9 * H100.kernel_latency
    assert half["keys",].forward == pytest.approx(whole["keys",].forward, rel=1e-2)  # the mask is a tensor there
    flops = [sum(costs.node_flops(n, g) for n in g.nodes) for g in (causal, full)]
    assert flops[0] == pytest.approx(flops[1] * 4097 / 8192)


def test_attention_reaches_what_was_measured_at_its_length() -> None:
    flops = 1e15
    for keys, forward, backward in ((1024, 260, 260), (4096, 319, 310), (32768, 335, 322), (128, 191, 214)):
        for back, expected in ((False, forward), (True, backward)):
            taken = H100.attention_seconds(flops, keys, torch.bfloat16, back)
            assert flops / taken == pytest.approx(expected * 1e12)
    between = 1e15 / H100.attention_seconds(1e15, 1448, torch.bfloat16, False)
    assert 275e12 < between < 283e12


def test_short_causal_attention_computes_all_pairs_where_kernels_leave_out_long_tiles() -> None:
    graph = attention(causal=True)  # of 4096 queries and keys
    (node,) = (n for n in graph.nodes if "attention" in str(n.op))
    assert context_parallel.tile_padding_ratio(node, graph, 0) == 1.0
    assert context_parallel.tile_padding_ratio(node, graph, 4096) == pytest.approx(8192 / 4097)
    assert context_parallel.tile_padding_ratio(node, graph, 512) == pytest.approx(2 * 9 / 16, rel=1e-3)
    here = replace(H100, attention_tile=4096)
    taken = [seconds_of(graph, "attention", Mesh({"tp": 2}, hardware=h))["heads",] for h in (here, H100)]
    assert taken[0].backward > 1.9 * taken[1].backward


def test_traffic_that_caches_hold_takes_what_was_measured() -> None:
    here = replace(H100, caches=((1e3, 1e-6), (1e6, 1e-5)), updates=1e12)
    assert here.traffic_seconds(500) == pytest.approx(0.5e-6)
    assert here.traffic_seconds(1e6) == pytest.approx(1e-5)
    assert here.traffic_seconds(3e6) == pytest.approx(1e-5 + here.memory_seconds(2e6))
    assert H100.traffic_seconds(3e6) == H100.memory_seconds(3e6)
    assert here.update_seconds(1e6) == 1e-6
    assert H100.update_seconds(1e6) == H100.memory_seconds(1e6)
    assert Hardware.from_dict(json.loads(json.dumps(here.to_dict()))) == here


def test_functions_take_what_was_measured_of_an_element() -> None:
    here = replace(H100, functions=(1e-9, 2e-9), fuses=False)
    assert Hardware.from_dict(json.loads(json.dumps(here.to_dict()))) == here
    for function, slower in ((F.silu, True), (F.relu, False)):
        with torch.device("meta"):
            graph = capture(_Called(function), (torch.empty(1000, 100, requires_grad=True),), {}, training=True)
        name = function.__name__
        taken, plain = (next(iter(seconds_of(graph, name, Mesh({"x": 1}, hardware=h)).values())) for h in (here, H100))
        if slower:
            assert taken.forward == pytest.approx(1e-4, rel=0.1)
            assert taken.backward == pytest.approx(2e-4, rel=0.1)
        else:
            assert taken == plain


class _Called(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.parametrize("caches", [(), ((1e6, 1e-7), (1e8, 1e-4))])
def test_a_look_up_writes_the_whole_gradient_of_its_table(caches: tuple[tuple[float, float], ...]) -> None:
    """To where caches hold it, in what was measured there."""
    taken, here = [], replace(H100, caches=caches)
    for sparse in (False, True):
        with torch.device("meta"):
            table = nn.EmbeddingBag(100_000, 64, mode="sum", sparse=sparse)
            graph = capture(table, (torch.zeros(8, 2, dtype=torch.long),), {}, training=True)
        taken.append(next(iter(seconds_of(graph, "embedding", Mesh({"x": 1}, here)).values())))
    assert taken[0].backward - taken[1].backward == pytest.approx(here.traffic_seconds(100_000 * 64 * 4))
    assert taken[0].forward == taken[1].forward


@pytest.mark.parametrize("groups", [1, 2])
def test_channels_that_are_cut_too_small_take_longer(groups: int) -> None:
    """Of 48 channels a half fills no block; groups fill blocks together."""
    taken = []
    for channels in ((), ((24, 0.5), (48, 1.0))):
        mesh = Mesh({"x": 2}, hardware=replace(H100, channels=channels))
        with torch.device("meta"):
            layer = nn.Conv2d(48, 48, 3, groups=groups, bias=False)
            graph = capture(layer, (torch.empty(256, 48, 64, 64),), {}, training=True)
        taken.append(seconds_of(graph, "conv", mesh))
    slower = {label: taken[1][label].step / seconds.step for label, seconds in taken[0].items()}
    cut = [("o",), ("i",)] if groups == 1 else [("groups",)]
    assert all(slower[label] == pytest.approx(2.0 if groups == 1 else 1.0, rel=1e-2) for label in cut)
    assert slower["n",] == slower["R",] == slower["d2",] == 1.0


def test_narrow_products_and_convolutions_reach_what_was_measured() -> None:
    here = replace(H100, tiling=None, products=((4, 0.2), (64, 0.8)), convolutions=1.5)

    def slower(rows: int, summed: int, columns: int) -> float:
        taken = [
            h.product_seconds(2.0 * rows * summed * columns, (rows, columns), torch.bfloat16)
            for h in (here, replace(here, products=()))
        ]
        return taken[1] / taken[0]

    assert slower(2, 512, 512) == pytest.approx(0.2)
    assert slower(16, 512, 512) == slower(512, 16, 512) == slower(512, 512, 16) == pytest.approx(0.5)
    assert slower(64, 512, 512) == pytest.approx(0.8)
    assert slower(65, 512, 512) == 1.0
    whole = here.convolution_seconds(1e12, torch.bfloat16)
    assert whole * 1.5 == pytest.approx(replace(here, products=()).product_seconds(1e12, (8, 4, 4), torch.bfloat16))
    assert Hardware.from_dict(json.loads(json.dumps(here.to_dict()))) == here


def test_chains_of_elementwise_operations_are_one_kernel() -> None:
    graph = mlp(layers=2)
    touched = fused_traffic(graph)
    by_op = defaultdict(list)
    for node in graph.nodes:
        by_op[str(node.op)].append(touched[node.name])
    assert all(t.reads == (True,) and t.writes == (True,) for t in by_op["aten.silu.default"])  # between two products
    first, last = by_op["aten.add.Tensor"]
    assert first.launches  # the residual stream outlives the next product
    assert not last.launches  # the loss is computed where it is made
    assert not any(by_op["aten.mean.default"][0].reads)
    fused, alone = (Mesh({"dp": 1}, replace(H100, fuses=f)) for f in (True, False))
    taken = [autoshard.compiler.compile_graph(graph, m).plan.cost.compute_s for m in (fused, alone)]
    assert taken[0] < taken[1]


def test_a_plan_saved_before_there_were_rates_is_read() -> None:
    plan = planned()
    assert Plan.from_json(plan.to_json()).mesh == plan.mesh
    data = json.loads(plan.to_json())
    data["hardware"] = {
        k: v for k, v in data["hardware"].items() if k not in ("attention", "tiling", "overlap", "fuses")
    }
    for link in ("node", "network"):
        del data["hardware"][link]["rates"]
    for name in ("exposed_s", "optimizer_s", "schedule_s", "mfu", "hfu", "bubble_s"):
        del data["cost"][name]
    assert Plan.from_json(json.dumps(data)).mesh.hardware.overlap == 0


# --- the timeline ---


@pytest.mark.parametrize("hardware", [H100, ALONE], ids=["beside", "alone"])
def test_a_stream_does_one_thing_at_a_time(hardware: Hardware) -> None:
    plan = planned(hardware)
    events, cost = step_timeline(plan), plan.cost
    streams = defaultdict(list)
    for e in events:
        streams[e.stream].append(e)
    for found in streams.values():
        for a, b in itertools.pairwise(sorted(found, key=lambda e: e.start)):
            assert b.start >= (a.start + a.seconds) * (1 - 1e-12)
    sent = sum(c.seconds for c in plan.collectives)
    pairs = [(a, b) for link, beside in PARAMETER_STREAMS.items() for a in streams[link] for b in streams[beside]]
    ends = [(max(a.start, b.start), min(a.start + a.seconds, b.start + b.seconds)) for a, b in pairs]
    shared = sum(max(0.0, end - start) for start, end in ends)  # each has half of the link meanwhile
    assert sum(e.seconds for e in events if e.stream != COMPUTE_STREAM) == pytest.approx(sent + shared)
    assert cost.compute_s <= step_end(plan) <= cost.compute_s + sent + cost.local_s + 1e-12
    assert cost.schedule_s == step_end(plan)
    if not hardware.overlap:
        copied = sum(c.copied_s for c in plan.collectives)  # biases and their matrix go in one buffer
        assert step_end(plan) == pytest.approx(cost.compute_s + sent + copied)
        assert copied > 0


def test_a_block_is_gathered_while_the_one_before_it_runs() -> None:
    events = step_timeline(planned())
    begins = {b: min(e.start for e in events if f"blocks.{b}." in e.fqn and e.stream == COMPUTE_STREAM) for b in (1, 2)}
    gathers = [e for e in events if e.name.startswith("all_gather") and "blocks.2." in e.fqn and e.phase == "forward"]
    assert gathers
    assert all(begins[1] * (1 - 1e-9) <= e.start < begins[2] for e in gathers)
    optimizer = events[-1]
    assert optimizer.name == "optimizer"
    assert optimizer.start >= max(e.start + e.seconds for e in events[:-1]) * (1 - 1e-12)


# --- measurements ---


def test_measure_counts_what_is_kept() -> None:
    torch.manual_seed(0)
    model, tokens = Mlp(layers=2, width=32), torch.randint(0, 64, (48,))
    hints = {"tokens": Shard(0)}
    sharded = autoshard.compile(model, Mesh({"dp": 2}, "ideal_network"), (tokens,), hints=hints, training=True)
    kept = [torch.ones_like(p) for p in sharded.parameters()]
    for p, gradient in zip(sharded.parameters(), kept, strict=True):
        p.grad = gradient
    found = autoshard.measure(sharded, (tokens,), steps=2)
    assert all(p.grad is gradient for p, gradient in zip(sharded.parameters(), kept, strict=True))
    assert found.kept_bytes == pytest.approx(sharded.plan.memory.activations, rel=0.02)
    assert found.peak_bytes > found.kept_bytes
    assert (found.simulated, found.ranks, found.step_s > 0) == (True, 2, True)
    assert "all 2 ranks ran in this process, so its time and peak are those of all ranks" in str(found)
    with pytest.raises(autoshard.AutoshardError, match="at least one step"):
        autoshard.measure(sharded, (tokens,), steps=0)


@pytest.mark.slow
def test_calibration_of_this_machine(tmp_path: Path) -> None:
    found = autoshard.calibrate()
    assert 1e9 < found.flops < 1e14
    assert 1e8 < found.memory_bandwidth < 1e12
    assert 0 <= found.overlap <= 1
    assert 1e-8 < found.kernel_latency < 1e-2
    kinds = {(r.kind, r.ranks) for r in found.node.rates}
    assert kinds == {(k, 2) for k in ("few", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")}
    found.save(tmp_path / "here.json")
    plan = planned(str(tmp_path / "here.json"), ranks=2, rows=256)
    assert plan.cost.total_s > 0
    assert "measured" in str(plan)


def test_seconds_that_a_node_keeps_are_those_of_one_hardware() -> None:
    x = torch.empty(256, 512)
    graph, fresh = (capture(nn.Linear(512, 512), (x,), {}, training=True) for _ in range(2))
    fast = Mesh({"tp": 4}, hardware="h100")
    slow = Mesh({"tp": 4}, replace(PRESETS["h100"], flops=PRESETS["h100"].flops / 8, dtypes=(), memory_bandwidth=1e11))
    quick, after = (op_space(graph.nodes[-1], graph, mesh).phases[0] for mesh in (fast, slow))
    assert np.array_equal(after, op_space(fresh.nodes[-1], fresh, slow).phases[0])
    assert (after > quick).all()

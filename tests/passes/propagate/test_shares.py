"""What parameters pay of the messages that they share: vectors go with matrices, and what the backward does not read is not
gathered again."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from programs import layouts_on
from torch import nn

import autoshard
from autoshard import Hardware, Mesh, Shard
from autoshard.hardware import PRESETS, SMALL_ALL_REDUCE
from autoshard.layout import I, P, R
from autoshard.passes.capture import capture
from autoshard.passes.ir.graph import Graph, TensorType
from autoshard.passes.ir.program import InternalCollective
from autoshard.passes.propagate.edges import conversion_parts, forward_matrices
from autoshard.passes.propagate.prices.coalescing import bucket_bytes, latency_shares
from autoshard.passes.propagate.prices.roofline import internal_cost
from autoshard.passes.redistribute.pricing import MessageShares

CPU = replace(PRESETS["cpu"], overlap=0.0)
MACHINES = {"cpu": CPU, "late": replace(CPU, node=replace(CPU.node, latency=2e-3)), "h100": PRESETS["h100"]}


class Layers(nn.Module):
    """Blocks of a matrix with biases and a norm."""

    def __init__(self, width: int, layers: int = 3) -> None:
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))  # noqa: E731
        self.layers = nn.ModuleList(block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def captured(width: int, rows: int = 64) -> Graph:
    with torch.device("meta"):
        return capture(Layers(width), (torch.empty(rows, width),), {}, training=True)


def seconds(graph: Graph, mesh: Mesh, name: str, source: object, target: object, stage: int = 2) -> float:
    share = latency_shares(graph, mesh)[name]
    ends = layouts_on(mesh, [(source,)]), layouts_on(mesh, [(target,)])  # type: ignore[list-item]
    found = conversion_parts(graph.types[name], *ends, stage, False, share)
    return float(found.communication()[0, 0])


@pytest.mark.slow_cases("4096-2-*")
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("ranks", [2, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("width", [16, pytest.param(256, marks=pytest.mark.slow), 4096])
def test_a_vector_that_is_cut_never_pays_less_than_one_that_is_whole(machine: str, ranks: int, width: int) -> None:
    """Else a search would cut vectors for messages that the matrices of their block do not send."""
    graph, mesh = captured(width), Mesh({"dp": ranks}, hardware=MACHINES[machine])
    vectors = [name for name in graph.parameters if len(graph.types[name].shape) == 1]
    for name in vectors:
        assert seconds(graph, mesh, name, Shard(0), R) >= seconds(graph, mesh, name, I, R) > 0


def test_vectors_go_with_the_matrices_of_their_block_unless_these_fill_a_bucket() -> None:
    mesh = Mesh({"dp": 2}, hardware=CPU)
    full = bucket_bytes(mesh, "dp")
    for width, along in ((64, True), (2048, False)):
        assert (4 * width**2 < full) == along
        graph = captured(width)
        shares = latency_shares(graph, mesh)
        for vectors in (False, True):
            paid = sum(s.gathers for n, s in shares.items() if (len(graph.types[n].shape) == 1) == vectors)
            expected = 1.0 if vectors and along else 3.0  # of all blocks, or of each
            assert paid == pytest.approx(expected, rel=0.07)


@pytest.mark.slow_cases("256-64-*", "256-4096-cpu", "256-4096-late", "256-4096-h100", "64-64-cpu", "64-64-late")
@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("width", "rows"), [(64, 64), (256, 64), (256, 4096)])
def test_no_expert_has_a_faster_program(machine: str, width: int, rows: int) -> None:
    """By the timeline of what runs, which counts every message: what the search does not count it does not win by."""
    hardware: Hardware = MACHINES[machine]
    with torch.device("meta"):
        args = Layers(width), Mesh({"x": 4}, hardware=hardware), (torch.empty(rows, width),)
    free = autoshard.plan(*args, training=True)
    for like in ("ddp", "zero1", "zero2", "fsdp", "replicate"):
        other = autoshard.plan(*args, like=like, training=True)
        assert free.cost.total_s <= other.cost.total_s * (1 + 1e-9)
        assert free.cost.schedule_s <= other.cost.schedule_s * (1 + 1e-3)


def test_what_the_backward_does_not_read_is_not_gathered_again() -> None:
    """The first weight: its input wants no gradient. Its bias neither, but that of another goes with its matrix."""
    mesh = Mesh({"dp": 2}, hardware=CPU)
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), torch.empty(64, 64)
        graph = capture(model, (x,), {}, training=True)
    names, shares = {i.fqn: i.name for i in graph.inputs}, latency_shares(graph, mesh)
    for layer, more in ((0, False), (1, True)):
        weight, bias = (names[f"{layer}.{n}"] for n in ("weight", "bias"))
        assert shares[weight].again == shares[bias].again == more
        kept, again = (seconds(graph, mesh, weight, Shard(0), R, stage) for stage in (2, 0))
        assert (again > kept) == more
    plan = autoshard.plan(model, mesh, (x,), like="fsdp", training=True)
    made = {c.fqn for c in plan.collectives if "gathered again" in c.reason}
    assert made == {"1", "2"}


@pytest.mark.parametrize(("stage", "waits"), [(0, (3.0, 2.0)), (2, (3.0,))], ids=["gathered again", "kept"])
def test_what_lasts_longer_than_the_compute_of_a_block_is_waited_for(stage: int, waits: tuple[float, ...]) -> None:
    """A gather of four times as long as the compute beside it: no other block's hides the rest."""
    graph, mesh = captured(4096), Mesh({"dp": 8}, hardware=replace(PRESETS["h100"], overlap=1.0))
    name = next(n for n in graph.parameters if len(graph.types[n].shape) == 2)
    assert 0 < latency_shares(graph, mesh)[name].beside < 1e-3
    type_, moves = graph.types[name], (layouts_on(mesh, [(Shard(0),)]), layouts_on(mesh, [(R,)]))
    what = type_, *moves, stage, True
    forward = float(forward_matrices(type_, *moves)[1][0, 0])
    hidden = conversion_parts(*what, MessageShares())
    for beside, late in ((forward / 4, sum(waits) * forward / 4), (forward, 0.0)):
        found = conversion_parts(*what, MessageShares(beside=beside))
        assert float((found.blocking - hidden.blocking)[0, 0]) == pytest.approx(late, abs=1e-12)
        assert float((hidden.node - found.node)[0, 0]) == pytest.approx(late, abs=1e-12)


class Gated(nn.Module):
    """Small experts, all of which compute all rows: in little memory their biases become summands."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(16, 4), nn.Linear(16, 16)
        expert = lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))  # noqa: E731
        self.experts = nn.ModuleList(expert() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        parts = [weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts)]
        return self.out(torch.stack(parts).sum(0)).square().mean()


@pytest.mark.slow_cases("None")
@pytest.mark.parametrize("budget", [None, 80e3])
def test_a_plan_of_micro_batches_costs_the_same_when_it_is_given_back(budget: float | None) -> None:
    with torch.device("meta"):
        model, x = Gated().double(), torch.zeros(4, 6, 16, dtype=torch.float64)
    mesh, asked = Mesh({"a": 2, "b": 2}, hardware="h100"), {"micro_batches": 2, "recompute": "none"}
    made = autoshard.plan(model, mesh, (x,), training=True, memory_budget=budget, **asked)
    given = autoshard.compile(model, mesh, (x,), plan=made).plan
    assert given.cost.total_s == pytest.approx(made.cost.total_s, rel=1e-12)


@pytest.mark.parametrize("shape", [(16,), (32, 16)])
@pytest.mark.parametrize("passes", [1, 2])
def test_stages_are_those_of_what_is_gathered(shape: tuple[int, ...], passes: int) -> None:
    """What a rank pads, or moves from cut to cut, comes in every pass at any stage; and nothing takes less than no time."""
    mesh, type_ = Mesh({"a": 2, "b": 2}, hardware="h100"), TensorType(shape, torch.float64, grad=True)
    share = MessageShares(gathers=0.1, sums=0.1, beside=1e-10)
    every = (I, R, P, *map(Shard, range(len(shape))))
    sources = [x for x in itertools.product(every, repeat=2) if P not in x and R not in x]
    targets = list(itertools.product(every, repeat=2))
    ends = layouts_on(mesh, sources), layouts_on(mesh, targets)
    plain, *kept = (conversion_parts(type_, *ends, n, True, share, passes=passes) for n in (0, 1, 2))
    for parts in (plain, *kept):
        assert all((x >= 0).all() for x in parts)
    whole = np.array(
        [
            [any(isinstance(p, Shard) and q in (I, R) for p, q in zip(a, b, strict=True)) for b in targets]
            for a in sources
        ]
    )
    for parts in kept:
        pairs = [
            (np.broadcast_to(x, whole.shape), np.broadcast_to(y, whole.shape))
            for x, y in zip(parts, plain, strict=True)
        ]
        assert all(np.array_equal(x[~whole], y[~whole]) for x, y in pairs)
        assert any((x[whole] != y[whole]).any() for x, y in pairs)


@pytest.mark.parametrize("losses", [1, 2])
def test_the_sum_of_one_number_is_no_sum_of_a_row(losses: int) -> None:
    """On gloo it takes fewer messages. Parts add up; numbers that go together take no longer than apart."""

    class Losses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = self.linear(x)
            return tuple((y + i).square().mean() for i in range(losses))

    plans = {}
    cpu = PRESETS["cpu"]
    rows = tuple(rate for rate in cpu.node.rates if rate.kind != SMALL_ALL_REDUCE)
    for name, hardware in (("as it is", cpu), ("all alike", replace(cpu, node=replace(cpu.node, rates=rows)))):
        mesh = Mesh({"dp": 4}, hardware=hardware)
        plan = autoshard.plan(Losses(), mesh, (torch.randn(256, 64),), like="ddp")
        sums = [c for c in plan.collectives if c.phase == "forward"]
        alone = mesh.link("dp").rate(SMALL_ALL_REDUCE)[0], mesh.link("dp").rate("all_reduce")[0]
        assert sum(c.seconds for c in sums) == pytest.approx(min(losses * alone[0], alone[1]), rel=0.02)
        cost = plan.cost
        assert sum(c.seconds for c in plan.collectives) + cost.local_s == pytest.approx(cost.comm_s - cost.merged_s)
        assert cost.merged_s > -1e-6
        plans[name] = cost.total_s
    less = losses * (cpu.node.rate("all_reduce", 4)[0] - cpu.node.rate(SMALL_ALL_REDUCE, 4)[0])
    assert plans["all alike"] - plans["as it is"] == pytest.approx(less, rel=0.02)


@pytest.mark.parametrize(("rows", "few"), [(1, True), (4096, True), (4097, False)])
def test_what_an_operation_sums_of_few_numbers_has_their_rate(rows: int, few: bool) -> None:
    """As many as four gloo ranks send each other all of, of float32."""
    mesh = Mesh({"dp": 4}, hardware="cpu")
    latency, per_byte = mesh.link("dp").rate(SMALL_ALL_REDUCE if few else "all_reduce")
    ring = 1.5 * 4 * rows
    found = internal_cost(InternalCollective("all_reduce", ("dp",), 4.0 * rows, "forward", "sums of rows"), mesh)
    assert found == pytest.approx((ring, latency + per_byte * ring))
    assert mesh.link("dp").rate(SMALL_ALL_REDUCE)[0] < mesh.link("dp").rate("all_reduce")[0]

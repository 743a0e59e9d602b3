"""The folded order of a sequence, carried through a model: equal to one device, ended where it costs least, no swaps inside."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import assert_equal_training, captured_once
from torch import nn

import autoshard
import autoshard.models
from autoshard import compiler, runtime
from autoshard.passes.ir.graph import Graph
from autoshard.passes.propagate import folded_order
from autoshard.passes.rules.families import ring
from autoshard.runtime.attention.fold import folded_op, unfolded_op
from autoshard.runtime.attention.order import spans

BOTH = "autoshard.folded.default", "autoshard.unfolded.default"


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans in folded order are taken whatever they cost, of as many ranks as there are along ``cp``."""
    monkeypatch.setattr(compiler, "is_cheaper", lambda plan, than: True)
    monkeypatch.setattr(compiler, "ranks_of", lambda assignment: assignment.mesh.size_of("cp"))


def brought(plan: autoshard.Plan) -> set[str]:
    """The operations of a plan that bring something into folded order, and back."""
    return {name for name, choice in plan.choices.items() if choice.op in BOTH}


def attention(plan: autoshard.Plan) -> set[str]:
    return {label for c in plan.choices.values() if "attention" in c.op for label in c.labels}


# --- the order ---


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_chunks_are_what_ranks_of_a_folded_ring_hold(ranks: int) -> None:
    for each in (1, 2, 3, 4):
        x = torch.arange(ranks * each)
        expected = [[i for start, n in held for i in range(start, start + n)] for held in spans(len(x), (ranks,), True)]
        assert [chunk.tolist() for chunk in folded_op(x, 0, ranks).chunk(ranks)] == expected
        assert torch.equal(unfolded_op(folded_op(x, 0, ranks), 0, ranks), x)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("function", ["folded", "unfolded"])
def test_ranks_swap_halves(function: str, ranks: int) -> None:
    """Of cut tensors as of whole ones, with their gradients; half a chunk is sent."""
    op = folded_op if function == "folded" else unfolded_op
    world = runtime.World({"cp": ranks})
    log = world.log = list[runtime.Executed]()
    for shape, dim in (((2, 3 * ranks, 4), 1), ((2 * ranks,), 0), ((2, 3, ranks), 2)):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        expected = op(x, dim, ranks)
        cotangent = torch.randn_like(expected)
        parts = [(part,) for part in x.chunk(ranks, dim)]
        out = torch.cat(world.run(lambda part: getattr(runtime, function)(part, dim, ranks, "cp"), parts), dim)  # noqa: B023
        assert torch.equal(out, expected)
        for gradient in torch.autograd.grad(out, x, cotangent), torch.autograd.grad(expected, x, cotangent):
            inverse = unfolded_op if op is folded_op else folded_op
            assert torch.equal(gradient[0], inverse(cotangent, dim, ranks))
    assert {e.kind for e in log} == {"permute"}
    assert [e.bytes for e in log[:2]] == [2 * 2 * 4 * 8] * 2


# --- the cut ---


class Small(nn.Module):
    """Two layers of attention; ``shift`` between them, ``mixed`` behind them, come to no order but their own."""

    def __init__(self, shift: bool = False, mixed: bool = False, wide: int = 8) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(11, 8), nn.Embedding(64, 8)
        self.qkv = nn.ModuleList(nn.Linear(8, 24, bias=False) for _ in range(2))
        self.out = nn.Linear(8, wide)
        self.shift, self.mixed = shift, mixed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for i, layer in enumerate(self.qkv):
            if self.shift and i:
                x = x + F.pad(x, (0, 0, 1, 0))[:, :-1]
            q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in layer(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        if self.mixed:
            x = x.cumsum(1)
        y = self.out(x)
        loss: torch.Tensor = F.cross_entropy(y[:, :-1].flatten(0, 1), tokens[:, 1:].flatten() % y.shape[-1])
        return loss


def graph_of(model: nn.Module, length: int = 16) -> Graph:
    return compiler.captured(model.double(), (torch.zeros(2, length, dtype=torch.long),), {})


def bytes_of(graph: Graph, ranks: int, found: dict[str, folded_order.Link], chosen: frozenset[str]) -> tuple[int, int]:
    """What changes places where ``chosen`` operations run in folded order, said once more; and of how many values."""
    size = values = 0
    for node in graph.nodes:
        if node.name in found and node.op in ring.ATTENTION and node.name not in chosen:
            size += folded_order.swapped(node, graph, ranks)
    for value, (maker, readers) in folded_order.ends(graph, found).items():
        if any((reader in chosen) != (maker in chosen) for reader in readers):
            size += folded_order.moved(graph, value)
            values += 1
    return size, values


class Bare(nn.Module):
    """Two attentions of one head, and a little around them."""

    def __init__(self, between: str, after: str, width: int) -> None:
        super().__init__()
        self.between, self.after = between, after
        self.weight = nn.Parameter(torch.randn(4, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y = y + F.scaled_dot_product_attention(y, y, y, is_causal=True)
        y = getattr(y, self.between)(1) if self.between == "cumsum" else getattr(y, self.between)()
        y = F.scaled_dot_product_attention(y, y, y, is_causal=True) @ self.weight
        y = getattr(y, self.after)(1) if self.after == "cumsum" else getattr(y, self.after)()
        return y.square().sum()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("between", ["sin", "cumsum"])
@pytest.mark.parametrize("after", ["sin", "cumsum"])
@pytest.mark.parametrize("width", [1, 12])
def test_the_cut_is_the_least_of_all(width: int, after: str, between: str, ranks: int) -> None:
    """Of every set of operations the one with the fewest bytes, and of equals the largest."""
    x = torch.zeros(2, 8, 4, dtype=torch.float64)
    graph = compiler.captured(Bare(between, after, width).double(), (x,), {})
    found = folded_order.links(graph, ranks)
    names, costs = sorted(found), dict[frozenset[str], tuple[int, int]]()
    for size in range(len(names) + 1):
        for some in itertools.combinations(names, size):
            costs[frozenset(some)] = bytes_of(graph, ranks, found, frozenset(some))
    chosen = folded_order.cheapest(graph, ranks, found)
    assert costs[chosen] == min(costs.values())
    assert all(some <= chosen for some, size in costs.items() if size == costs[chosen])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("form", [{}, {"shift": True}, {"mixed": True}, {"wide": 40}], ids=str)
def test_the_cut_is_the_least(form: dict[str, Any], ranks: int) -> None:
    """Of a whole model: no one or two operations are better on the other side, and no set that is drawn is better."""
    graph = graph_of(Small(**form))
    found = folded_order.links(graph, ranks)
    chosen = folded_order.cheapest(graph, ranks, found)
    least = bytes_of(graph, ranks, found, chosen)
    generator = torch.Generator().manual_seed(0)
    names = sorted(found)
    for name in names:  # no operation, and no two, are better on the other side
        for other in names:
            assert bytes_of(graph, ranks, found, chosen ^ {name, other}) >= least
    for _ in range(2000):
        some = frozenset(n for n in names if torch.rand((), generator=generator) < 0.5)
        assert bytes_of(graph, ranks, found, some) >= least


# --- models ---


def tiny(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    if name == "small":
        return Small(), (torch.randint(0, 11, (2, 48)),), {}
    if name == "shifted":
        return Small(shift=True), (torch.randint(0, 11, (2, 48)),), {}
    if name == "mixed":
        return Small(mixed=True, wide=40), (torch.randint(0, 11, (2, 48)),), {}
    reference = autoshard.models.get(name)
    args, kwargs = reference.inputs(batch=2)
    return reference.model().train(), args, kwargs


@pytest.mark.usefixtures("taken", "remembering")
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["small", "shifted", "mixed", "llama"])
def test_trains_as_one_device(name: str, ranks: int) -> None:
    """Outputs, gradients and weights."""
    model, args, kwargs = tiny(name)
    with captured_once():
        report = assert_equal_training(model, {"cp": ranks}, args, kwargs, like="ring")
    print(name, ranks, report.plan.folded, attention(report.plan), brought(report.plan))
    assert report.plan.folded == ranks
    assert "folded ring" in attention(report.plan)


@pytest.mark.usefixtures("taken", "remembering")
@pytest.mark.parametrize(
    "like",
    [
        None,
        "ulysses",
        {"cp": "ring", "tp": "megatron"},
        {"cp": "ring", "tp": "megatron-sp"},
        {"cp": "ring", "tp": "fsdp"},
    ],
    ids=str,
)
@pytest.mark.parametrize("axes", [{"cp": 2, "tp": 2}, {"tp": 2, "cp": 4}], ids=str)
def test_beside_another_axis(like: Any, axes: dict[str, int]) -> None:
    model, args, kwargs = tiny("llama")
    with captured_once():
        report = assert_equal_training(model, axes, args, kwargs, like=like)
    print(like, axes, report.plan.folded, attention(report.plan), brought(report.plan))
    assert report.plan.folded == axes["cp"]

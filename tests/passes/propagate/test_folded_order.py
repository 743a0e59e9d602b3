"""The folded order of a sequence, carried through a model: equal to one device, ended where it costs least, no swaps inside."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from harness import assert_equal_training, captured_once, collectives, ideal
from ring_steps import Attention
from torch import nn

import autoshard
import autoshard.models
from autoshard import compiler, runtime
from autoshard.errors import PlanError
from autoshard.hardware import PRESETS
from autoshard.models import Llama, LlamaConfig
from autoshard.passes.ir.graph import Graph
from autoshard.passes.propagate import zigzag
from autoshard.passes.propagate.named_strategies import tensor_sequence
from autoshard.passes.rules.families import context_parallel
from autoshard.plans import planning
from autoshard.runtime.attention.ring_geometry import rank_spans
from autoshard.runtime.attention.zigzag import from_zigzag_op, to_zigzag_op


def attention(plan: autoshard.Plan) -> set[str]:
    return {label for c in plan.choices.values() if "attention" in c.op for label in c.labels}


# --- the order ---


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_chunks_are_what_ranks_of_a_folded_ring_hold(ranks: int) -> None:
    for each in (1, 2, 3, 4):
        x = torch.arange(ranks * each)
        expected = [
            [i for start, n in held for i in range(start, start + n)] for held in rank_spans(len(x), (ranks,), True)
        ]
        assert [chunk.tolist() for chunk in to_zigzag_op(x, 0, ranks).chunk(ranks)] == expected
        assert torch.equal(from_zigzag_op(to_zigzag_op(x, 0, ranks), 0, ranks), x)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("function", ["to_zigzag", "from_zigzag"])
def test_ranks_swap_halves(function: str, ranks: int) -> None:
    """Of cut tensors as of whole ones, with their gradients; half a chunk is sent."""
    op = to_zigzag_op if function == "to_zigzag" else from_zigzag_op
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
            inverse = from_zigzag_op if op is to_zigzag_op else to_zigzag_op
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
    return compiler.capture_graph(model.double(), (torch.zeros(2, length, dtype=torch.long),), {})


def bytes_of(
    graph: Graph, ranks: int, found: dict[str, zigzag.SequenceLink], chosen: frozenset[str]
) -> tuple[int, int]:
    """What changes places where ``chosen`` operations run in folded order, said once more; and of how many values."""
    size = values = 0
    for node in graph.nodes:
        if node.name in found and node.op in context_parallel.ATTENTION_OPS and node.name not in chosen:
            size += zigzag.internal_reorder_bytes(node, graph, ranks)
    for value, (maker, readers) in zigzag.makers_and_readers(graph, found).items():
        if any((reader in chosen) != (maker in chosen) for reader in readers):
            size += zigzag.reorder_bytes(graph, value)
            values += 1
    return size, values


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.projection(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v).square().mean()


@pytest.mark.parametrize(("length", "ranks"), [(2400, 12), (3072, 16)])
def test_ranks_that_divide_a_sequence_share_its_work(length: int, ranks: int) -> None:
    """Also where their number is no power of two."""
    with torch.device("meta"):
        model, x = Attends(), torch.empty(1, length, 16)
    plan = autoshard.plan(model, ideal({"cp": ranks}), (x,))
    assert plan.cost.flops_per_rank == pytest.approx(plan.cost.flops / ranks)


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
    graph = compiler.capture_graph(Bare(between, after, width).double(), (x,), {})
    found = zigzag.sequence_links(graph, ranks)
    names, costs = sorted(found), dict[frozenset[str], tuple[int, int]]()
    for size in range(len(names) + 1):
        for some in itertools.combinations(names, size):
            costs[frozenset(some)] = bytes_of(graph, ranks, found, frozenset(some))
    chosen = zigzag.zigzag_nodes(graph, ranks, found)
    assert costs[chosen] == min(costs.values())
    assert all(some <= chosen for some, size in costs.items() if size == costs[chosen])


@pytest.mark.slow_cases("{'shift': True}-4", "{'mixed': True}-4", "{}-4")
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("form", [{}, {"shift": True}, {"mixed": True}, {"wide": 40}], ids=str)
def test_the_cut_is_the_least(form: dict[str, Any], ranks: int) -> None:
    """Of a whole model: no one or two operations are better on the other side, and no set that is drawn is better."""
    graph = graph_of(Small(**form))
    found = zigzag.sequence_links(graph, ranks)
    chosen = zigzag.zigzag_nodes(graph, ranks, found)
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
    tokens = torch.randint(0, 11, (2, 48), generator=torch.Generator().manual_seed(1))
    if name in FORMS:
        torch.manual_seed(0)
        return Small(**FORMS[name]), (tokens,), {}
    model = autoshard.models.get(name).model().train()
    for module in model.modules():  # what draws keeps the order of the sequence
        if hasattr(module, "p"):
            module.p = 0.0
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.0
    tokens = tokens[:, :24]
    return model, (tokens, tokens), {}


FORMS: dict[str, dict[str, Any]] = {"small": {}, "shifted": {"shift": True}, "mixed": {"mixed": True, "wide": 40}}
SLOW = [(name, ranks) for name in ("shifted", "mixed", "gpt") for ranks in (2, 3, 4, 8)] + [("llama", 3), ("llama", 4)]


@pytest.mark.slow_cases("llama-8", "llama-2")
@pytest.mark.usefixtures("taken", "remembering")
@pytest.mark.parametrize(
    ("name", "ranks"),
    [("small", 3), ("shifted", 4), ("llama", 2), ("llama", 8)]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case != ("shifted", 4)],
)
def test_trains_as_one_device(name: str, ranks: int) -> None:
    """Outputs, gradients and weights."""
    model, args, kwargs = tiny(name)
    with captured_once():
        report = assert_equal_training(model, {"cp": ranks}, args, kwargs, like="ring")
    assert report.plan.folded == ranks
    assert attention(report.plan) == {"zigzag ring"} | (
        {"ring with helpers"} if (name, ranks) == ("shifted", 2) else set()
    )
    into, back = report.plan.folds
    inside = name == "shifted" and ranks > 2  # to and from the shift between two layers
    assert {"tokens", "arange"} <= {*into}
    assert (len(into), len(back)) == (2 + inside, 1 + inside)


@pytest.mark.slow_cases("{'cp': 2, 'tp': 2}-{'cp': 'ring', 'tp': 'megatron-sp'}-[[]'heads', 'zigzag ring']")
@pytest.mark.usefixtures("taken", "remembering")
@pytest.mark.parametrize(
    ("axes", "like", "labels"),
    [
        ({"cp": 2, "tp": 2}, {"cp": "ring", "tp": "megatron-sp"}, ["heads", "zigzag ring"]),
        pytest.param(
            {"tp": 2, "cp": 4}, {"cp": "ring", "tp": "megatron"}, ["heads", "zigzag ring"], marks=pytest.mark.slow
        ),
        pytest.param(
            {"cp": 2, "dp": 2}, {"cp": "ring", "dp": "fsdp"}, ["batch0", "zigzag ring"], marks=pytest.mark.slow
        ),
        ({"cp": 2, "tp": 2}, "ulysses", ["heads", "query heads"]),
        pytest.param({"cp": 4}, {}, ["heads"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_beside_another_axis(axes: dict[str, int], like: Any, labels: list[str]) -> None:
    """Also where attention is cut otherwise: it is brought into the order of the sequence for it, and back."""
    model, args, kwargs = tiny("llama")
    with captured_once():
        report = assert_equal_training(model, axes, args, kwargs, like=like or None)
    assert report.plan.folded == axes["cp"]
    assert {*labels} <= attention(report.plan) | ({"heads"} if not like else set())


@pytest.mark.slow_cases("zigzag, gathered in chunks")
@pytest.mark.usefixtures("taken", "remembering")
@pytest.mark.parametrize("label", ["zigzag, gathered in chunks", "zigzag queries"])
def test_of_gathered_keys(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come in folded order, too, and are brought into the order of the sequence where they are read."""
    monkeypatch.setattr(tensor_sequence, "ring_strategies", lambda node, families: frozenset({label}))
    model, args, kwargs = tiny("llama")
    with captured_once():
        report = assert_equal_training(model, {"cp": 3}, args, kwargs, like="ring")
    assert (report.plan.folded, attention(report.plan)) == (3, {label})


@pytest.mark.slow_cases("4")
@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize("ranks", [2, 4])
def test_nothing_is_swapped(ranks: int) -> None:
    """Hops are all that is sent along a sequence: keys and values once forward, twice backward with their gradients."""
    x = torch.randn(2, 16, 16)
    found = collectives(Attention(16, 4, 4), {"cp": ranks}, None, (x,), like="ring")
    sent = Counter[str]()
    for (kind, _, phase, size), count in found.items():
        sent[phase] += size * count * (kind == "permute") / (2 * 16 * 16 * 8 / ranks)
    assert sent == {"forward": 2 * (ranks - 1), "backward": 4 * (ranks - 1)}
    plan = autoshard.plan(Attention(16, 4, 4).double(), autoshard.Mesh({"cp": ranks}), (x.double(),), like="ring")
    assert plan.folded == ranks
    assert not any("halves" in c.reason for c in plan.collectives)
    assert f"the sequence is in zigzag order of {ranks} ranks" in plan.explain("scaled_dot_product_attention")


@pytest.mark.slow
@pytest.mark.usefixtures("taken")
def test_a_plan_is_followed() -> None:
    """Saved and loaded: the same order, with as many bytes and the same bound; a plan in it fits no graph of other lengths."""
    model, args, kwargs = tiny("llama")
    mesh = autoshard.Mesh({"cp": 4}, "ideal_network")
    sharded = autoshard.compile(model.double(), mesh, args, kwargs, like="ring")
    assert "in zigzag order of 4 ranks: tokens, arange brought into it" in sharded.plan.report()
    assert "runtime.to_zigzag(" in sharded.source
    assert "runtime.from_zigzag(" in sharded.source
    plan = autoshard.Plan.from_json(sharded.plan.to_json())
    assert plan.folded == 4
    again = autoshard.compile(model, mesh, args, kwargs, plan=plan)
    assert again.plan.cost == sharded.plan.cost
    assert again.plan.lower_bound == sharded.plan.lower_bound
    assert again.source == sharded.source
    torch.testing.assert_close(again(*args).loss, model(*args).loss, rtol=1e-12, atol=0)
    shorter = tuple(x[:, :18] for x in args)  # 4 ranks have no halves of that alike
    with pytest.raises(PlanError, match="another model or other input shapes"):
        autoshard.compile(model, mesh, shorter, kwargs, plan=plan)


@pytest.mark.slow_cases("{'recompute': 'blocks'}")
@pytest.mark.usefixtures("taken", "remembering")
@pytest.mark.parametrize(
    "how",
    [{"micro_batches": 2}, {"recompute": "blocks"}, pytest.param({"recompute": "selective"}, marks=pytest.mark.slow)],
    ids=str,
)
def test_steps_of_other_kinds(how: dict[str, Any]) -> None:
    model, args, kwargs = tiny("llama")
    mesh = autoshard.Mesh({"cp": 4}, "ideal_network")
    report = autoshard.verify(model.double(), mesh, args, kwargs, like="ring", **how)
    assert report.ok, str(report)
    assert report.plan.folded == 4


@pytest.mark.slow
@pytest.mark.usefixtures("taken")
def test_where_it_is_not_carried() -> None:
    """Along a length that is open, in stages, and where attention draws."""
    model, args, kwargs = tiny("llama")
    mesh = autoshard.Mesh({"cp": 2}, "ideal_network")
    rows: dict[str, Any] = {"tokens": {0: "batch"}, "labels": {0: "batch"}}
    for dynamic, folded in ((True, 0), (rows, 2)):
        sharded = autoshard.compile(copy.deepcopy(model).double(), mesh, args, kwargs, like="ring", dynamic=dynamic)
        assert sharded.plan.folded == folded
        for given in (
            args,
            tuple(x[:1] for x in args),
            tuple(x[:, : len(x[0]) - (6 if not folded else 0)] for x in args),
        ):
            expected = model.double()(*given).loss
            torch.testing.assert_close(sharded(*given).loss, expected, rtol=1e-12, atol=0)
    staged = autoshard.Mesh({"pp": 2, "cp": 2}, "ideal_network")
    plan = autoshard.plan(model, staged, args, kwargs, like={"cp": "ring"}, stages="pp", micro_batches=2)
    assert plan.staged is not None
    assert {stage.folded for stage in plan.staged.plans} == {0}
    x = torch.randn(2, 16, 16, dtype=torch.float64)
    report = autoshard.verify(Attention(16, 4, 4, dropout=0.5).double(), mesh, (x,), like="ring")
    assert report.ok, str(report)
    assert report.plan.folded == 0


@pytest.mark.slow
def test_the_cheaper_order_is_taken() -> None:
    """Of two nodes of one device, over which halves of queries would go before and after each attention."""
    hardware = replace(PRESETS["h100"], devices_per_node=1)
    config = LlamaConfig(vocab=1024, width=4096, hidden=3 * 4096, heads=32, kv_heads=8, layers=2)
    with torch.device("meta"):
        model, tokens = Llama(config).bfloat16(), torch.zeros(1, 65536, dtype=torch.long)
    asked: dict[str, Any] = {"memory_budget": 1e15}
    plan = autoshard.plan(model, autoshard.Mesh({"cp": 2}, hardware), (tokens, tokens), **asked)
    assert plan.folded == 2
    with patch.object(planning, "zigzag_ranks", lambda assignment: 0):
        plain = autoshard.plan(model, autoshard.Mesh({"cp": 2}, hardware), (tokens, tokens), **asked)
    assert plain.folded == 0
    assert plan.cost.total_s < 0.98 * plain.cost.total_s
    few = tokens[:, :4096]  # heads are cut, which have no order
    assert autoshard.plan(model, autoshard.Mesh({"cp": 2}, hardware), (few, few), **asked).folded == 0

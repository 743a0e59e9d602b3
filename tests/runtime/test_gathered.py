"""Attention over keys and values that are gathered in chunks: equal to one device, two pieces at once, bytes, and its price."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import spelled_models
import torch
import torch.nn.functional as F
from harness import assert_equal_training, captured_once, collectives, double
from mask_models import MASKS, Masked, S
from memory_truth import kept_bytes
from ring_steps import HEADS, SLOW, VARIANTS, WIDTH, Attention, B, error, labels_of, model, run
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import autoshard
from autoshard import runtime
from autoshard.check.rule_check import check_rule
from autoshard.compiler import capture_graph, compile_graph
from autoshard.errors import RuntimeMismatchError
from autoshard.hardware import PRESETS
from autoshard.passes.ir.assignment import operand_placements, result_placements
from autoshard.passes.ir.graph import Ref
from autoshard.passes.ir.program import InternalCollective, LocalCall
from autoshard.passes.propagate.named_strategies import tensor_sequence
from autoshard.passes.propagate.op_space import internal_collectives
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.families import context_parallel
from autoshard.passes.rules.interpreters import AbstractRun, TensorSpec
from autoshard.plans.options import CompileOptions
from autoshard.runtime.attention import head_chunks, tile
from autoshard.runtime.attention import ring_geometry as ring_order

pytestmark = pytest.mark.usefixtures("remembering")

aten = torch.ops.aten
DROPPED = spelled_models.dropped, spelled_models.capped_and_dropped, spelled_models.sloped_and_dropped
PIECES = {"gathered in chunks", "zigzag, gathered in chunks"}


# --- the run time ---


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("length", [16, 19, 41])
def test_causal(ranks: int, length: int) -> None:
    """Pieces of several heads, of one, and where these do not divide."""
    for heads, count in ((1, 1), (2, 2), (4, 1), (4, 3), (4, 4)):
        for folded in (False, True):
            theirs, ours, _ = run(ranks, length, length, heads=heads, causal=True, folded=folded, pieces=count)
            assert error(theirs, ours) < 1e-12, (heads, count, folded)


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("name", VARIANTS)
def test_of_other_kinds(name: str, batches: int) -> None:
    pieces = min(2, VARIANTS[name].get("heads", 4))
    theirs, ours, _ = run(3, 10, 14, pieces=pieces, batches=batches, **VARIANTS[name])
    assert error(theirs, ours) < 1e-12


@pytest.mark.parametrize("folded", [False, True])
def test_some_sequences_of_a_head(folded: bool) -> None:
    """One key head, whose batch comes in parts: as many as there are sequences, and more."""
    for batches in (2, 3):
        theirs, ours, log = run(3, 16, 16, heads=1, causal=True, folded=folded, pieces=1, batches=batches)
        assert error(theirs, ours) < 1e-12
        assert Counter(e.kind for e in log)["all_gather"] == 2 * batches
        gathered = [e.bytes for e in log if e.kind == "all_gather" and e.bytes]
        assert set(gathered) == {2 / 3 * 2 * 18 * WIDTH * 8}  # keys and values of one sequence, whose chunks count as 6


@pytest.mark.parametrize("lead", [(), (3,), (2, 0)], ids=["no heads' dim", "no batch", "a rank without heads"])
def test_of_other_dims(lead: tuple[int, ...]) -> None:
    """A sequence alone, one of several heads, and none, as where an axis cuts fewer heads than it has ranks."""
    whole = [torch.randn(*lead, n, 4, dtype=torch.float64, requires_grad=True) for n in (12, 6, 6)]
    halves = [x.detach().chunk(2, -2) for x in whole]
    parts = [[x[i].requires_grad_() for x in halves] for i in (0, 1)]
    spec = runtime.AttentionSpec(12, 6, "cp", pieces=len(lead) or 2)
    outs = runtime.World({"cp": 2}).run(lambda *xs: runtime.gathered_attention(*xs, spec), parts)
    expected = F.scaled_dot_product_attention(*whole)
    torch.testing.assert_close(torch.cat(outs, -2), expected, rtol=1e-12, atol=1e-12)
    expected.square().sum().backward()
    sum(x.square().sum() for x in outs).backward()
    for x, mine in zip(whole, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(torch.cat([p.grad for p in mine], -2), x.grad, rtol=1e-12, atol=1e-12)


def test_more_pieces_than_heads() -> None:
    """Where other axes cut heads unevenly, a rank has none of the last pieces."""
    theirs, ours, _ = run(2, 10, 10, heads=2, causal=True, pieces=3)
    assert error(theirs, ours) < 1e-12


def test_biases_by_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    """ALiBi: of every piece the slopes of its heads."""
    monkeypatch.setattr(ring_order, "WINDOW_BLOCK_ROWS", 3)
    slopes, at = torch.tensor([0.5, 0.25, 0.1, 0.0]).double().view(1, -1, 1, 1), torch.arange(41)
    dense = (slopes * (at - at[:, None])).masked_fill(at > at[:, None], -torch.inf)
    theirs, _, _ = run(1, 41, 41, heads=2, mask=dense)
    for folded in (False, True):
        _, ours, _ = run(3, 41, 41, heads=2, mask=slopes, causal=True, folded=folded, sloped=True, pieces=2)
        assert error(theirs, ours) < 1e-12, folded


def test_another_pieces_queries_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: keys meet the queries of other heads."""
    right = head_chunks._chunk_of_each
    monkeypatch.setattr(head_chunks, "_chunk_of_each", lambda of, number, *xs: right(of, 1 - number, *xs))
    theirs, ours, _ = run(2, 16, 16, pieces=2)
    assert error(theirs, ours) > 0.1


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_of_the_formula(ranks: int) -> None:
    """(N-1)/N of keys and values forward, twice that backward: gathered again, and their gradients."""
    for heads, count in ((HEADS, 4), (2, 2), (2, 1)):
        log, sent = run(ranks, 16, 16, heads=heads, pieces=count)[2], Counter[Any]()
        assert Counter((e.kind, e.phase) for e in log) == {
            ("all_gather", "forward"): count,
            ("all_gather", "backward"): count,
            ("reduce_scatter", "backward"): count,
        }
        for e in log:
            sent[e.phase] += e.bytes
        share = (ranks - 1) / ranks * B * heads * 16 * WIDTH * 8
        assert sent == {"forward": 2 * share, "backward": 4 * share}


def test_the_next_piece_comes_meanwhile_and_two_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    events, alive = list[str](), list[StorageWeakRef]()
    unpacked, begin = head_chunks._ChunkedOperands.unpacked, head_chunks._ChunkedOperands._moved
    compute, back = tile.tile_forward, tile.tile_backward

    def came(self: Any, number: int, x: torch.Tensor) -> Any:
        if x.shape[0] == self.length:
            alive[:] = [ref for ref in alive if not ref.expired()]
            alive.append(StorageWeakRef(x.untyped_storage()))
            assert len(alive) <= 2
        return unpacked(self, number, x)

    def moved(self: Any, source: str, *rest: Any) -> Any:
        events.append({"S": "gather", "P": "sum"}[source])
        return (yield from begin(self, source, *rest))

    def noted(fn: Any, name: str) -> Any:
        return lambda *given: (events.append(name), fn(*given))[1]

    monkeypatch.setattr(head_chunks._ChunkedOperands, "unpacked", came)
    monkeypatch.setattr(head_chunks._ChunkedOperands, "_moved", moved)
    monkeypatch.setattr(tile, "tile_forward", noted(compute, "forward"))
    monkeypatch.setattr(tile, "tile_backward", noted(back, "backward"))
    run(1, 16, 16, pieces=3)
    ahead = ["gather", "gather", "forward", "gather", "forward", "forward"]
    behind = ["gather", "gather", "backward", "sum", "gather", "backward", "sum", "backward", "sum"]
    assert events == ahead + behind


def test_no_more_than_two_pieces_take_memory() -> None:
    """Keys and values of 2 MiB in float32; rank 0 of 8 has an eighth of them, and of queries and results."""
    own = 16 * 2048 // 8 * 8 * 4
    whole = 2 * 8 * own

    def peaks(count: int, batches: int = 1) -> tuple[int, int]:
        how = {"queries": 2048, "keys": 2048, "axes": "cp", "pieces": count, "batches": batches}
        shape = (batches, 16 // batches, 2048 // 8, 8)
        spec = LocalCall("AttentionSpec", (), how)
        call = LocalCall("gathered_attention", (*(Ref(n) for n in "qkv"), spec), {})
        form = TensorSpec(shape, torch.empty(shape).stride(), torch.float32, True)
        found = AbstractRun({"cp": 8}).run(call, dict.fromkeys("qkv", form), True)
        assert found is not None
        assert sum(found.new) < 1.2 * own  # the result and log-sum-exps: all that is kept beside operands
        return found.forward_peak, found.backward_peak

    for count, batches in ((4, 1), (8, 1), (16, 1), (8, 16), (8, 4)):
        heads = min(count, 16 // batches)
        forward, backward = peaks(heads, batches)
        count = heads * batches
        assert forward < 2 * whole / count + 4 * own
        assert backward < 4 * whole / count + 4 * own  # two gathered, gradients of one, and sums of one under way
    assert peaks(1)[0] > whole


def test_no_second_derivative() -> None:
    xs = [torch.randn(1, 2, 4, 4, requires_grad=True) for _ in range(2)]
    world = runtime.World({"cp": 2})

    def one(x: torch.Tensor) -> torch.Tensor:
        return runtime.gathered_attention(x, x, x, runtime.AttentionSpec(8, 8, "cp", pieces=2))

    outs = world.run(one, [(x,) for x in xs])
    with pytest.raises(RuntimeMismatchError, match="no second derivative"):
        torch.autograd.grad(sum(out.sum() for out in outs), xs, create_graph=True)


# --- the rule ---


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """``like="ring"`` asks for pieces."""

    def pieces_of(node: Any, families: Any) -> frozenset[str]:
        return frozenset(s.label for s in families.strategies(node) if s.label in PIECES)

    monkeypatch.setattr(tensor_sequence, "ring_strategies", pieces_of)


@pytest.mark.slow
def test_combines_with_other_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two axes that gather together, one beside heads of either kind (also uneven ones), beside samples; a head at a time."""
    monkeypatch.setattr(context_parallel, "CHUNK_BYTES", 1)
    random = torch.Generator().manual_seed(0)
    for shapes in (((1, 4, 8, 2), (1, 2, 8, 2)), ((2, 3, 7, 3), (2, 3, 7, 3))):
        q, k, v = (torch.randn(s, generator=random, dtype=torch.float64) for s in (shapes[0], shapes[1], shapes[1]))
        sample = (q, k, v, None, 0.0, True), {"enable_gqa": shapes[0] != shapes[1]}
        found = check_rule(aten.scaled_dot_product_attention.default, [sample], meshes=[{"x": 2, "y": 2}, {"x": 3}])
        assert found.strategies >= PIECES


MODELS = [("llama", {"cp": 3}), ("llama", {"cp": 2, "tp": 2}), ("gpt", {"cp": 2})]


@pytest.mark.slow_cases("gpt-{'cp': 2}", "llama-{'cp': 3}")
@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    ("name", "axes"), [*MODELS, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_trains_as_one_device(name: str, axes: dict[str, int]) -> None:
    """Outputs, gradients and weights; with dropout in gpt and hf_gpt2."""
    module, args, kwargs = model(name)
    like = {"cp": "ring", "tp": "megatron"} if "tp" in axes else "ring"
    with captured_once():
        report = assert_equal_training(module, axes, args, kwargs, like=like)
    labels = labels_of(report)
    assert labels & PIECES
    assert labels <= PIECES | {"heads", "query heads"}


@pytest.mark.slow_cases("packed")
@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    "name", ["window", "packed", *(pytest.param(n, marks=pytest.mark.slow) for n in ("ALiBi, causal", "later rows"))]
)
def test_masks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of rows, on uneven chunks, with fewer key heads than query heads."""
    monkeypatch.setattr(ring_order, "WINDOW_BLOCK_ROWS", 2)
    module, x = Masked(MASKS[name][0], 2), torch.randn(2, S, 8)
    for like, axes in (("ring", {"cp": 5}), ({"cp": "ring", "tp": "megatron"}, {"cp": 2, "tp": 2})):
        with captured_once():
            report = assert_equal_training(module, axes, (x,), like=like, steps=1)
        assert labels_of(report) & PIECES


@pytest.mark.slow
@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    ("axes", "like"),
    [
        ({"cp": 3}, "ring"),
        pytest.param({"cp": 2, "tp": 2}, {"cp": "ring", "tp": "megatron"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sinks_caps_and_dropout(axes: dict[str, int], like: Any) -> None:
    forms = *spelled_models.FORMS, spelled_models.Sunk(0.3), *DROPPED
    module, x = spelled_models.Spelled(*forms), torch.randn(2, spelled_models.S, 16)
    report = assert_equal_training(module, axes, (x,), like=like, steps=1)
    attentions = [c.labels[0] for c in report.plan.choices.values() if "attention" in c.op]
    assert len(attentions) == len(forms)
    assert set(attentions) <= PIECES


@pytest.mark.slow_cases("False-3")
@pytest.mark.usefixtures("asked", "plain_order")
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("causal", [True, False])
def test_planned_bytes_are_sent(causal: bool, ranks: int) -> None:
    """Also of a sequence that does not divide; under a causal mask halves of queries and of results change places."""
    for heads, kv_heads, length in ((4, 4, 16), (4, 2, 19), (4, 1, 16)):
        found = collectives(
            Attention(16, heads, kv_heads, causal), {"cp": ranks}, None, (torch.randn(2, length, 16),), like="ring"
        )
        kinds = Counter[Any]()
        for (kind, _, phase, _), count in found.items():
            kinds[kind, phase] += count
        gathers = {("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "backward")}
        assert all(kinds[kind] == 2 * kv_heads for kind in gathers), kinds  # of each sequence, where latency is nothing
        assert bool(kinds["permute", "forward"]) == causal


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("axes", [{"cp": 2}, {"cp": 2, "tp": 2}], ids=str)
def test_kept_bytes_are_those_that_autograd_keeps(axes: dict[str, int]) -> None:
    """As many as a ring keeps, and fewer than where gathered keys and values are kept."""
    with torch.device("cpu"):
        module, x = Attention(32, 4, 2), torch.randn(2, 32, 32)
    graph = capture_graph(module, (x,), {}, training=True)
    like = {"cp": "ring", "tp": "megatron"} if "tp" in axes else "ring"
    compiled = compile_graph(
        graph, autoshard.Mesh(axes, replace(PRESETS["ideal_network"], cpu=True)), CompileOptions(like=like)
    )
    assert any(set(c.labels) & PIECES for c in compiled.plan.choices.values())
    assert compiled.plan.memory.activations == pytest.approx(kept_bytes(compiled), rel=0.005)


@pytest.mark.slow
@pytest.mark.usefixtures("asked")
def test_made_again_in_the_backward() -> None:
    """Whole blocks run again, their gathers included; what is sent is what the plan says."""
    module, args, kwargs = model("gpt")
    args, kwargs = double((args, kwargs))
    mesh = autoshard.Mesh({"cp": 3}, "ideal_network")
    sharded = autoshard.compile(module.double(), mesh, args, kwargs, like="ring", recompute="blocks")
    assert any("scaled_dot_product" in r.name and r.what == "computed" for r in sharded.plan.recomputed)
    sent, planned, log = Counter[Any](), Counter[Any](), list[runtime.Executed]()
    sharded.record(log)
    sharded(*args, **kwargs).loss.backward()
    for e in log:
        sent[e.kind, e.phase] += e.bytes
    for c in sharded.collectives:
        planned[c.kind, c.phase] += c.bytes
    assert sent == pytest.approx(planned)


# --- when it is chosen ---


class Layers(nn.Module):
    def __init__(self, heads: int, causal: bool) -> None:
        super().__init__()
        dropout = 0.1 if causal else 0.0  # without, helpers make work even at no price
        self.layers = nn.ModuleList(Attention(128 * heads, heads, heads, causal, dropout) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer.mixed(x)
        return x.float().square().mean()


@pytest.mark.parametrize(
    ("length", "ranks", "heads", "causal", "label"),
    [
        pytest.param(16384, 4, 3, False, "queries", marks=pytest.mark.slow),
        (65536, 4, 3, False, "gathered in chunks"),
        pytest.param(262144, 8, 4, False, "ring", marks=pytest.mark.slow),
        # fused dropout draws per shard; pieces and rings draw exact masks, which cost more than half the work
        pytest.param(65536, 8, 4, True, "queries", marks=pytest.mark.slow),
    ],
)
def test_crossovers(length: int, ranks: int, heads: int, causal: bool, label: str) -> None:
    """Fewer heads than ranks, each with a network card of its own: gathered at once, in pieces, then a ring."""
    with torch.device("meta"):
        layers, x = Layers(heads, causal).bfloat16(), torch.zeros(1, length, 128 * heads, dtype=torch.bfloat16)
    mesh = autoshard.Mesh({"cp": ranks}, replace(PRESETS["h100"], devices_per_node=1))
    plan = autoshard.plan(layers, mesh, (x,), memory_budget=1e15)
    assert [c.labels for c in plan.choices.values() if "scaled_dot_product" in c.op][-1] == (label,)


def test_pieces_are_few_where_latency_counts_and_small_where_memory_does() -> None:
    """Keys and values of 8 key heads: of short sequences one piece, of long ones one head each."""
    counts, sizes = list[int](), list[float]()
    for length in (1024, 16384, 131072, 1048576):
        with torch.device("meta"):
            q, k = (torch.zeros(1, h, length, 128, dtype=torch.bfloat16, requires_grad=True) for h in (32, 8))
        found = gathers(q, k, autoshard.Mesh({"cp": 8}, "h100"))
        counts.append(len(found))
        sizes.append(found[0].bytes)
    assert counts[0] == 1
    assert counts == sorted(counts)
    assert counts[-1] == 8
    assert sizes[-2] <= context_parallel.CHUNK_BYTES < sizes[-1]


@pytest.mark.parametrize(("batch", "each"), [(1, 1), (2, 1), (16, 2), (48, 2), (49, 2)])
def test_pieces_of_one_key_head_are_some_sequences(batch: int, each: int) -> None:
    """Of 131072 keys, with their values, a piece holds two at most; bytes are what they were."""
    with torch.device("meta"):
        q, k = (torch.zeros(batch, h, 131072, 128, dtype=torch.bfloat16, requires_grad=True) for h in (32, 1))
    found = gathers(q, k, autoshard.Mesh({"cp": 8}, "h100"))
    sequence = 131072 * 2 * 128 * 2
    assert max(c.bytes for c in found) == each * sequence <= context_parallel.CHUNK_BYTES
    assert sum(c.bytes for c in found) == batch * sequence


def gathers(q: torch.Tensor, k: torch.Tensor, mesh: autoshard.Mesh) -> list[InternalCollective]:
    """The gathers of the forward of attention in pieces."""
    graph = capture_graph(Core(), (q, k, k), {}, training=True)
    (node,) = [n for n in graph.nodes if n.op in context_parallel.ATTENTION_OPS]
    (choice,) = [(s,) for s in rule_for(node.op).strategies(node, graph) if s.label == "gathered in chunks"]
    placed = [operand_placements(choice, i, True) for i in range(3)] + [result_placements(choice, 0, True)]
    found = internal_collectives(node, graph, mesh, choice, placed)
    assert Counter(c.kind for c in found) == {"all_gather": 2 * len(found) // 3, "reduce_scatter": len(found) // 3}
    return [c for c in found if c.phase == "forward"]


class Core(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).sum()

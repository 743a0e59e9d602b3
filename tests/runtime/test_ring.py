"""Ring attention: equal to one device, its bytes those of the formula, its causal work even, and when it is chosen."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from harness import assert_equal_training, captured_once, collectives, double
from ring_steps import HEADS, SLOW, VARIANTS, WIDTH, Attention, B, error, labels_of, model, run

import autoshard
import autoshard.models
from autoshard import runtime
from autoshard.check.rule_check import check_rule
from autoshard.errors import RuntimeMismatchError
from autoshard.runtime.attention import ring_geometry as ring_order
from autoshard.runtime.attention import ring_task as ring_journey
from autoshard.runtime.attention import tile
from autoshard.runtime.attention.ring_geometry import CAUSAL, Band, band_tiles, pairs_per_rank, rank_spans

pytestmark = pytest.mark.usefixtures("remembering")


# --- the order of a ring ---


def test_folded_work_is_even() -> None:
    """The last of 8 ranks does 1.88 times the mean of a causal mask's work; in folded order all do the same."""
    plain, folded = (pairs_per_rank(4096, 4096, (8,), order) for order in (False, True))
    assert max(plain) * 8 / sum(plain) == pytest.approx(1.875, rel=1e-3)
    assert max(folded) * 8 / sum(folded) <= 1.05
    assert sum(plain) == sum(folded) == 4096 * 4097 / 2
    uneven = pairs_per_rank(4099, 4099, (8,), True)
    assert max(uneven) * 8 / sum(uneven) <= 1.05


@pytest.mark.parametrize("step", range(8))
def test_folded_work_is_even_in_every_step(step: int) -> None:
    order = rank_spans(4096, (8,), True)
    pairs = [sum(t.pairs for t in band_tiles(order[r], order[(r - step) % 8], CAUSAL)) for r in range(8)]
    assert max(pairs) * 8 / sum(pairs) <= 1.05


def test_every_rank_goes_through_the_sequence_in_order_and_no_tile_is_empty() -> None:
    for ranks, length in itertools.product((2, 3, 4, 5), (4, 7, 23)):
        for folded, band in ((True, CAUSAL), (False, Band(2, 0)), (False, Band(1, 1))):
            order = rank_spans(length, (ranks,), folded)
            assert all([*mine] == sorted(mine) for mine in order)
            found = [t for mine in order for theirs in order for t in band_tiles(mine, theirs, band)]
            assert all(t.rows[1] > 0 and t.columns[1] > 0 for t in found)


def test_hidden_tiles_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs computes the pairs that count, and half of each tile on the diagonal; each rank one tile at a time."""
    computed = Counter[str]()

    def counted(query: Any, key: Any, value: Any, masking: tile.Masking, scale: float) -> Any:
        computed["causal" if masking.causal else "whole"] += query.shape[-2] * key.shape[-2]
        computed["tiles"] += 1
        assert masking.bias is None
        return forward(query, key, value, masking, scale)

    forward = tile.tile_forward
    monkeypatch.setattr(ring_journey.tile, "tile_forward", counted)
    run(4, 64, 64, causal=True, folded=True)
    assert computed == {"causal": 4 * 16 * 16, "whole": 24 * 8 * 8, "tiles": 4 * 4}
    computed.clear()
    run(4, 64, 64, causal=True, helpers=True)
    assert computed == {"causal": 4 * 16 * 16, "whole": 24 * 8 * 8, "tiles": 4 * 3}


# --- the run time ---


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("length", [16, 19, 41])
def test_causal(ranks: int, length: int) -> None:
    for order in ({}, {"folded": True}, {"helpers": True}):
        theirs, ours, _ = run(ranks, length, length, heads=2, causal=True, **order)
        assert error(theirs, ours) < 1e-12, order


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_biases_by_distance(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """ALiBi, folded or not: of slopes alone, some rows at a time."""
    monkeypatch.setattr(ring_order, "WINDOW_BLOCK_ROWS", 3)
    slopes, at = torch.tensor([0.5, 0.25, 0.1, 0.0]).double().view(1, -1, 1, 1), torch.arange(41)
    for folded in (False, True):
        dense = (slopes * (at - at[:, None])).masked_fill(at > at[:, None], -torch.inf)
        theirs, _, _ = run(1, 41, 41, heads=2, mask=dense)
        _, ours, _ = run(ranks, 41, 41, heads=2, mask=slopes, causal=True, folded=folded, sloped=True)
        assert error(theirs, ours) < 1e-12, folded
        _, wrong, _ = run(ranks, 41, 41, heads=2, mask=2 * slopes, causal=True, folded=folded, sloped=True)
        assert error(theirs, wrong) > 1e-3


@pytest.mark.parametrize("name", VARIANTS)
def test_of_other_kinds(name: str) -> None:
    theirs, ours, _ = run(3, 10, 14, **VARIANTS[name])
    assert error(theirs, ours) < 1e-12


def test_rows_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no kernel computes a tile, some rows at a time do."""
    monkeypatch.setattr(tile, "UNFUSED_BLOCK_ROWS", 3)
    theirs, ours, _ = run(2, 16, 16, heads=2, value=5, causal=True, folded=True)
    assert error(theirs, ours) < 1e-12


def test_a_hop_too_few_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: every rank keeps its own keys."""

    def stays(self: ring_journey.RingTask, *given: Any) -> Any:
        return onward(self, *given)._replace(to=self.me, source=self.me)

    onward = ring_journey.RingTask.onward
    monkeypatch.setattr(ring_journey.RingTask, "onward", stays)
    theirs, ours, _ = run(4, 16, 16)
    assert error(theirs, ours) > 0.1


def test_bytes_of_the_formula() -> None:
    """Keys and values once forward, twice backward: 6 (N-1)/N of an activation, scaled by key heads over query heads."""
    for ranks in (2, 4):
        activation = B * HEADS * 16 * WIDTH * 8
        for heads in (HEADS, 2):
            log, sent = run(ranks, 16, 16, heads=heads)[2], Counter[str]()
            for e in log:
                assert (e.kind, e.axes) == ("permute", ("cp",))
                sent[e.phase] += e.bytes
            share = (ranks - 1) / ranks * activation * heads / HEADS
            assert sent == {"forward": 2 * share, "backward": 4 * share}


def test_a_result_without_gradient_on_one_rank() -> None:
    """No rank's part of the backward can be left out."""
    xs = [torch.randn(1, 2, 4, 4, requires_grad=True) for _ in range(2)]
    world, spec = runtime.World({"cp": 2}), runtime.AttentionSpec(8, 8, "cp")
    outs = world.run(lambda x: runtime.ring_attention(x, x, x, spec), [(x,) for x in xs])
    with pytest.raises(RuntimeMismatchError, match="the result of one rank has no gradient"):
        outs[0].sum().backward()


# --- models ---

RINGS = {"ring", "zigzag ring", "ring with helpers"}


MODELS = [
    ("llama", {"cp": 3}),
    ("llama", {"cp": 2, "tp": 2}),
    ("gpt", {"cp": 2}),
]


@pytest.mark.slow_cases("*hf_gpt2-*", "llama-{'cp': 3}", "gpt-{'cp': 2}")
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
    assert labels & RINGS
    assert labels <= RINGS | {"heads", "query heads"}


@pytest.mark.slow_cases("*-2")
@pytest.mark.usefixtures("plain_order")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_planned_bytes_are_sent(causal: bool, ranks: int) -> None:
    """Under a causal mask with helpers, a result's log-sum-exps among what they give back."""
    x = torch.randn(2, 16, 16)
    found = collectives(Attention(16, 4, 4, causal), {"cp": ranks}, None, (x,), like="ring")
    share, sent = 2 * 16 * 16 * 8 / ranks, Counter[str]()
    for (kind, _, phase, size), count in found.items():
        sent[phase] += size * count * (kind == "permute") / share
    plain = {"forward": 2 * (ranks - 1), "backward": 4 * (ranks - 1)}
    with_helpers = {2: {"forward": 2.5 + 1 / 8, "backward": 4}, 4: {"forward": 5.5 + 3 / 8, "backward": 9 + 1 / 4}}
    assert sent == (with_helpers[ranks] if causal else plain)


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("ranks", [2, 4])
def test_planned_bytes_of_a_fold(ranks: int) -> None:
    """What is swapped, half a chunk each: q, the result, of more than two ranks k and v; of gradients, too."""
    x = torch.randn(2, 16, 16)
    found = collectives(Attention(16, 4, 4, dropout=0.1), {"cp": ranks}, None, (x,), like="ring")
    activation, sent = 2 * 16 * 16 * 8, Counter[str]()
    for (kind, _, phase, size), count in found.items():
        sent[phase] += size * count * (kind == "permute")
    swapped, share = activation / ranks / 2, (ranks - 1) / ranks * activation
    assert sent["forward"] == 2 * share + (4 if ranks > 2 else 2) * swapped
    assert sent["backward"] == 4 * share + (4 if ranks > 2 else 2) * swapped


@pytest.mark.slow
def test_bytes_of_gathered_keys_and_of_two_axes() -> None:
    """2 (N-1)/N of keys and values each way; a ring of R ranks beside U that turn the sequence into heads: 6 (R-1)/R of an
    activation's part of their heads, and 8 (U-1)/U² of its part of their positions."""
    x, activation = torch.randn(2, 16, 16), 2 * 16 * 16 * 8
    hints = {"x": autoshard.Shard(1), "*weight": "replicate"}
    found = collectives(Attention(16, 4, 2, causal=False), {"cp": 4}, hints, (x,))
    gathered = 3 / 4 * (2 * activation / 2)
    assert found["all_gather", ("cp",), "forward", gathered] == 1
    assert found["reduce_scatter", ("cp",), "backward", gathered] == 1
    like, sent = {"cp": "ring", "sp": "ulysses"}, Counter[str]()
    for (kind, *_, size), count in collectives(
        Attention(16, 4, 4, causal=False), {"cp": 2, "sp": 2}, None, (x,), like=like
    ).items():
        sent[kind] += count * size
    assert sent["permute"] == 6 / 2 * activation / 2
    assert sent["all_to_all"] == 8 / 4 * activation / 2


def test_combines_with_other_cuts() -> None:
    """Two axes in one ring, a ring beside heads of either kind, beside samples, and zigzag queries."""
    random = torch.Generator().manual_seed(0)
    shapes = (1, 4, 8, 2), (1, 2, 8, 2), (1, 2, 8, 2)
    q, k, v = (torch.randn(s, generator=random, dtype=torch.float64) for s in shapes)
    sample = (q, k, v, None, 0.0, True), {"enable_gqa": True}
    found = check_rule(torch.ops.aten.scaled_dot_product_attention.default, [sample], meshes=[{"x": 2, "y": 2}])
    assert {*RINGS, "zigzag queries", "queries", "query heads"} <= found.strategies


def test_made_again_in_the_backward() -> None:
    """Whole blocks run again, their rings included; what is sent is what the plan says."""
    module, args, kwargs = model("gpt")
    args, kwargs = double((args, kwargs))
    module = module.double()
    mesh = autoshard.Mesh({"cp": 3}, "ideal_network")
    sharded = autoshard.compile(module, mesh, args, kwargs, like="ring", recompute="blocks")
    assert any("scaled_dot_product" in r.name and r.what == "computed" for r in sharded.plan.recomputed)
    sent, planned, log = Counter[Any](), Counter[Any](), list[runtime.Executed]()
    sharded.record(log)
    torch.manual_seed(1)
    sharded(*args, **kwargs).loss.backward()
    torch.manual_seed(1)
    expected = torch.func.functional_call(module, dict(module.named_parameters()), args, kwargs).loss
    theirs = torch.autograd.grad(expected, list(module.parameters()))
    ours = sharded.full_gradients()
    for (name, _), gradient in zip(module.named_parameters(), theirs, strict=True):
        assert torch.allclose(ours[name], gradient, rtol=1e-9, atol=1e-12), name
    for e in log:
        sent[e.kind, e.phase] += e.bytes
    for c in sharded.collectives:
        planned[c.kind, c.phase] += c.bytes
    assert sent == pytest.approx(planned)

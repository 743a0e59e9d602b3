"""Masks of attention that are functions of positions: recognised in the graph, whatever a model builds them of."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import assert_equal_training, captured_once, collectives, ideal
from mask_models import MASKS, Mask, Masked, S, column, minus, row
from torch import nn
from transformers_models import WINDOWS

import autoshard
from autoshard.passes.capture.export import capture
from autoshard.passes.capture.translate.positions import PositionAnalysis
from autoshard.passes.ir.graph import Ref
from autoshard.passes.rules.families.context_parallel import ATTENTION_OPS, band_of
from autoshard.runtime.attention import ring_geometry as ring_order
from autoshard.runtime.attention import tile
from autoshard.runtime.attention.masked_attention import banded_op
from autoshard.runtime.attention.ring_geometry import ALL_KEYS, CAUSAL, Band


def _of_heads(slopes: torch.Tensor) -> torch.Tensor:
    return slopes.view(1, -1, 1, 1)


BIASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of keys": lambda slopes: (slopes[:, None, None] * torch.arange(S)[None, None, :])[None],
    "of keys from the last": lambda slopes: (
        torch.arange(1 - S, 1, dtype=torch.int32).view(1, 1, 1, S) * _of_heads(slopes)
    ),
    "of differences": lambda slopes: _of_heads(slopes) * (column() - row())[None].to(slopes.dtype),
    "of distances": lambda slopes: -torch.abs(column() - row()).unsqueeze(0) * _of_heads(slopes),
    "of distances in floats": lambda slopes: (slopes[:, None, None] * -(column().double() - row()).abs()[None])[None],
}
HIDES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Band]] = {
    "filled": (lambda bias: bias.masked_fill(column() > row(), -torch.inf), CAUSAL),
    "added": (lambda bias: bias + minus(column() <= row()), CAUSAL),
    "where": (lambda bias: torch.where(column() <= row(), bias, torch.finfo(bias.dtype).min), CAUSAL),
    "window": (lambda bias: bias.masked_fill((column() > row()) | (column() < row() - 4), -1e10), Band(4, 0)),
    "nothing": (lambda bias: bias, ALL_KEYS),
}  # fmt: skip


class Sloped(nn.Module):
    """Attention with linear biases (ALiBi)."""

    def __init__(self, bias: str, hides: str) -> None:
        super().__init__()
        self.bias, self.hides = BIASES[bias], HIDES[hides][0]
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125, 0.0625]))
        self.qkv, self.o = nn.Linear(8, 32), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in self.qkv(x).split([16, 8, 8], -1))
        y = F.scaled_dot_product_attention(q, k, v, self.hides(self.bias(self.slopes)).to(x.dtype), enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2)).square().mean()


def test_biases_by_distance_need_no_mask() -> None:
    """Slopes are all that is left; of a distance to later keys the mask stays."""
    x = torch.randn(2, S, 8, dtype=torch.float64)
    for bias, hides in (*zip(BIASES, HIDES, strict=True), ("of distances", "nothing"), ("of keys", "nothing")):
        graph = capture(Sloped(bias, hides).double(), (x,))
        (node,) = (n for n in graph.nodes if n.op in ATTENTION_OPS)
        found = hides != "nothing" or "distances" not in bias
        assert (node.op is banded_op._opoverload) == found, (bias, hides)
        if found:
            assert node.argument("sloped"), (bias, hides)
            assert band_of(node) == HIDES[hides][1], (bias, hides)
            assert not any(t.shape[-2:] == (S, S) for t in graph.types.values()), (bias, hides)


class SlopedWithSinks(nn.Module):
    """Attention with linear biases beside a sink: a term per query changes its weights."""

    def __init__(self, bias: str) -> None:
        super().__init__()
        self.bias = BIASES[bias]
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125, 0.0625]))
        self.qkv, self.sinks = nn.Linear(8, 48), nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) * 0.5 + self.bias(self.slopes).masked_fill(column() > row(), -torch.inf)
        joint = torch.cat([scores, self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
        return joint.softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize("bias", ["of keys", "of differences"])
def test_biases_beside_sinks(bias: str) -> None:
    torch.manual_seed(0)
    assert autoshard.verify(SlopedWithSinks(bias).double(), {"tp": 2}, (torch.randn(2, S, 8, dtype=torch.float64),)).ok


def _distances(slopes: torch.Tensor) -> torch.Tensor:
    return slopes.view(-1, 1, 1) * (column() - row())


@pytest.mark.parametrize(
    "bias",
    [
        lambda slopes: _distances(slopes)[:, None],  # a slope for every sample, of as many as heads
        lambda slopes: _distances(slopes).long().to(slopes.dtype),
        lambda slopes: _distances(slopes).half().to(slopes.dtype),
        lambda slopes: _distances(slopes).masked_fill(column() < row() - 4, 0.0),  # far keys count as this one
    ],
    ids=["of samples", "whole numbers", "rounded", "nothing for far keys"],
)
def test_biases_that_are_not_by_distance_alone_stay(bias: Mask) -> None:
    model, x = Sloped("of keys", "filled").double(), torch.randn(4, S, 8, dtype=torch.float64)
    model.bias = bias
    assert all(n.op is not banded_op._opoverload for n in capture(model, (x,)).nodes)


@pytest.mark.parametrize(
    ("axes", "like"),
    [
        ({"cp": 2, "tp": 2}, {"cp": "ring", "tp": "megatron"}),
        *(pytest.param({"cp": n}, "ring", marks=pytest.mark.slow) for n in (2, 3, 4, 8)),
        pytest.param({"cp": 2}, "ulysses", marks=pytest.mark.slow),
        pytest.param({"dp": 2, "tp": 2}, None, marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_biases_by_distance_are_equal(axes: dict[str, int], like: Any) -> None:
    for bias, hides in itertools.product(BIASES, HIDES) if len(axes) == 1 else [("of differences", "filled")]:
        assert_equal_training(Sloped(bias, hides), axes, (torch.randn(2, S, 8),), like=like, steps=2)


def test_a_tile_without_heads() -> None:
    """Of four heads the third of three ranks has none."""
    none = torch.zeros(2, 0, S, 4)
    out, sums = tile.tile_forward(none, none, none, tile.Masking(bias=torch.zeros(1, 0, S, S)), 0.5)
    assert (out.shape, sums.shape) == (none.shape, none.shape[:-1])
    given = tile.tile_backward(out, none, none, none, out, sums, tile.Masking(bias=torch.zeros(1, 0, S, S)), 0.5)
    assert all(x.shape == none.shape for x in given[:3])


def attention(name: str) -> Any:
    graph = capture(Masked(MASKS[name][0]).double(), (torch.randn(2, S, 8, dtype=torch.float64),))
    (node,) = (n for n in graph.nodes if n.op in ATTENTION_OPS)
    return node


@pytest.mark.parametrize("name", MASKS)
def test_is_recognised(name: str) -> None:
    """Only what is one; a part of the mask that depends on the data stays."""
    node, band = attention(name), MASKS[name][1]
    assert band_of(node) == (ALL_KEYS if band is None else band)
    mask = node.argument("attn_mask")
    assert (mask is None) == (band is not None and name != "documents" and "packed" not in name)
    assert (node.op is banded_op._opoverload) == (
        band not in (None, ALL_KEYS, CAUSAL) or (mask is not None and band is not None)
    )


def test_positions_are_what_runs() -> None:
    """Every value that is known has the values that it has when it is run."""
    seen = 0
    for name in ("where", "turned round", "window by distance", "later rows", "cut from a longer one", "documents"):
        mask = MASKS[name][0]

        class Bare(nn.Module):
            def forward(self, x: torch.Tensor, mask: Mask = mask) -> torch.Tensor:
                return mask(x) + torch.zeros((), dtype=torch.float64)

        graph = capture(Bare(), (torch.randn(2, 1, S, 8, dtype=torch.float64),), training=False)
        positions, values = PositionAnalysis(graph), dict[str, torch.Tensor]()
        for node in graph.nodes:
            if any(n not in values for n in node.inputs):
                continue
            args, kwargs = torch.utils._pytree.tree_map_only(
                Ref, lambda r, values=values: values[r.name], (node.args, dict(node.kwargs))
            )
            values[node.outputs[0]] = actual = node.op(*args, **kwargs)
            if (known := positions(Ref(node.outputs[0]))) is None:
                continue
            seen += 1
            for at in itertools.product(*map(range, actual.shape)):
                form = sum(s * i for s, i in zip(known.steps, at, strict=True))
                slope, offset = known.at(form)
                found = slope * form + offset if slope else offset
                assert actual[at].item() == found, (name, node, at)
    assert seen > 30


@pytest.mark.parametrize(
    "name",
    [
        "window of both sides",
        "packed",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("documents", "packed alike", "ALiBi, causal", "window", "later rows")
        ),
    ],
)
def test_in_a_ring(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of rows, on uneven chunks, with fewer key heads than query heads."""
    monkeypatch.setattr(ring_order, "WINDOW_BLOCK_ROWS", 2)
    module, x = Masked(MASKS[name][0], 1), torch.randn(2, S, 8)
    for like, axes in (("ring", {"cp": 5}), ({"cp": "ring", "tp": "megatron"}, {"cp": 2, "tp": 2})):
        with captured_once():
            report = assert_equal_training(module, axes, (x,), like=like, steps=1)
        (labels,) = (c.labels for c in report.plan.choices.values() if "attention" in c.op)
        assert {"ring", "zigzag ring", "ring with helpers"} & set(labels)


def test_documents_are_numbers() -> None:
    """No matrix of pairs is made of them; each query's and key's own number is compared with those of a tile."""
    sharded = autoshard.compile(Masked(MASKS["packed"][0]), {"cp": 2}, (torch.randn(2, S, 8),), like="ring")
    assert "eq(" not in sharded.source
    assert "attn_mask=" in sharded.source


@pytest.mark.parametrize("name", ["packed", pytest.param("window", marks=pytest.mark.slow)])
def test_in_micro_batches(name: str) -> None:
    """Windows and documents are operations of a runtime's own, on whole batches and on parts."""
    model, x = Masked(MASKS[name][0]).double(), torch.randn(4, S, 8, dtype=torch.float64)
    sharded = autoshard.compile(copy.deepcopy(model), ideal({"dp": 2}), (x,), micro_batches=2)
    losses = [module(x) for module in (model, sharded)]
    torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-12)
    for loss in losses:
        loss.backward()
    for n, p in model.named_parameters():
        torch.testing.assert_close(sharded.get_parameter(n).grad, p.grad, rtol=1e-9, atol=1e-12, msg=n)


@pytest.mark.parametrize(("window", "rows"), [(2, 1), (6, 3 + 2), pytest.param(9, 3 + 3 + 2, marks=pytest.mark.slow)])
def test_a_window_sends_what_it_shows(window: int, rows: int) -> None:
    """Chunks are of 3 positions: of keys and values those that a later rank sees, there and their gradients back."""
    module = Masked(lambda x: (column() <= row()) & (column() > row() - window))
    found, sent = collectives(module, {"cp": 4}, None, (torch.randn(2, S, 8),), like="ring"), Counter[str]()
    for (kind, _, phase, size), count in found.items():
        sent[phase] += size * count * (kind == "permute")
    of_a_row = 2 * 2 * 8 * 8  # samples, keys and values, features, bytes
    assert sent == {"forward": rows * of_a_row, "backward": 2 * rows * of_a_row}


def test_no_mask_of_a_long_sequence() -> None:
    """What transformers builds for 131072 positions would have 17 G elements; work is counted where keys are seen."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 4}
    config = transformers.MistralConfig(
        **sizes, num_key_value_heads=2, num_hidden_layers=1, sliding_window=4096, use_cache=False
    )
    with torch.device("meta"):
        model, tokens = transformers.MistralForCausalLM(config), torch.zeros(1, 131072, dtype=torch.int64)
    kwargs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    plan = autoshard.plan(model, autoshard.Mesh({"cp": 8}, "ideal_network"), (), kwargs, like="ring")
    assert plan.cost.flops < 1e12
    (choice,) = (c for c in plan.choices.values() if "attention" in c.op)
    assert choice.labels == ("ring",)
    permutes = [c for c in plan.collectives if c.kind == "permute" and c.phase == "forward"]
    assert [c.bytes for c in permutes if "attention" in c.reason] == [4095 * 2 * 2 * 4 * 4]


CASES = [("mistral", {"cp": 2, "tp": 2})]
MORE = [
    (name, axes) for name in WINDOWS for axes in ({"cp": 2}, {"cp": 4}, {"cp": 2, "tp": 2}) if (name, axes) not in CASES
]


@pytest.mark.slow_cases("mistral-{'cp': 2, 'tp': 2}")
@pytest.mark.parametrize(("name", "axes"), [*CASES, *(pytest.param(*c, marks=pytest.mark.slow) for c in MORE)], ids=str)
def test_models_of_transformers(name: str, axes: dict[str, int]) -> None:
    """Padded samples, with whatever mask the library builds; the sequence is cut from end to end."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    kind = getattr(transformers, WINDOWS[name][0])
    model = kind(kind.config_class(**WINDOWS[name][1])).train()
    tokens = torch.randint(0, 32, (2, S))
    kwargs = {"input_ids": tokens, "labels": tokens}
    if name != "gpt2":
        kwargs["attention_mask"] = (torch.arange(S) >= torch.tensor([[0], [3]])).long()
    like = {"cp": "ring", "tp": "megatron"} if "tp" in axes else "ring"
    with captured_once():
        report = assert_equal_training(model, axes, (), kwargs, like=like)
    plan = report.plan
    attentions = [c for c in plan.choices.values() if "attention" in c.op]
    assert len(attentions) == 2
    assert {c.labels[0] for c in attentions} <= {"ring", "zigzag ring", "ring with helpers"}
    products = [c.labels[0] for c in plan.choices.values() if c.op == "aten.linear.default"]
    assert set(products) == {"...1"}  # along the sequence

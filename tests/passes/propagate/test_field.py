"""The algebra holds the whole field: known schemes forced by hints, with their exact collectives, and equal numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from harness import Signature, assert_equal_training, collectives
from torch import nn

import autoshard
from autoshard import Replicate, Shard
from autoshard.hardware import PRESETS

WIDTH, HIDDEN, LAYERS = 16, 32, 2
WEIGHT = WIDTH * HIDDEN * 8
"""bytes of one weight in float64"""


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(LAYERS))
        self.downs = nn.ModuleList(nn.Linear(HIDDEN, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(F.gelu(up(x)))
        return x.square().mean()


class Attention(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = (p(x).view(b, t, self.heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, w))


class Attentions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Lm(nn.Module):
    """Embedding, tied head, cross entropy."""

    def __init__(self, vocabulary: int = 4096) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embedding(tokens))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def loss_reduction(*axes: str, ranks: int) -> Counter[Signature]:
    return Counter({("all_reduce", axes, "forward", 2 * (ranks - 1) / ranks * 8): 1})


# Bytes decide, not latencies, which dominate at these sizes.
WIDE = replace(PRESETS["h100"], node=autoshard.Link(0.0, 1e9), kernel_latency=0.0)
BIG = (torch.randn(64, 4, WIDTH, generator=torch.Generator().manual_seed(0)),)


def test_data_parallel() -> None:
    """DDP: one gradient all-reduce per parameter, nothing else."""
    found = collectives(Mlp(), {"dp": 4}, {"x": Shard(0), "*weight": "replicate"}, BIG)
    assert found - loss_reduction("dp", ranks=4) == Counter(
        {("all_reduce", ("dp",), "backward", 2 * 3 / 4 * WEIGHT): 2 * LAYERS}
    )


def test_fully_sharded() -> None:
    """FSDP: gathered in the forward, again in the backward where that needs the weight, and reduce-scattered."""
    found = collectives(Mlp(), {"dp": 4}, {"x": Shard(0), "*weight": {"dp": Shard(0)}}, BIG)
    part = 3 / 4 * WEIGHT
    assert found - loss_reduction("dp", ranks=4) == Counter(
        {
            ("all_gather", ("dp",), "forward", part): 2 * LAYERS,
            # The first weight's input needs no gradient, so the backward does not read that weight.
            ("all_gather", ("dp",), "backward", part): 2 * LAYERS - 1,
            ("reduce_scatter", ("dp",), "backward", part): 2 * LAYERS,
        }
    )


class TiedByView(nn.Module):
    """One table looked up, which keeps no weight, and multiplied with as a view, which keeps the weight behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.matmul(F.embedding(tokens, self.table).tanh(), self.table.t()).square().mean()


def test_a_weight_kept_as_a_view_is_gathered_again() -> None:
    tokens = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(0))
    found = collectives(TiedByView(), {"dp": 2}, {"tokens": Shard(0), "table": Shard(0)}, (tokens,), WIDE)
    assert [kind for kind, _, phase, _ in found.elements() if phase == "backward"] == ["all_gather", "reduce_scatter"]


def test_hybrid_sharded() -> None:
    """HSDP: the all-reduce over replicas runs on the reduced shard."""
    everywhere = {"replica": Shard(0), "shard": Shard(0)}
    hints = {"x": everywhere, "*weight": {"replica": Replicate(), "shard": Shard(0)}}
    found = collectives(Mlp(), {"replica": 2, "shard": 2}, hints, BIG)
    part = 1 / 2 * WEIGHT
    assert found - loss_reduction("replica", "shard", ranks=4) == Counter(
        {
            ("all_gather", ("shard",), "forward", part): 2 * LAYERS,
            ("all_gather", ("shard",), "backward", part): 2 * LAYERS - 1,
            ("reduce_scatter", ("shard",), "backward", part): 2 * LAYERS,
            ("all_reduce", ("replica",), "backward", 2 * 1 / 2 * WEIGHT / 2): 2 * LAYERS,
        }
    )


SMALL = (torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(0)),)
ACTIVATION = 2 * 4 * WIDTH * 8


def test_tensor_parallel() -> None:
    """Megatron: forward one all-reduce per layer (g), backward one per layer whose input needs a gradient (f)."""
    hints = {"ups*": "colwise", "downs*": "rowwise", "x": "replicate"}
    # Real hardware: what is not hinted stays whole, since a toy's elementwise ops are not worth splitting.
    found = collectives(Mlp(), {"tp": 4}, hints, SMALL, "h100")
    moved = 2 * 3 / 4 * ACTIVATION
    assert found == Counter(
        {("all_reduce", ("tp",), "forward", moved): LAYERS, ("all_reduce", ("tp",), "backward", moved): LAYERS - 1}
    )


def test_tensor_and_sequence_parallel() -> None:
    """Reduce-scatter and all-gather of the same bytes in place of the all-reduces."""
    split = {f"downs.{i}": Shard(1) for i in range(LAYERS)}
    hints = {"ups*": "colwise", "downs*weight": "rowwise", **split}
    found = collectives(Mlp(), {"tp": 4}, hints, SMALL)
    half = 3 / 4 * ACTIVATION
    assert found - loss_reduction("tp", ranks=4) == Counter(
        {
            ("reduce_scatter", ("tp",), "forward", half): LAYERS,
            ("all_gather", ("tp",), "backward", half): LAYERS,
            # The first layer's input is whole on every rank already, and needs no gradient.
            ("all_gather", ("tp",), "forward", half): LAYERS - 1,
            ("reduce_scatter", ("tp",), "backward", half): LAYERS - 1,
        }
    )


def test_ulysses() -> None:
    """S(seq) ↔ S(head) around attention: two all-to-alls each way per layer, q, k and v in one; weights as in DDP."""
    x = torch.randn(2, 512, 32, generator=torch.Generator().manual_seed(0))
    hints = {"x": Shard(1), "*weight": "replicate", "layers.*.out": Shard(1)}
    found = collectives(Attentions(), {"sp": 4}, hints, (x,))
    turned = 3 / 4 * x.numel() * 8 / 4
    assert found - loss_reduction("sp", ranks=4) == Counter(
        {
            **{("all_to_all", ("sp",), phase, n * turned): LAYERS for n in (3, 1) for phase in ("forward", "backward")},
            ("all_reduce", ("sp",), "backward", 2 * 3 / 4 * 32 * 32 * 8): 4 * LAYERS,
        }
    )


def test_vocabulary_parallel_embedding_and_loss() -> None:
    """Tied table S(0): masked look-up and one all-reduce; the loss reduces maxima and packed sums, never logits."""
    generator = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(0, 4096, (4, 8), generator=generator) for _ in range(2))
    hints = {"embedding.weight": Shard(0), "embedding": Replicate(), "head": Shard(2)}
    found = collectives(Lm(), {"tp": 4}, hints, (tokens, labels), WIDE)
    rows, ring = 4 * 8, 2 * 3 / 4
    assert found == Counter(
        {
            ("all_reduce", ("tp",), "forward", ring * rows * WIDTH * 8): 1,
            ("all_reduce", ("tp",), "forward", ring * rows * 8): 1,
            ("all_reduce", ("tp",), "forward", ring * rows * 8 * 2): 1,
            ("all_reduce", ("tp",), "backward", ring * rows * WIDTH * 8): 1,
        }
    )


@pytest.mark.slow
def test_data_tensor_and_sequence_parallel_together() -> None:
    """Three axes: batch on dp, features on tp, sequence on sp."""
    hints = {
        "x": {"dp": Shard(0), "sp": Shard(1), "tp": Replicate()},
        "ups*weight": {"tp": Shard(0), "dp": Replicate(), "sp": Replicate()},
        "downs*weight": {"tp": Shard(1), "dp": Replicate(), "sp": Replicate()},
        "ups.?": {"dp": Shard(0), "sp": Shard(1), "tp": Shard(2)},
        "downs.?": {"dp": Shard(0), "sp": Shard(1), "tp": Replicate()},
    }
    found = collectives(Mlp(), {"dp": 2, "tp": 2, "sp": 2}, hints, SMALL, "h100")
    activation = ACTIVATION / 4
    assert found - loss_reduction("dp", "sp", ranks=4) == Counter(
        {
            ("all_reduce", ("tp",), "forward", 2 * 1 / 2 * activation): LAYERS,
            ("all_reduce", ("tp",), "backward", 2 * 1 / 2 * activation): LAYERS - 1,
            ("all_reduce", ("dp", "sp"), "backward", 2 * 3 / 4 * WEIGHT / 2): 2 * LAYERS,
        }
    )


def test_a_wrong_collective_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: an all-reduce that forgets a rank's summand makes training differ."""
    from autoshard import runtime

    monkeypatch.setattr(runtime, "all_reduce", lambda x, axes, to="I", op="sum": x)
    with pytest.raises(AssertionError, match="DIVERGES"):
        assert_equal_training(Mlp(), {"tp": 2}, SMALL, steps=1)

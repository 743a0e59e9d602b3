"""Attention whose values are narrower or wider than its keys: kernels get one width, and no matrix of all pairs is kept."""

from __future__ import annotations

import pytest
import torch
from harness import ideal
from torch import nn
from torch.nn import functional as F

import autoshard
from autoshard.compiler import capture_graph

LENGTH = 64


class Latent(nn.Module):
    """Attention of two heads (of one of keys, if ``grouped``), as of DeepSeek-V3."""

    def __init__(self, wide: int, of_values: int, grouped: bool = False) -> None:
        super().__init__()
        self.wide, self.of_values, self.heads = wide, of_values, 1 if grouped else 2
        self.q, self.k = nn.Linear(16, 2 * wide), nn.Linear(16, self.heads * wide)
        self.v, self.o = nn.Linear(16, self.heads * of_values), nn.Linear(2 * of_values, 16)

    def forward(self, x: torch.Tensor, dropout: float = 0.0) -> torch.Tensor:
        q, k, v = self.q(x).unflatten(-1, (2, -1)), self.k(x), self.v(x)
        k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (k, v))
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, dropout_p=dropout, is_causal=True, enable_gqa=self.heads == 1
        )
        return self.o(y.transpose(1, 2).flatten(2))


def given() -> torch.Tensor:
    return torch.randn(2, LENGTH, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("model", "axes"), [((12, 8), {"dp": 2, "tp": 2}), ((4, 8, True), {"cp": 3})], ids=str)
def test_equal_to_one_device(model: tuple[int, int, bool], axes: dict[str, int]) -> None:
    report = autoshard.verify(Latent(*model).double(), ideal(axes), (given(),), steps=2)
    assert report.ok, report


def test_no_matrix_of_all_pairs_is_kept() -> None:
    sizes: list[int] = []

    def kept(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.numel())
        return x

    for dropout, pairs in ((0.0, False), (0.1, True)):  # with dropout there is no kernel, and nothing is padded
        sharded = autoshard.compile(Latent(12, 8).double(), {"dp": 2}, (given(), dropout), like="ddp")
        with torch.autograd.graph.saved_tensors_hooks(kept, lambda x: x):
            sharded(given(), dropout).sum()
        assert (max(sizes) >= 2 * LENGTH * LENGTH) == pairs
        sizes.clear()


def test_what_has_one_width_is_left() -> None:
    ops = [str(n.op) for n in capture_graph(Latent(8, 8), (given().float(),), {}, training=True).nodes]
    assert not any("pad" in op for op in ops)

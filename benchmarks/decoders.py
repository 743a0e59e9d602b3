"""Decoders that others trained and timed, by name: grouped or latent attention, windows, dense or routed feed-forward.

Sizes are those of the published configurations (``config.json`` of each model). They are for prices alone: a window is
attention within blocks of twice its length, which costs as much, and latent attention has one norm less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from planner import InFloat32
from torch import Tensor, nn
from torch.nn import functional as F

from autoshard.models.llama import Llama, RmsNorm, Rope, SwiGlu, rotate
from autoshard.runtime.operations.experts import experts_op


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder. ``hidden``: features of a dense feed-forward, or of one expert."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    head_dim: int = 128
    gated: bool = True
    tied: bool = False
    experts: int = 0
    chosen: int = 0
    shared: int = 0
    """features of the feed-forward that all tokens take beside their experts"""
    window: int = 0
    """keys that every second layer attends to; 0: all"""
    latent: tuple[int, ...] = ()
    """(ranks of queries, of keys and values) of multi-head latent attention, with 64 rotated features of 192"""
    predictions: int = 0
    """tokens predicted beyond the next one (a layer and a pass of the head each)"""

    def features(self) -> float:
        """Inputs plus outputs of the products of a layer, per token: what lower precision casts."""
        queries, keys = self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim
        if self.latent:
            q, kv = self.latent
            queries, keys = self.heads * 128, 0
            attention = 2 * self.width + 2 * (q + kv) + self.heads * (192 + 256) + queries + self.width
        else:
            attention = self.width + queries + keys + queries + self.width
        gates = 1 + self.gated

        def feed_forward(hidden: int) -> float:
            return 2 * self.width + (gates + 1) * hidden

        if not self.experts:
            return attention + feed_forward(self.hidden)
        return attention + self.chosen * feed_forward(self.hidden) + (feed_forward(self.shared) if self.shared else 0)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes, window: int) -> None:
        super().__init__()
        self.head_dim, self.window, width = sizes.head_dim, window, sizes.width
        self.q = nn.Linear(width, sizes.heads * self.head_dim, bias=False)
        self.k = nn.Linear(width, sizes.kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(width, sizes.kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(sizes.heads * self.head_dim, width, bias=False)

    def split(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (-1, self.head_dim))
        return (x.unflatten(1, (-1, 2 * self.window)).flatten(0, 1) if self.window else x).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (self.split(part(x)) for part in (self.q, self.k, self.v))
        length = q.shape[2]
        q, k = (rotate(part, cos[:length], sin[:length]) for part in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2).view(*x.shape[:2], -1))


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-AI 2024): 128 features of a head, and 64 rotated ones."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, (q, self.kv) = sizes.heads, sizes.latent
        self.q_down = nn.Linear(sizes.width, q, bias=False)
        self.q_norm, self.kv_norm = RmsNorm(q, 1e-6), RmsNorm(self.kv, 1e-6)
        self.q_up = nn.Linear(q, self.heads * 192, bias=False)
        self.kv_down = nn.Linear(sizes.width, self.kv + 64, bias=False)
        self.kv_up = nn.Linear(self.kv, self.heads * 256, bias=False)
        self.out = nn.Linear(self.heads * 128, sizes.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = self.q_up(self.q_norm(self.q_down(x))).unflatten(-1, (self.heads, 192)).transpose(1, 2)
        latent, turned = self.kv_down(x).split([self.kv, 64], -1)
        both = self.kv_up(self.kv_norm(latent)).unflatten(-1, (self.heads, 256)).transpose(1, 2)
        k, v = both.split([128, 128], -1)
        plain, q = q.split([128, 64], -1)
        turned = rotate(turned.unsqueeze(1), cos, sin).expand(-1, self.heads, -1, -1)
        q, k = torch.cat([plain, rotate(q, cos, sin)], -1), torch.cat([k, turned], -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """A router, its experts, and a feed-forward that all tokens take."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.chosen = sizes.chosen
        self.router = nn.Linear(sizes.width, sizes.experts, bias=False)
        self.first = nn.Parameter(torch.empty(sizes.experts, 2 * sizes.hidden, sizes.width))
        self.second = nn.Parameter(torch.empty(sizes.experts, sizes.width, sizes.hidden))
        self.shared = SwiGlu(sizes.width, sizes.shared) if sizes.shared else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, ids = self.router(tokens).softmax(-1).topk(self.chosen)
        y = experts_op(tokens, ids, weights, self.first, self.second, "silu", True, False).view(x.shape)
        return y + self.shared(x) if self.shared is not None else y


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, sizes: Sizes, window: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = RmsNorm(sizes.width, 1e-5), RmsNorm(sizes.width, 1e-5)
        self.attention = LatentAttention(sizes) if sizes.latent else Attention(sizes, window)
        dense = SwiGlu if sizes.gated else FeedForward
        self.feed_forward = Experts(sizes) if sizes.experts else dense(sizes.width, sizes.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.width)
        self.rope = Rope(64 if sizes.latent else sizes.head_dim, 500_000.0)
        self.blocks = nn.ModuleList(Block(sizes, sizes.window * (i % 2)) for i in range(sizes.layers))
        self.norm = RmsNorm(sizes.width, 1e-5)
        self.head = nn.Linear(sizes.width, sizes.vocab, bias=False)
        if sizes.tied:
            self.head.weight = self.embedding.weight

    forward = Llama.forward  # of the same modules, by the same names


class DecoderInFloat32(InFloat32, Decoder):
    """With the loss of float32 logits."""


def decoder(sizes: Sizes) -> Callable[[int], nn.Module]:
    return lambda layers: Decoder(replace(sizes, layers=layers))


LLAMA3 = Sizes(4096, 32, 32, 8, 14336, 128256)
GPT_OSS = Sizes(2880, 36, 64, 8, 2880, 201088, head_dim=64, experts=128, chosen=4, window=128)
QWEN3 = Sizes(2048, 48, 32, 4, 768, 151936, experts=128, chosen=8)
DEEPSEEK = Sizes(
    7168, 61, 128, 128, 2048, 129280, experts=256, chosen=8, shared=2048, latent=(1536, 512), predictions=1
)
MIXTRAL = Sizes(4096, 32, 32, 8, 14336, 32000, experts=8, chosen=2)

SIZES: dict[str, Sizes] = {
    "llama3 8b": LLAMA3,
    "llama3 70b": replace(LLAMA3, width=8192, layers=80, heads=64, hidden=28672),
    "llama3.1 405b": replace(LLAMA3, width=16384, layers=126, heads=128, hidden=53248),
    "llama2 7b": replace(LLAMA3, kv_heads=32, hidden=11008, vocab=32000),
    "llama2 13b": Sizes(5120, 40, 40, 40, 13824, 32000),
    "llama2 34b": Sizes(8192, 48, 64, 8, 22016, 32000),
    "llama2 70b": Sizes(8192, 80, 64, 8, 28672, 32000),
    "gpt3 175b": Sizes(12288, 96, 96, 96, 49152, 51200, gated=False),
    "gpt oss 20b": replace(GPT_OSS, layers=24, experts=32),
    "gpt oss 120b": GPT_OSS,
    "qwen3 30b a3b": QWEN3,
    "qwen3 235b a22b": replace(QWEN3, width=4096, layers=94, heads=64, hidden=1536),
    "deepseek v3": DEEPSEEK,
    "kimi k2": replace(DEEPSEEK, heads=64, experts=384, vocab=163840, predictions=0),
    "mixtral 8x7b": MIXTRAL,
    "mixtral 8x22b": replace(MIXTRAL, width=6144, layers=56, heads=48, hidden=16384, vocab=32768),
    "nanotron 1b": Sizes(2048, 16, 32, 32, 8192, 131072, head_dim=64, tied=True),
    "nanotron 3b": Sizes(3072, 28, 32, 32, 8192, 131072, head_dim=96, tied=True),
    "nanotron 8b": Sizes(4096, 32, 32, 32, 14336, 131072),
}

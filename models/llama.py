"""Llama style decoder: grouped-query attention, rotary positions, RMSNorm, SwiGLU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoshard.models.output import Output, token_batch, token_loss


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of a Llama. Default: Llama 3 8B."""

    vocab: int = 128256
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    kv_heads: int = 8
    layers: int = 32
    rope_base: float = 500_000.0
    eps: float = 1e-5
    tied: bool = False

    @classmethod
    def tiny(cls) -> LlamaConfig:
        return cls(vocab=128, width=64, hidden=128, heads=4, kv_heads=2, layers=2)

    @classmethod
    def small(cls) -> LlamaConfig:
        """20M parameters: the size of the step-time benchmark."""
        return cls(vocab=8192, width=384, hidden=1024, heads=6, kv_heads=6, layers=8)

    @classmethod
    def llama_1b(cls) -> LlamaConfig:
        """Llama 3.2 1B."""
        return cls(width=2048, hidden=8192, heads=32, kv_heads=8, layers=16, tied=True)

    @classmethod
    def llama_8b(cls) -> LlamaConfig:
        return cls()

    @classmethod
    def llama_70b(cls) -> LlamaConfig:
        return cls(width=8192, hidden=28672, heads=64, kv_heads=8, layers=80)


class RmsNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # in float16 its gradient would overflow
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE (Su et al. 2021): rotates pairs (i, i + dim / 2) of ``x [batch, heads, seq, dim]``."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.q = nn.Linear(width, heads * self.head_dim, bias=False)
        self.k = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(heads * self.head_dim, width, bias=False)

    def split_heads(self, x: Tensor) -> Tensor:
        """``[batch, seq, heads * head_dim]`` → ``[batch, heads, seq, head_dim]``."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = rotate(self.split_heads(self.q(x)), cos, sin)
        k = rotate(self.split_heads(self.k(x)), cos, sin)
        v = self.split_heads(self.v(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class SwiGlu(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One decoder layer around any feed-forward module."""

    def __init__(self, width: int, heads: int, kv_heads: int, eps: float, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(width, eps)
        self.attention = Attention(width, heads, kv_heads)
        self.feed_forward_norm = RmsNorm(width, eps)
        self.feed_forward = feed_forward

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Rope(nn.Module):
    """``positions [seq]`` → cosines and sines ``[seq, head_dim]``."""

    inverse_frequencies: Tensor

    def __init__(self, head_dim: int, base: float) -> None:
        super().__init__()
        # float32 at least: angles of long sequences need its digits in 16-bit models as well
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        exponents = torch.arange(0, head_dim, 2, dtype=dtype) / head_dim
        self.register_buffer("inverse_frequencies", base**-exponents, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None] * self.inverse_frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


class Llama(nn.Module):
    """``tokens [batch, seq]`` → ``logits [batch, seq, vocab]``, and a loss if labels are given."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = c = config
        self.embedding = nn.Embedding(c.vocab, c.width)
        self.rope = Rope(c.width // c.heads, c.rope_base)
        self.blocks = nn.ModuleList(
            Block(c.width, c.heads, c.kv_heads, c.eps, SwiGlu(c.width, c.hidden)) for _ in range(c.layers)
        )
        self.norm = RmsNorm(c.width, c.eps)
        self.head = nn.Linear(c.width, c.vocab, bias=False)
        if c.tied:
            self.head.weight = self.embedding.weight
        self.apply(self._init)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Output:
        x = self.embedding(tokens)
        cos, sin = (t.to(x.dtype) for t in self.rope(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.blocks:
            x = block(x, cos, sin)
        return token_loss(self.head(self.norm(x)), labels)


def example_inputs(config: LlamaConfig, batch: int = 2, seq: int = 16) -> tuple[tuple[Tensor], dict[str, Tensor]]:
    """``tokens`` and ``labels``, both ``[batch, seq]``."""
    return token_batch(config.vocab, batch, seq)


SIZES: dict[str, Callable[[], LlamaConfig]] = {
    "tiny": LlamaConfig.tiny,
    "small": LlamaConfig.small,
    "1b": LlamaConfig.llama_1b,
    "8b": LlamaConfig.llama_8b,
    "70b": LlamaConfig.llama_70b,
}

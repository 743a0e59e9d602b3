"""GPT-2 style decoder: learned positions, pre-norm blocks, dropout, tied embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoshard.models.output import Output, token_batch, token_loss


@dataclass(frozen=True, slots=True)
class GptConfig:
    """Sizes of a GPT-2. ``positions`` is the longest sequence."""

    vocab: int = 50257
    positions: int = 1024
    width: int = 768
    heads: int = 12
    layers: int = 12
    dropout: float = 0.1

    @classmethod
    def tiny(cls) -> GptConfig:
        return cls(vocab=128, positions=32, width=64, heads=4, layers=2)

    @classmethod
    def small(cls) -> GptConfig:
        """GPT-2, 124M parameters."""
        return cls()

    @classmethod
    def medium(cls) -> GptConfig:
        """GPT-2 medium, 355M parameters."""
        return cls(width=1024, heads=16, layers=24)

    @classmethod
    def xl(cls) -> GptConfig:
        """GPT-2 XL, 1.5B parameters."""
        return cls(width=1600, heads=25, layers=48)


class Attention(nn.Module):
    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.head_dim = config.width // config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        # Heads outermost, (h q k v): sharding the rows of the projection shards by heads.
        qkv = self.qkv(x).view(batch, seq, self.heads, 3 * self.head_dim).transpose(1, 2)
        q, k, v = qkv.split(self.head_dim, dim=-1)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, width))


class Block(nn.Module):
    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh")))


class Gpt(nn.Module):
    """``tokens [batch, seq]`` → ``logits [batch, seq, vocab]``, and a loss if labels are given."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab, config.width)
        self.position_embedding = nn.Embedding(config.positions, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.head.weight = self.token_embedding.weight
        self.apply(self._init)
        # Each block adds to the residual stream twice (Radford et al. 2019, section 2.3).
        for name, p in self.named_parameters():
            if name.endswith(("attention.out.weight", "down.weight")):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.layers))

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Output:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        return token_loss(self.head(self.norm(x)), labels)


def example_inputs(config: GptConfig, batch: int = 2, seq: int = 16) -> tuple[tuple[Tensor], dict[str, Tensor]]:
    """``tokens`` and ``labels``, both ``[batch, seq]``."""
    return token_batch(config.vocab, batch, seq)


SIZES: dict[str, Callable[[], GptConfig]] = {
    "tiny": GptConfig.tiny,
    "small": GptConfig.small,
    "medium": GptConfig.medium,
    "xl": GptConfig.xl,
}

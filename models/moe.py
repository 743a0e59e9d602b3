"""Mixtral style mixture of experts: a Llama with a routed sum of experts, densely dispatched.

Every expert computes every token, and the gate weighs results (zero outside the top k). In eager
that costs experts / k times the FLOPs of a sparse dispatch; capture turns it into one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoshard.models.llama import Block, RmsNorm, Rope
from autoshard.models.output import Output, token_batch, token_loss


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Sizes of a Mixtral. Default: Mixtral 8x7B."""

    vocab: int = 32000
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    kv_heads: int = 8
    layers: int = 32
    experts: int = 8
    top_k: int = 2
    rope_base: float = 1_000_000.0
    eps: float = 1e-5

    @classmethod
    def tiny(cls) -> MoeConfig:
        return cls(vocab=128, width=64, hidden=64, heads=4, kv_heads=2, layers=2, experts=4)

    @classmethod
    def mixtral_8x7b(cls) -> MoeConfig:
        return cls()


class Experts(nn.Module):
    """SwiGLU experts with stacked weights: ``x [tokens, width]`` → ``[experts, tokens, width]``."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, width, hidden))
        self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.einsum("td,edf->etf", x, self.gate)
        up = torch.einsum("td,edf->etf", x, self.up)
        return torch.bmm(F.silu(gate) * up, self.down)


class MoeFeedForward(nn.Module):
    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.experts = Experts(config.experts, config.width, config.hidden)

    def gates(self, x: Tensor) -> Tensor:
        """``x [tokens, width]`` → ``[tokens, experts]``: softmax over the top k, else zero."""
        logits = self.router(x)
        top, chosen = logits.topk(self.top_k, dim=-1)
        return torch.zeros_like(logits).scatter(-1, chosen, top.softmax(-1))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        y = torch.einsum("etd,te->td", self.experts(tokens), self.gates(tokens))
        return y.view(x.shape)


class Moe(nn.Module):
    """``tokens [batch, seq]`` → ``logits [batch, seq, vocab]``, and a loss if labels are given."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.config = c = config
        self.embedding = nn.Embedding(c.vocab, c.width)
        self.rope = Rope(c.width // c.heads, c.rope_base)
        self.blocks = nn.ModuleList(
            Block(c.width, c.heads, c.kv_heads, c.eps, MoeFeedForward(c)) for _ in range(c.layers)
        )
        self.norm = RmsNorm(c.width, c.eps)
        self.head = nn.Linear(c.width, c.vocab, bias=False)
        self.apply(self._init)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, Experts):
            for weight in module.parameters():
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Output:
        x = self.embedding(tokens)
        cos, sin = (t.to(x.dtype) for t in self.rope(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.blocks:
            x = block(x, cos, sin)
        return token_loss(self.head(self.norm(x)), labels)


def example_inputs(config: MoeConfig, batch: int = 2, seq: int = 16) -> tuple[tuple[Tensor], dict[str, Tensor]]:
    """``tokens`` and ``labels``, both ``[batch, seq]``."""
    return token_batch(config.vocab, batch, seq)


SIZES: dict[str, Callable[[], MoeConfig]] = {
    "tiny": MoeConfig.tiny,
    "8x7b": MoeConfig.mixtral_8x7b,
}

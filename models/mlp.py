"""Blocks of two linear layers: the smallest model with tensor parallelism in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class MlpConfig:
    """``layers`` blocks, each ``width`` → ``hidden`` → ``width``."""

    width: int = 1024
    hidden: int = 4096
    layers: int = 8
    bias: bool = True

    @classmethod
    def tiny(cls) -> MlpConfig:
        return cls(width=16, hidden=64, layers=2)

    @classmethod
    def base(cls) -> MlpConfig:
        return cls()

    @classmethod
    def large(cls) -> MlpConfig:
        return cls(width=8192, hidden=32768, layers=16)


class Block(nn.Module):
    def __init__(self, config: MlpConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.hidden, bias=config.bias)
        self.down = nn.Linear(config.hidden, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Mlp(nn.Module):
    """``x [..., width]`` → ``[..., width]``. Initialised as :class:`torch.nn.Linear` does it."""

    def __init__(self, config: MlpConfig) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def example_inputs(config: MlpConfig, batch: int = 2, seq: int = 16) -> tuple[tuple[Tensor], dict[str, Tensor]]:
    """``x [batch, seq, width]``."""
    generator = torch.Generator("cpu").manual_seed(0)
    return (torch.randn(batch, seq, config.width, generator=generator, device="cpu"),), {}


SIZES: dict[str, Callable[[], MlpConfig]] = {
    "tiny": MlpConfig.tiny,
    "base": MlpConfig.base,
    "large": MlpConfig.large,
}

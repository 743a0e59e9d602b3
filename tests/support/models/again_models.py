"""Models whose parts are made again in the backward, in float64, with their arguments."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoshard.models import Gpt, GptConfig, Llama, LlamaConfig, Mlp, MlpConfig, Moe, MoeConfig, Vit, VitConfig

Case = tuple[nn.Module, tuple[torch.Tensor, ...]]


class Normed(nn.Module):
    """Residual blocks of a convolution and batch norm, which counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.GELU(), nn.Conv2d(6, 6, 1))
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Smooth(nn.Module):
    """Blocks with dropout that have second derivatives. ``reentrant``: which kind of checkpoint each is in, if any."""

    def __init__(self, reentrant: bool | None = None, layers: int = 2) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 16))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(16), nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 16), nn.Dropout(0.4)
            )
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = x + (block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant))
        return x.square().mean()


def tokens() -> tuple[torch.Tensor, ...]:
    """[6, 16] token ids and labels."""
    drawn = torch.Generator().manual_seed(0)
    x, y = (torch.randint(0, 128, (6, 16), generator=drawn) for _ in range(2))
    return x, y


def made(name: str) -> Case:
    torch.manual_seed(0)
    match name:
        case "normed":
            return Normed().double(), (torch.randn(6, 6, 8, 8).double(),)
        case "smooth":
            return Smooth().double(), (torch.randn(6, 4, 16).double(),)
        case "mlp":
            return Mlp(MlpConfig.tiny()).double(), (torch.randn(6, 4, 16).double(),)
        case "vit":
            return Vit(VitConfig.tiny()).double(), (torch.randn(6, 3, 16, 16).double(), torch.randint(12, (6,)))
    kinds: dict[str, Callable[[], nn.Module]] = {
        "gpt": lambda: Gpt(GptConfig.tiny()),
        "llama": lambda: Llama(LlamaConfig.tiny()),
        "moe": lambda: Moe(MoeConfig.tiny()),
    }
    return kinds[name]().double(), tokens()

"""Models of golden files. Their line numbers stand in those files."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Smooth(nn.Module):
    """Two convolutions over images, which are cut by height."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(5, 3, 5, padding=2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        edges = F.gelu(self.first(images))
        smooth = images + self.second(edges)
        return smooth.square().mean()


class Sequence(nn.Module):
    """Causal attention over a sequence, which is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        heads = self.mix(tokens).unflatten(-1, (2, 12)).transpose(1, 2)
        queries, keys, values = heads.chunk(3, -1)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2)).square().mean()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Deep(nn.Module):
    """Equal layers in pipeline stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, target)

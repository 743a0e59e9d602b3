"""The models on whose steps plans are compared here: of a size whose steps two cores make in a tenth of a second or so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard import models
from autoshard.models import DlrmConfig, GptConfig, LlamaConfig, MoeConfig, VitConfig, dlrm, gpt, llama, moe, vit
from autoshard.models import Reference as Model


class Wide(nn.Module):
    """A wide MLP with a small batch: its weights are what is large."""

    def __init__(self, width: int = 2048, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


class Convolutions(nn.Module):
    """Its activations are what is large."""

    def __init__(self, channels: int = 48) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 if i == 0 else channels, channels, 3, padding=1) for i in range(4))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x.mean((2, 3)))


def _of(family: Any, module: Callable[[Any], nn.Module], config: Any, batch: int, seq: int = 0) -> Model:
    def inputs(batch: int = batch, seq: int = seq) -> Any:
        return family.example_inputs(config, batch, seq)

    return Model(partial(module, config), inputs)


def _random(model: Callable[[], nn.Module], *shape: int) -> Model:
    def inputs(batch: int = shape[0], seq: int = 0) -> Any:
        generator = torch.Generator().manual_seed(0)
        return (torch.rand(batch, *shape[1:], generator=generator),), {}

    return Model(model, inputs)


SIX: dict[str, Model] = {
    "llama:middle": _of(llama, models.Llama, LlamaConfig(4096, 256, 768, 4, 4, 6), 4, 128),
    "wide:middle": _random(Wide, 16, 2048),
    "convolutions:middle": _random(Convolutions, 16, 3, 32, 32),
    "dlrm:middle": _of(
        dlrm, models.Dlrm, DlrmConfig(rows=(60000, 20000, 8000, 2000, 500, 100), bottom=(256, 64), top=(512, 256)), 512
    ),
    "moe:middle": _of(moe, models.Moe, MoeConfig(2048, 128, 256, 4, 4, 3), 4, 64),
    "vit:middle": _of(vit, models.Vit, VitConfig(64, 8, 3, 100, 256, 4, 6), 8),
}
"""Llama, a wide MLP with a small batch, a convolutional net, a recommender, a mixture of experts, a vision transformer"""

MORE: dict[str, Model] = {"gpt:middle": _of(gpt, models.Gpt, GptConfig(8192, 256, 384, 6, 8), 4, 128)}


def get(name: str) -> Model:
    """A model of this page, or a reference model; its own sizes of inputs are the defaults."""
    return SIX.get(name) or MORE.get(name) or models.get(name)

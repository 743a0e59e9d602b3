"""Vision transformer (Dosovitskiy et al. 2021): patch convolution, class token, pre-norm blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoshard.models.output import Output


@dataclass(frozen=True, slots=True)
class VitConfig:
    """Sizes of a ViT on square images. Default: ViT-B/16."""

    image: int = 224
    patch: int = 16
    channels: int = 3
    classes: int = 1000
    width: int = 768
    heads: int = 12
    layers: int = 12

    @classmethod
    def tiny(cls) -> VitConfig:
        return cls(image=16, patch=4, classes=12, width=64, heads=4, layers=2)

    @classmethod
    def base(cls) -> VitConfig:
        return cls()

    @classmethod
    def large(cls) -> VitConfig:
        """ViT-L/16."""
        return cls(width=1024, heads=16, layers=24)

    @classmethod
    def huge(cls) -> VitConfig:
        """ViT-H/14."""
        return cls(patch=14, width=1280, heads=16, layers=32)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Vit(nn.Module):
    """``images [batch, channels, image, image]`` → ``logits [batch, classes]``.

    ``labels [batch]``: class numbers; the loss is cross entropy.
    """

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.config = c = config
        self.patches = nn.Conv2d(c.channels, c.width, kernel_size=c.patch, stride=c.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, c.width))
        self.positions = nn.Parameter(torch.empty(1, (c.image // c.patch) ** 2 + 1, c.width))
        self.blocks = nn.ModuleList(Block(c.width, c.heads) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.width)
        self.head = nn.Linear(c.width, c.classes)
        nn.init.trunc_normal_(self.positions, std=0.02)
        nn.init.normal_(self.class_token, std=1e-6)
        self.apply(self._init)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Output:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)[:, 0])
        return Output(logits) if labels is None else Output(logits, F.cross_entropy(logits, labels))


def example_inputs(config: VitConfig, batch: int = 4, seq: int = 0) -> tuple[tuple[Tensor], dict[str, Tensor]]:
    """``images`` and ``labels``; ``seq`` is ignored: it is the number of patches."""
    generator = torch.Generator("cpu").manual_seed(0)
    shape = (batch, config.channels, config.image, config.image)
    labels = torch.randint(config.classes, (batch,), generator=generator, device="cpu")
    return (torch.randn(shape, generator=generator, device="cpu"),), {"labels": labels}


SIZES: dict[str, Callable[[], VitConfig]] = {
    "tiny": VitConfig.tiny,
    "base": VitConfig.base,
    "large": VitConfig.large,
    "huge": VitConfig.huge,
}

"""Models of torch.nn's own attention: of nn.MultiheadAttention, and of the layers that are built of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, BATCH, LENGTH = 16, 2, 8, 6


class Attentive(nn.Module):
    """Two layers and a mean of squares. ``first``: whether the batch is the first dim, before the positions."""

    def __init__(self, make: Callable[..., nn.Module], first: bool, **options: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = first
        self.layers = nn.ModuleList(make(WIDTH, HEADS, batch_first=first, **options) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """``hidden`` [batch, length]: which keys are padding."""
        penalties: torch.Tensor | float = 0.0
        for layer in self.layers:
            x, penalty = self.through(layer, x, hidden)
            penalties = penalties + penalty
        return F.mse_loss(self.head(x), target) + penalties

    def through(
        self, layer: nn.Module, x: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        raise NotImplementedError

    def causal(self, x: torch.Tensor) -> torch.Tensor:
        return nn.Transformer.generate_square_subsequent_mask(x.shape[1 if self.first else 0], dtype=x.dtype)


class Padded(Attentive):
    """Keys are hidden by a mask, and by their position."""

    def __init__(self, first: bool) -> None:
        super().__init__(nn.TransformerEncoderLayer, first, dim_feedforward=24, dropout=0.1)

    def through(self, layer: nn.Module, x: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, float]:
        return layer(x, self.causal(x), F._canonical_mask(hidden, "", None, "", x.dtype)), 0.0


class Causal(Attentive):
    def __init__(self, first: bool) -> None:
        super().__init__(nn.TransformerEncoderLayer, first, dim_feedforward=24, dropout=0.1, norm_first=True)

    def through(self, layer: nn.Module, x: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, float]:
        return layer(x, self.causal(x), is_causal=True), 0.0


class Decoding(Attentive):
    """Layers that also look at their input, as if another model had made it."""

    def __init__(self, first: bool) -> None:
        super().__init__(nn.TransformerDecoderLayer, first, dim_feedforward=24, dropout=0.1)

    def through(self, layer: nn.Module, x: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, float]:
        masks = {"tgt_mask": self.causal(x), "tgt_is_causal": True, "memory_key_padding_mask": hidden}
        return layer(x, 2 * x, **masks), 0.0


class Weighing(Attentive):
    """nn.MultiheadAttention as it is called without options: it makes its weights, which a penalty reads."""

    def __init__(self, first: bool) -> None:
        super().__init__(nn.MultiheadAttention, first, dropout=0.1)

    def through(self, layer: nn.Module, x: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, weights = layer(x, x, x, key_padding_mask=hidden)
        return x + y, weights.square().mean()


class Seq2Seq(nn.Module):
    """nn.Transformer as a whole."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.net = first, nn.Transformer(WIDTH, HEADS, 1, 1, 24, batch_first=first)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1 if self.first else 0], dtype=x.dtype)
        seen = self.net(x, x.flip(-1), tgt_mask=mask, src_key_padding_mask=hidden, memory_key_padding_mask=hidden)
        return F.mse_loss(self.head(seen), target)


MODELS: dict[str, Callable[[bool], nn.Module]] = {
    "padded": Padded, "causal": Causal, "decoding": Decoding, "weighing": Weighing, "seq2seq": Seq2Seq,
}  # fmt: skip


def made(name: str, first: bool) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model in float64, and its arguments: every second sample is padded, each otherwise."""
    random = torch.Generator().manual_seed(1)
    x, target = (torch.randn(BATCH, LENGTH, n, generator=random).double() for n in (WIDTH, 4))
    hidden = torch.arange(LENGTH) >= torch.tensor([LENGTH, 1, LENGTH, 3, LENGTH, 5, LENGTH, 2]).unsqueeze(1)
    args = (
        (x, hidden, target) if first else (x.transpose(0, 1).contiguous(), hidden, target.transpose(0, 1).contiguous())
    )
    return MODELS[name](first).double(), args

"""Masks of attention that are functions of positions, and attention under them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from autoshard.runtime.attention.ring_geometry import ALL_KEYS, CAUSAL, Band

S = 12
Mask = Callable[[torch.Tensor], torch.Tensor]


def row() -> torch.Tensor:
    return torch.arange(S)[:, None]


def column() -> torch.Tensor:
    return torch.arange(S)[None, :]


def minus(seen: torch.Tensor, by: float = -torch.inf) -> torch.Tensor:
    return torch.zeros(S, S, dtype=torch.float64).masked_fill(~seen, by)


def _document(x: torch.Tensor) -> torch.Tensor:
    """Numbers of documents [b, S]."""
    return (x[:, 0, :, 0] > 0.5).long().cumsum(-1)


def _alike(documents: torch.Tensor, dim: int) -> torch.Tensor:
    """Whether a row and a column are of one document; the dim of columns is the last, that of rows comes in."""
    return documents.squeeze(dim - 1).unsqueeze(-1) == documents


MASKS: dict[str, tuple[Mask, Band | None]] = {
    "tril": (lambda x: torch.tril(torch.ones(S, S, dtype=torch.bool)), CAUSAL),
    "triu of -inf": (lambda x: torch.full((S, S), -torch.inf, dtype=x.dtype).triu(1), CAUSAL),
    "least value added": (lambda x: minus(column() <= row(), torch.finfo(x.dtype).min), CAUSAL),
    "where": (lambda x: torch.where(column() > row(), -torch.inf, 0.0).to(x.dtype)[None, None], CAUSAL),
    "turned round": (lambda x: ~(column().t() < row().t()).transpose(0, 1).logical_not(), Band(None, -1)),
    "difference": (lambda x: (row() - column()) >= 0, CAUSAL),
    "of a float": (lambda x: torch.ones(S, S).tril().eq(1), CAUSAL),
    "not above": (lambda x: ~torch.ones(S, S, dtype=torch.bool).triu(1), CAUSAL),
    "window": (lambda x: (column() <= row()) & (column() > row() - 4), Band(3, 0)),
    "window of both sides": (lambda x: ((column() - row()) <= 2) & ((row() - column()) < 4), Band(3, 2)),
    "window of two triangles": (
        lambda x: torch.ones(S, S, dtype=torch.bool).tril() & ~torch.ones(S, S, dtype=torch.bool).tril(-5), Band(4, 0)
    ),
    "window that sees all": (lambda x: (row() - column()) < S, ALL_KEYS),
    "window by distance": (lambda x: (row() - column()).abs() <= 2, Band(2, 2)),
    "cut from a longer one": (lambda x: torch.ones(20, 20, dtype=torch.bool).tril()[4 : 4 + S, 4 : 4 + S], CAUSAL),
    "later rows": (lambda x: torch.ones(20, S, dtype=torch.bool).tril()[2 : 2 + S], Band(None, 2)),
    "documents": (lambda x: (column() <= row()) & (x[:, 0, :, 0] > 0)[:, None, None, :], CAUSAL),
    "packed": (lambda x: _alike(_document(x)[:, None], 2).logical_and(column() <= row())[:, None], CAUSAL),
    "packed of both sides": (lambda x: _alike(_document(x)[:, None, None], 3), ALL_KEYS),
    "packed alike": (lambda x: (column() <= row()) & _alike(_document(x)[0, None], 1), CAUSAL),
    "packed otherwise": (lambda x: _alike(_document(x)[:, None], 2).logical_or(column() == 0)[:, None], None),
    "ALiBi": (lambda x: (column() - row()).to(x.dtype) * 0.1, None),
    "ALiBi, causal": (lambda x: ((column() - row()).to(x.dtype) * 0.1).masked_fill(column() > row(), -torch.inf), None),
    "little added": (lambda x: minus(column() <= row(), -3.0), None),
    "rows that see none": (lambda x: minus(column() < row(), torch.finfo(x.dtype).min), None),
    "stripes": (lambda x: (column() - row()).remainder(2) == 0, None),
    "of the data": (lambda x: x[0, 0, :, 0] > x[0, 0, :, 1, None], None),
}  # fmt: skip


class Masked(nn.Module):
    def __init__(self, mask: Mask, kv_heads: int = 2) -> None:
        super().__init__()
        self.mask, self.kv_heads = mask, kv_heads
        self.qkv = nn.Linear(8, 8 + 8 * kv_heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            y.unflatten(-1, (-1, 4)).transpose(1, 2)
            for y in self.qkv(x).split([8, 4 * self.kv_heads, 4 * self.kv_heads], -1)
        )
        return F.scaled_dot_product_attention(q, k, v, self.mask(x.unsqueeze(1)), enable_gqa=True).square().mean()

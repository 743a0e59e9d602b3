"""Recommenders in small: DeepFM, a deep and cross network, and two towers whose bags are jagged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Call = tuple[nn.Module, tuple[Any, ...]]
ROWS = (40, 17, 24, 9, 30)


class DeepFM(nn.Module):
    """Guo et al. 2017: first-order weights, pairs through sums of squares, and an MLP over one table per field."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.linear = nn.ModuleList(nn.Embedding(n, 1, sparse=sparse) for n in ROWS)
        self.tables = nn.ModuleList(nn.Embedding(n, 8, sparse=sparse) for n in ROWS)
        self.deep = nn.Sequential(nn.Linear(8 * len(ROWS), 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, fields: Tensor, clicks: Tensor) -> Tensor:
        first = sum(table(fields[:, i]) for i, table in enumerate(self.linear))
        rows = torch.stack([table(fields[:, i]) for i, table in enumerate(self.tables)], 1)
        pairs = 0.5 * (rows.sum(1).square() - rows.square().sum(1)).sum(1, keepdim=True)
        logits = (first + pairs + self.deep(rows.flatten(1))).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, clicks)


class DCN(nn.Module):
    """Wang et al. 2021: cross layers beside an MLP; tables of several widths, one of which has a padding row."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        widths = (8, 8, 4, 8, 4)
        pads = (None, 0, None, None, 3)
        self.tables = nn.ModuleList(
            nn.Embedding(n, d, padding_idx=p, sparse=sparse) for n, d, p in zip(ROWS, widths, pads, strict=True)
        )
        width = sum(widths)
        self.cross = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.deep = nn.Sequential(nn.Linear(width, 16), nn.ReLU())
        self.head = nn.Linear(width + 16, 1)

    def forward(self, fields: Tensor, clicks: Tensor) -> Tensor:
        first = torch.cat([table(fields[:, i]) for i, table in enumerate(self.tables)], 1)
        x = first
        for layer in self.cross:
            x = first * layer(x) + x
        logits = self.head(torch.cat([x, self.deep(first)], 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, clicks)


class Towers(nn.Module):
    """Covington et al. 2016 in two towers: what a user saw (jagged, weighted), liked (mean), and the item's own bags."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.seen = nn.EmbeddingBag(40, 8, mode="sum", sparse=sparse, include_last_offset=True)
        self.liked = nn.EmbeddingBag(17, 8, mode="mean", sparse=sparse)
        self.tags = nn.EmbeddingBag(24, 8, mode="max")
        self.user, self.item = nn.Linear(16, 8), nn.Linear(16, 8)
        self.items = nn.Embedding(30, 8, sparse=sparse)

    def forward(self, seen: Tensor, ends: Tensor, share: Tensor, liked: Tensor, starts: Tensor, item: Tensor) -> Tensor:
        user = torch.cat([self.seen(seen, ends, share.softmax(0)), self.liked(liked, starts)], 1)
        product = torch.cat([self.tags(liked % 24, starts), self.items(item)], 1)
        scores = self.user(user).relu() @ self.item(product).relu().T
        return F.cross_entropy(scores, torch.arange(len(item)))


class Looked(nn.Module):
    """Tables with sparse gradients, and equal layers over what is looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, 8, sparse=True) for n in ROWS[:4])
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4))
        self.head = nn.Linear(32, 1)

    def forward(self, fields: Tensor, clicks: Tensor) -> Tensor:
        x = torch.cat([table(fields[:, i]) for i, table in enumerate(self.tables)], 1)
        for layer in self.layers:
            x = x + layer(x)
        return F.binary_cross_entropy_with_logits(self.head(x).squeeze(1), clicks)


def fields(kind: type[nn.Module], sparse: bool, batch: int) -> Call:
    torch.manual_seed(0)
    columns = torch.stack([torch.randint(n, (batch,)) for n in ROWS], 1)
    return kind(sparse).double(), (columns, torch.randint(2, (batch,)).double())


def towers(sparse: bool, batch: int = 6) -> Call:
    torch.manual_seed(0)
    ends = torch.tensor([0, 2, 2, 5, 9, 10, 14, 15, 19])[: batch + 1]
    starts = torch.tensor([0, 3, 4, 4, 8, 11, 12, 13])[:batch]
    seen, liked = torch.randint(40, (int(ends[-1]),)), torch.randint(17, (14,))
    share = torch.randn(len(seen), dtype=torch.float64).requires_grad_()
    return Towers(sparse).double(), (seen, ends, share, liked, starts, torch.randint(30, (batch,)))

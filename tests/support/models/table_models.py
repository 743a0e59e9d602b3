"""Recommenders in small: DeepFM, a deep and cross network, and two towers whose bags are jagged."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from harness import ideal
from torch import Tensor, nn
from torch.nn import functional as F

import autoshard
import autoshard.models

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


def optimizers(module: nn.Module, tables: str | None) -> list[torch.optim.Optimizer]:
    """``tables``: of tables; all others, or all, are trained by AdamW."""
    apart = {n: p for n, p in module.named_parameters() if tables and p.grad is not None and p.grad.is_sparse}
    rest = [p for n, p in module.named_parameters() if n not in apart]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=1e-2, eps=1e-6)]
    return [*found, getattr(torch.optim, tables or "")(apart.values(), lr=0.1)] if apart else found


def loss_of(module: nn.Module, args: Sequence[Any]) -> torch.Tensor:
    out = module(*args)
    return out if isinstance(out, torch.Tensor) else out.loss


def trains_alike(
    case: Call, mesh: dict[str, int], tables: str | None = None, **options: Any
) -> autoshard.ShardedModule:
    """Losses, gradients and whether they are sparse, and weights after three steps, against the unsharded model."""
    model, args = case
    reference, sharded = copy.deepcopy(model), autoshard.compile(model, ideal(mesh), args, **options)
    both = (reference, sharded)
    steps: list[list[torch.optim.Optimizer]] = []
    for _ in range(3):
        given = [[x.detach().clone().requires_grad_(x.requires_grad) for x in args] for _ in both]
        losses = [loss_of(module, own) for module, own in zip(both, given, strict=True)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-9, atol=1e-12)
        for module, loss in zip(both, losses, strict=True):
            module.zero_grad()
            loss.backward()
        for name, p in sharded.named_parameters():
            expected = reference.get_parameter(name).grad
            assert p.grad.is_sparse == expected.is_sparse, name
            torch.testing.assert_close(p.grad.to_dense(), expected.to_dense(), rtol=1e-9, atol=1e-12, msg=name)
        for x, y in zip(*given, strict=True):
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-9, atol=1e-12)
        steps = steps or [optimizers(module, tables) for module in both]
        for optimizer in (o for found in steps for o in found):
            optimizer.step()
        state = sharded.full_state_dict()
        for name, x in reference.state_dict().items():
            torch.testing.assert_close(state[name], x, rtol=1e-9, atol=1e-12, msg=name)
    return sharded


def owners(sharded: autoshard.ShardedModule) -> dict[str, str]:
    return {n: str(x) for n, x in sharded.plan.layouts.items() if x.owner and sharded.plan.kinds[n] == "parameter"}


class Regular(nn.Module):
    """Bags of one length, as ``nn.EmbeddingBag`` makes of indices [b, k]."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(n, 4, mode=m).double() for n, m in ((9, "sum"), (5, "mean"), (7, "max"))
        )

    def forward(self, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (torch.cat([table(ids) for table in self.tables], -1) - y).square().mean()


class AsManyAsGiven(nn.Module):
    """Tables of which those are read for which there are indices."""

    def __init__(self) -> None:
        super().__init__()
        self.tables, self.top = nn.ModuleList(nn.Embedding(n, 4) for n in (9, 7)), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for column, table in zip(ids.unbind(1), self.tables, strict=False):
            x = x + table(column)
        found: torch.Tensor = self.top(x).square().mean()
        return found

"""What a model does not have of a named strategy, or has too little of for so many ranks, is told in ``plan.notes``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import assert_equal_training
from torch import nn
from torch.nn import functional as F

import autoshard

WIDTH = 16


class Attention(nn.Module):
    """Over [batch, seq, width]; projections in one weight, as ``nn.MultiheadAttention`` has them."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1)).unbind(-2)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2)).square().mean()


class Layer(nn.Module):
    """An encoder and a decoder of torch, of one layer each."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.both = nn.Transformer(WIDTH, heads, 1, 1, 32, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.both(x, y)
        return found.square().mean()


def given(*lengths: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, n, WIDTH, generator=torch.Generator().manual_seed(n)) for n in lengths)


def notes(model: nn.Module, like: Any, ranks: int, *args: Any) -> list[str]:
    """What is told of the named strategy, without its name and the axis."""
    plan = autoshard.plan(model, {"x": ranks}, args, like=like)
    begin = f"like={like!r} on x: "
    return [note.removeprefix(begin) for note in plan.notes if note.startswith(begin)]


POSITIONS = "a sequence of 3 positions cannot be sharded over 4 ranks, so every rank has all of it"
HEADS = "attention of 2 heads cannot be sharded over 4 ranks, so every rank does all of it"


@pytest.mark.slow_cases("*-lengths[123589]*-told*")
@pytest.mark.parametrize(
    ("like", "heads", "lengths", "told"),
    [
        ("ring", 4, (3,), [POSITIONS]),
        ("ring", 4, (4,), []),
        ("ring", 2, (8,), []),
        ("ulysses", 4, (3,), [POSITIONS]),
        ("ulysses", 4, (4,), []),
        ("ulysses", 2, (8,), [HEADS]),
        ("ulysses", 2, (3,), [f"{POSITIONS}; {HEADS}"]),
        (
            "ring",
            4,
            (1,),
            ["no dim of the activations is a sequence of 2 or more positions, so all layouts are searched"],
        ),
        ("ring", 4, (7, 3), [POSITIONS]),
        ("ulysses", 4, (7, 3), [POSITIONS]),
        ("ulysses", 4, (3, 8), [POSITIONS]),
    ],
)
def test_too_few_positions_or_heads(like: str, heads: int, lengths: tuple[int, ...], told: list[str]) -> None:
    """Of one sequence, or two; what can be cut is, all the same, and the numbers are those of one device."""
    model, args = (Attention if len(lengths) == 1 else Layer)(heads), given(*lengths)
    assert notes(model, like, 4, *args) == told
    assert_equal_training(model, {"x": 4}, args, like=like, hardware="h100", steps=1, share=4.1)


def test_a_ring_without_attention() -> None:
    """There are no heads to cut, either."""
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
    assert notes(model, "ring", 2, *given(6)) == ["no operation is known as attention, so no ring is used"]


class Tables(nn.Module):
    """Tables that are looked up, and one that a penalty reads as well."""

    def __init__(self, rows: tuple[int, ...], penalty: bool = False, **options: Any) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, 8, mode="sum", **options) for n in rows)
        self.penalty, self.top = penalty, nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.stack([table(ids) for table in self.tables]).sum(0)
        loss: torch.Tensor = self.top(x).square().mean()
        return loss + self.tables[0].weight.square().mean() if self.penalty else loss


READ = (
    "tables.0.weight cannot be placed so, because aten.square.default in (root) reads it as well, and is not a look-up"
)


@pytest.mark.parametrize(
    ("model", "like", "told"),
    [
        (
            Tables((9,)),
            "table-wise",
            "tables.0.weight cannot be placed so, because two tables are needed, and there is only one; ddp is planned instead",
        ),
        (Tables((9, 8, 7), penalty=True), "table-wise", READ),
        (Tables((9, 8, 7), penalty=True), "row-wise", READ),
        (
            Tables((9, 8), scale_grad_by_freq=True),
            "row-wise",
            "tables.0.weight, tables.1.weight cannot be placed so, because gradients are scaled by the frequency of "
            "a row in the full batch; ddp is planned instead",
        ),
        (
            Tables((9, 8, 1)),
            "row-wise",
            "tables.2.weight cannot be placed so, because dim 0, of length 1, leaves some of 2 ranks without a shard",
        ),
        (nn.Linear(3, 3), "table-wise", "no parameter is a table, so ddp is planned"),
    ],
)
def test_tables_that_cannot_lie_as_asked(model: nn.Module, like: str, told: str) -> None:
    """Said in the notes, and where one asks for the table; others lie as they are asked to."""
    ids = torch.randn(4, 3) if isinstance(model, nn.Linear) else torch.zeros(8, 3, dtype=torch.long)
    assert notes(model, like, 2, ids) == [told]
    plan = autoshard.plan(model, {"x": 2}, (ids,), like=like)
    tables = {n: str(x) for n, x in plan.layouts.items() if n.startswith("tables.")}
    for name, layout in tables.items():
        left = name in told
        assert (f"  like={like!r} on x: {told}" in plan.explain(name).splitlines()) == left
        assert layout.startswith("I" if left else "O" if like == "table-wise" else "S(0)")
    if tables and "tables.0.weight" in told:
        assert told in plan.explain("tables")


def test_many_tables_are_counted() -> None:
    (told,) = notes(Tables((9,) * 12, scale_grad_by_freq=True), "row-wise", 2, torch.zeros(8, 3, dtype=torch.long))
    assert told.count(".weight") == 8
    assert " and 4 more cannot be placed so" in told

"""Look-ups in tables of one owner each, as text: those that go together."""

from __future__ import annotations

import torch
from lowering_steps import change
from torch import nn

from autoshard.passes.lower.tables import tables_together


class Tables(nn.Module):
    """``nested``: the second look-up needs what the first one found."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.users, self.items, self.nested = nn.Embedding(8, 4), nn.Embedding(6, 4), nested

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        found = self.users(user)
        return (found * self.items(found.argmax(-1) if self.nested else item)).sum()


def test_look_ups_in_tables_of_one_owner_each_go_together() -> None:
    """Negative control: not where one needs the other."""
    given, asked = (torch.arange(4), torch.arange(4)), {"like": {"tp": "table-wise"}}
    assert change(tables_together, Tables(nested=False), *given, **asked) == [
        "- embedding: f32[4, 4] S(0)@tp = runtime.table_wise([p_users_weight], [user], [0], 'tp', 'sum')",
        "- embedding_1: f32[4, 4] S(0)@tp = runtime.table_wise([p_items_weight], [item], [1], 'tp', 'sum')",
        "+ embedding: f32[4, 4] S(0)@tp, embedding_1: f32[4, 4] S(0)@tp = "
        "runtime.table_wise([p_users_weight, p_items_weight], [user, item], [0, 1], 'tp', 'sum')",
    ]
    assert change(tables_together, Tables(nested=True), *given, **asked) == []

"""States that are written where they lie, as text."""

from __future__ import annotations

import torch
from lowering_steps import change
from torch import nn

from autoshard.passes.lower.liveness import write_states_in_place


class Cache(nn.Module):
    """``late``: the old values are read after the new ones are there."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(2, 8, 4))
        self.late = late

    def forward(self, new: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        old = self.keys
        self.keys = old.index_copy(1, at, new)
        return self.keys.sum(1) + (old.sum(1) if self.late else 0)


def test_a_state_is_written_in_place() -> None:
    """Negative control: not where the old values are read afterwards."""
    given = torch.ones(2, 1, 4), torch.tensor([3])
    assert change(write_states_in_place, Cache(late=False), *given, training=False) == [
        "- index_copy: f32[2, 8, 4] S(0)@tp = aten.index_copy.default(b_keys, 1, at, new__1)",
        "+ index_copy: f32[2, 8, 4] S(0)@tp = aten.index_copy_.default(b_keys, 1, at, new__1)",
    ]
    assert change(write_states_in_place, Cache(late=True), *given, training=False) == []

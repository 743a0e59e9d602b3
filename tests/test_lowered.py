"""Passes from program to program that lowering is made of, as text: what goes, and what stands in its place.

Collectives that go together, blocks, buckets and parts that run again have test modules of their own.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import autoshard
from autoshard import Shard
from autoshard.compiler import captured, planned
from autoshard.passes.ir.program import Program
from autoshard.passes.lower.in_place import in_place
from autoshard.passes.lower.lowering import lower
from autoshard.passes.lower.precision import in_precision
from autoshard.passes.lower.tables import tables_together
from autoshard.plans.wishes import Wishes
from autoshard.precision import precision_of

STEPS = (in_precision, tables_together)


def change(
    step: Callable[[Program], Program], model: nn.Module, *args: torch.Tensor, training: bool = True, **wishes: Any
) -> list[str]:
    """The lines that ``step`` takes from the lowered program, and those that it puts there, without comments."""
    asked = Wishes(**wishes)
    graph = captured(model, args, {}, training=training, precision=asked.mixed_precision)
    program, _ = planned(graph, autoshard.Mesh({"tp": 2}, "ideal_network"), asked)
    before = lower(graph, program.assignment)
    for earlier in STEPS:
        if earlier is not step:
            before = earlier(before)
    texts = [[line.partition("    #")[0] for line in str(p).splitlines()] for p in (before, step(before))]
    return [" ".join(line.split()) for line in difflib.ndiff(*texts) if line[0] in "+-" and " = " in line]


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
    assert change(in_place, Cache(late=False), *given, training=False) == [
        "- index_copy: f32[2, 8, 4] S(0)@tp = aten.index_copy.default(b_keys, 1, at, new__1)",
        "+ index_copy: f32[2, 8, 4] S(0)@tp = aten.index_copy_.default(b_keys, 1, at, new__1)",
    ]
    assert change(in_place, Cache(late=True), *given, training=False) == []


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


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.up(x)).float().mean()


def test_a_parameter_is_kept_in_one_dtype_and_read_in_another() -> None:
    precision = precision_of(MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    asked: dict[str, Any] = {"hints": {"up.weight": Shard(0)}}
    assert change(in_precision, Up(), torch.ones(4, 8), **asked, mixed_precision=precision) == [
        "+ p_up_weight__read: bf16[8, 8] S(0)@tp = aten._to_copy.default(p_up_weight, dtype=bfloat16)",
        "- linear: bf16[4, 8] S(1)@tp = aten.linear.default(_to_copy, p_up_weight)",
        "+ linear: bf16[4, 8] S(1)@tp = aten.linear.default(_to_copy, p_up_weight__read)",
    ]
    assert change(in_precision, Up(), torch.ones(4, 8), **asked) == []

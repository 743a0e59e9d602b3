"""Where a parameter that is kept in one dtype is read in another, as text."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lowering_steps import change
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard import Shard
from autoshard.passes.lower.mixed_precision import cast_parameters
from autoshard.precision import precision_of


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.up(x)).float().mean()


def test_a_parameter_is_kept_in_one_dtype_and_read_in_another() -> None:
    precision = precision_of(MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    asked: dict[str, Any] = {"hints": {"up.weight": Shard(0)}}
    assert change(cast_parameters, Up(), torch.ones(4, 8), **asked, mixed_precision=precision) == [
        "+ p_up_weight__read: bf16[8, 8] S(0)@tp = aten._to_copy.default(p_up_weight, dtype=bfloat16)",
        "- linear: bf16[4, 8] S(1)@tp = aten.linear.default(_to_copy, p_up_weight)",
        "+ linear: bf16[4, 8] S(1)@tp = aten.linear.default(_to_copy, p_up_weight__read)",
    ]
    assert change(cast_parameters, Up(), torch.ones(4, 8), **asked) == []

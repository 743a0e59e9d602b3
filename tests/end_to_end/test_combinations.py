"""Ways of parallelism and of saving memory together: two AdamW steps are those of one device, in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import ideal
from microbatch_cases import steps_alike
from pipeline_steps import made
from torch.distributed.fsdp import MixedPrecisionPolicy

DOUBLE = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
"""changes no number, and goes through all that a policy goes through"""

COMBINED: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "ring-again": ("llama", {"cp": 2}, {"like": "ring", "recompute": "blocks"}),
    "ring-tp-parts": ("llama", {"cp": 2, "tp": 2}, {"like": {"cp": "ring", "tp": "megatron"}, "micro_batches": 2}),
    "stages-ring": ("llama", {"pp": 2, "cp": 2}, {"stages": "pp", "micro_batches": 2, "like": {"cp": "ring"}}),
    "stages-fsdp-selective": (
        "gpt",
        {"pp": 2, "fsdp": 3},
        {"stages": "pp", "micro_batches": 2, "like": {"fsdp": "fsdp"}, "recompute": "selective"},
    ),
    "experts-again": ("moe", {"ep": 2}, {"like": "expert", "recompute": "blocks"}),
    "stages-experts": ("moe", {"pp": 2, "ep": 2}, {"stages": "pp", "micro_batches": 2, "like": {"ep": "expert"}}),
    "experts-cast": ("moe", {"dp": 2, "ep": 2}, {"like": {"ep": "expert"}, "mixed_precision": DOUBLE}),
    "stages-again-interleaved": (
        "gpt",
        {"pp": 2},
        {"stages": "pp", "micro_batches": 2, "recompute": "blocks", "schedule": "interleaved"},
    ),
    "stages-cast": ("gpt", {"pp": 2, "dp": 2}, {"stages": "pp", "micro_batches": 2, "mixed_precision": DOUBLE}),
    "zero2-parts-cast": ("gpt", {"dp": 2}, {"like": "zero2", "micro_batches": 2, "mixed_precision": DOUBLE}),
    "four-axes": ("gpt", {"pp": 2, "dp": 2, "cp": 2, "tp": 2}, {"stages": "pp", "micro_batches": 2}),
}
FAST = {"stages-fsdp-selective", "zero2-parts-cast"}


@pytest.mark.slow_cases("stages-fsdp-selective")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in COMBINED])
def test_together(name: str) -> None:
    kind, axes, asked = COMBINED[name]
    model, args = made(kind)
    steps_alike(model, ideal(axes), args, {}, 2, **asked)

"""Guards: assertions in the graph behind answers of the trace. Errors name the user's line."""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from autoshard.frames import frame_location_text, users_frame
from autoshard.runtime.operations.checks import OTHER_BUFFERS, OTHER_VALUES, TOO_SHORT, exactly
from autoshard.torch_private.ops import assert_async, check

GUARD_MODEL_CHECK = "the model's check of its values fails"
GUARD_FINITE = "a number is infinite or NaN, but the compiled program is for finite numbers"
GUARD_LENGTH = TOO_SHORT
GUARD_BUFFER = OTHER_BUFFERS
GUARD_INTEGERS = OTHER_VALUES


def guard_true(condition: Tensor | torch.SymBool, message: str, frame: FrameType | None = None) -> None:
    """Assert ``condition`` in every call; the RuntimeError has ``frame``'s line and ``message``."""
    if isinstance(condition, torch.SymBool):
        condition = torch.scalar_tensor(torch.sym_ite(condition, 1, 0), dtype=torch.int64)
    assert_async(condition, f"{frame_location_text(frame or users_frame())}: {message}")


def guard_equal(x: Tensor, value: Any, message: str) -> None:
    """Assert that every element of ``x`` equals ``value``."""
    guard_true((x == value).all(), message)


def guard_shape(x: Tensor, shape: Sequence[Any]) -> Tensor:
    """``x`` with a static shape in the graph, asserted in every call."""
    return exactly(x, shape, frame_location_text(users_frame()))


def assume_true(condition: Any) -> None:
    """Let later ops of the trace rely on ``condition`` about lengths; this adds no guard."""
    check(condition)

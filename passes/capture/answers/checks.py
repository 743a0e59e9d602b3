"""Guards: assertions in the graph behind answers of the trace. Errors name the user's line."""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from autoshard.frames import place_of, users_frame
from autoshard.runtime.operations.exactly import OTHER_BUFFERS, OTHER_VALUES, exactly

FAILS = "the model's check of its values fails"
FINITE = "a number is infinite or NaN; the compiled program is for finite numbers"
LONG = "a length that depends on the data is too small for the compiled program"
BUFFER = OTHER_BUFFERS
INTEGERS = OTHER_VALUES


def holds(condition: torch.Tensor | torch.SymBool, message: str, frame: FrameType | None = None) -> None:
    """Assert ``condition`` in every call; the RuntimeError has ``frame``'s line and ``message``."""
    if isinstance(condition, torch.SymBool):
        condition = torch.scalar_tensor(torch.sym_ite(condition, 1, 0), dtype=torch.int64)
    torch._assert_async(condition, f"{place_of(frame or users_frame())}: {message}")


def equals(x: torch.Tensor, value: Any, message: str) -> None:
    """Assert that every element of ``x`` equals ``value``."""
    holds((x == value).all(), message)


def of_shape(x: torch.Tensor, shape: Sequence[Any]) -> torch.Tensor:
    """``x`` with a static shape in the graph, asserted in every call."""
    result: torch.Tensor = exactly(x, shape, place_of(users_frame()))
    return result


def assume(condition: Any) -> None:
    """Let later ops of the trace rely on ``condition`` about lengths; this adds no guard."""
    torch._check(condition)

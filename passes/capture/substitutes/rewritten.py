"""Polyfills of torch functions: one table of functions and their replacements."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from autoshard.passes.capture.observer import Call, Observer, Patch
from autoshard.passes.capture.substitutes.mistraced import MISTRACED, PATCHES
from autoshard.passes.capture.substitutes.unchecked import UNCHECKED
from autoshard.passes.capture.substitutes.windows import asks_last, indexed


def _equal(input: torch.Tensor, other: torch.Tensor) -> bool:  # noqa: A002
    return input.shape == other.shape and bool((input == other).all())


REWRITTEN: dict[Any, Any] = UNCHECKED | MISTRACED
_ASKING = {torch.equal: _equal, torch.Tensor.equal: _equal}
"""polyfills that ask for a truth value, which an observer answers"""


class Rewritten(Observer):
    """Replaces calls by their polyfills."""

    def patches(self) -> Iterable[Patch]:
        return PATCHES

    def before(self, call: Call) -> Call | None:
        if (asking := _ASKING.get(call.func)) is not None:
            return replace(call, func=asking, watched=True)
        other = indexed if asks_last(call.func, call.args) else REWRITTEN.get(call.func)
        return None if other is None else replace(call, func=other)

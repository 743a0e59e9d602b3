"""Ops that count even where nobody reads what they give."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from autoshard.runtime.exactly import EXACTLY


def is_random(op: Any) -> bool:
    """Whether ``op`` draws from the generator."""
    return isinstance(op, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in op.tags


def has_effect(op: Any) -> bool:
    """Whether ``op`` counts where nobody reads its result: it draws, has none, or checks a length."""
    silent = isinstance(op, torch._ops.OpOverload) and not op._schema.returns
    return is_random(op) or silent or op == EXACTLY


@contextlib.contextmanager
def effects_stay() -> Iterator[None]:
    """While inside, fx keeps unused nodes that have an effect."""
    original = torch.fx.Node.is_impure

    def is_impure(self: torch.fx.Node, *args: Any, **kwargs: Any) -> bool:
        return has_effect(self.target) or original(self, *args, **kwargs)

    torch.fx.Node.is_impure = is_impure  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.fx.Node.is_impure = original  # type: ignore[method-assign]

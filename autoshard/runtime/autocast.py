"""torch.autocast around a call: programs are captured under it and contain its casts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

KINDS = ("cpu", "cuda")
"""device types whose autocast state is saved and restored"""


def autocast_state() -> tuple[tuple[str, torch.dtype, bool], ...]:
    """(device type, dtype, whether casts of parameters are cached) where autocast is on."""
    kinds = [kind for kind in KINDS if torch.is_autocast_enabled(kind)]
    return tuple([(kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()) for kind in kinds])


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Disable autocast inside: the program contains the casts already."""
    if not (on := autocast_state()):
        yield
        return
    with contextlib.ExitStack() as stack:
        for kind, _, _ in on:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield

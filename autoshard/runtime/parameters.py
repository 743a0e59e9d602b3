"""Parameters of a block at once (one collective per tensor for now)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from autoshard.runtime.collectives import Whole, all_gather, enter
from autoshard.runtime.communicator import Axes


def enter_parameters(tensors: Sequence[torch.Tensor], axes: Axes) -> tuple[torch.Tensor, ...]:
    """I → R for the parameters of a block."""
    return tuple(enter(t, axes) for t in tensors)


def gather_parameters(
    tensors: Sequence[torch.Tensor],
    dims: Sequence[int],
    axes: Axes,
    to: Whole = "R",
    sizes: Sequence[int] | None = None,
) -> tuple[torch.Tensor, ...]:
    """S → R for the parameters of a block."""
    lengths = sizes if sizes is not None else [None] * len(dims)
    return tuple(all_gather(t, d, axes, to, n) for t, d, n in zip(tensors, dims, lengths, strict=True))


def wait_gradients(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors themselves; their backward waits for every gradient under way."""
    return tensors


@contextlib.contextmanager
def regather() -> Iterator[None]:
    """Inside, gathered parameters are not kept for the backward."""
    yield

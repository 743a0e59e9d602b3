"""Marker ops of shared regions in a trace: a traced call and its repeats. Inlining removes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Like = tuple[Sequence[int], Sequence[int], torch.dtype, torch.device]
"""(sizes, strides, dtype, device) of a tensor"""

REPEATED = "autoshard_repeated"
"""key in a node's custom meta: number of its traced region"""

RESULTS: dict[int, Sequence[Like]] = {}
"""number of a traced region → its results; a trace adds and removes its own"""


def like(x: torch.Tensor) -> Like:
    """Sizes, strides, dtype and device of ``x``."""
    return tuple(x.shape), x.stride(), x.dtype, x.device


def blank(of: Like, device: torch.device | None = None) -> torch.Tensor:
    """An uninitialised tensor of these sizes, strides and dtype."""
    size, stride, dtype, own = of
    return torch.empty_strided(size, stride, dtype=dtype, device=device or own)


@torch.library.custom_op("autoshard::called", mutates_args=())
def called(operands: list[torch.Tensor], results: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    """Marks the end of a traced region, with its ``operands`` and ``results``."""
    return [x.clone() for x in results]


@called.register_fake
def _(operands: list[torch.Tensor], results: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    return [blank(like(x)) for x in results]


@torch.library.custom_op("autoshard::called_again", mutates_args=())
def called_again(operands: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    """Stands for a repeat of region ``number`` with other ``operands``."""
    raise NotImplementedError("an op of traces alone")


@called_again.register_fake
def _(operands: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    return [blank(of) for of in RESULTS[number]]


CALLED, CALLED_AGAIN = torch.ops.autoshard.called.default, torch.ops.autoshard.called_again.default

"""The two ops that stand in a trace for calls of equal modules. They are gone when it is written out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Like = tuple[Sequence[int], Sequence[int], torch.dtype, torch.device]
"""sizes, strides, dtype and device of a tensor"""

REPEATED = "autoshard_repeated"
"""key in a node's custom meta: the number of the traced call that it is part of"""

RESULTS: dict[int, Sequence[Like]] = {}
"""number of a traced call → its results; a trace adds and removes its own"""


def like(x: torch.Tensor) -> Like:
    """What ``x`` is made like."""
    return tuple(x.shape), x.stride(), x.dtype, x.device


def blank(of: Like, device: torch.device | None = None) -> torch.Tensor:
    """An uninitialised tensor like that."""
    size, stride, dtype, own = of
    return torch.empty_strided(size, stride, dtype=dtype, device=device or own)


@torch.library.custom_op("autoshard::called", mutates_args=())
def called(operands: list[torch.Tensor], results: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    """The end of the call that is traced: the ``results`` that leave it, and the ``operands`` that came in."""
    return [x.clone() for x in results]


@called.register_fake
def _(operands: list[torch.Tensor], results: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    return [blank(like(x)) for x in results]


@torch.library.custom_op("autoshard::called_again", mutates_args=())
def called_again(operands: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    """The same call of an equal module with these operands."""
    raise NotImplementedError("an op of traces alone")


@called_again.register_fake
def _(operands: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    return [blank(of) for of in RESULTS[number]]


CALLED, CALLED_AGAIN = torch.ops.autoshard.called.default, torch.ops.autoshard.called_again.default

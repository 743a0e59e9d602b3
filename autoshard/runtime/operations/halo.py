"""Windows over a cut dim: every rank gets the positions of the operand that its own positions of the result read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from autoshard.runtime.transport.communicator import Axes, current
from autoshard.runtime.transport.move import Move
from autoshard.runtime.transport.window import Window, halo_of


def halo(
    x: torch.Tensor,
    dim: int,
    size: int,
    to: int,
    axes: Axes,
    kernel: int = 1,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    transposed: bool = False,
    fill: float = 0.0,
) -> torch.Tensor:
    """The positions of ``dim`` that this rank's positions of the result read, ``fill`` where they lie outside.

    ``size``, ``to``: global lengths of operand and result, both cut by ``axes``. The op that follows pads nothing along
    ``dim``. Neighbours send what is missing (any rank may, where chunks are short); backward: they get the gradients
    of it, which are added.
    """
    comm = current()
    names = comm.active(axes)
    window = Window(kernel, stride, padding, dilation, transposed)
    halo = halo_of(window, size, to, tuple(comm.mesh[a] for a in names))
    me = comm.index(names)
    (have, _), (low, length) = halo.exchange.held[me], halo.exchange.wanted[me]
    if halo.forward:
        x = comm.apply(Move("S", "S", names, dim, size, exchange=halo.exchange), x)
    elif length != x.shape[dim]:
        x = x.narrow(dim, low - have if length else 0, length)
    start, count = halo.reads[me]
    if count == length:
        return x
    before = min(max(-start, 0), count)
    return F.pad(x, [*(0, 0) * (x.dim() - dim - 1), before, count - length - before], value=fill)


def split(x: torch.Tensor, dim: int, lengths: Sequence[int], axes: Axes) -> list[torch.Tensor]:
    """The parts of a global dim that have these ``lengths`` together, all cut by ``axes`` as the dim itself is.

    Ranks exchange what they hold of each other's parts; backward: the gradients.
    """
    starts = [0, *itertools.accumulate(lengths)]
    size = starts.pop()
    return [halo(x, dim, size, n, axes, padding=-start) for start, n in zip(starts, lengths, strict=True)]


def crop(
    y: torch.Tensor,
    dim: int,
    to: int,
    axes: Axes,
    kernel: int = 1,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
) -> torch.Tensor:
    """This rank's positions of the result of a transposed op, from all that its operand of :func:`halo` made."""
    comm = current()
    results = comm.chunk(to, comm.active(axes))
    return y.narrow(dim, Window(kernel, stride, padding, dilation, True).surplus(results), results[1])


def average(
    y: torch.Tensor, dim: int, size: int, to: int, kernel: int, stride: int, padding: int, counted: int, axes: Axes
) -> torch.Tensor:
    """Averages over whole windows become those over the positions that count: up to ``counted`` outside the operand."""
    comm = current()
    first, length = comm.chunk(to, comm.active(axes))
    starts = torch.arange(first, first + length, device=y.device) * stride - padding
    counts = (starts + kernel).clamp(max=size + counted) - starts.clamp(min=-counted)
    return y * kernel / counts.view(-1, *(1,) * (y.dim() - dim - 1))

"""Halo exchange over a sharded dim: every rank gets the positions that its own results read;
channels-last memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.runtime.transport.communicator import Axes, current
from autoshard.runtime.transport.move import Move
from autoshard.runtime.transport.window import Window, halo_of


def channels_last(x: Tensor) -> Tensor:
    """``x`` [n, c, h, w] in channels-last memory format on CPUs (oneDNN); elsewhere unchanged."""
    return x.contiguous(memory_format=torch.channels_last) if _on_onednn(x) else x


def channels_first(x: Tensor) -> Tensor:
    """``x`` contiguous again, where :func:`channels_last` may have changed its memory format."""
    return x.contiguous() if _on_onednn(x) else x


def _on_onednn(x: Tensor) -> bool:
    """Includes meta tensors: the simulated memory of a CPU step has to count the copy."""
    return x.device.type in ("cpu", "meta") and torch.backends.mkldnn.is_available()


def halo(x: Tensor, dim: int, size: int, to: int, axes: Axes, window: Window, fill: float = 0.0) -> Tensor:
    """The positions of ``dim`` that this rank's results read, with ``fill`` where they lie outside.
    ``size``, ``to``: global lengths of operand and result, both sharded by ``axes``. The next op
    must not pad ``dim``. Neighbours send missing positions (any rank may, if chunks are short).
    Backward: gradients are sent back and added."""
    comm = current()
    names = comm.active(axes)
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


def split(x: Tensor, dim: int, lengths: Sequence[int], axes: Axes) -> list[Tensor]:
    """Slices of a global dim with ``lengths``, each sharded by ``axes`` like the dim itself: ranks
    exchange positions."""
    starts = [0, *itertools.accumulate(lengths)]
    size = starts.pop()
    return [halo(x, dim, size, n, axes, Window(padding=-start)) for start, n in zip(starts, lengths, strict=True)]


def crop(y: Tensor, dim: int, to: int, axes: Axes, window: Window) -> Tensor:
    """This rank's positions of a transposed op's result ``y``, made from :func:`halo`'s operand."""
    comm = current()
    results = comm.chunk(to, comm.active(axes))
    return y.narrow(dim, window.surplus(results), results[1])


def average(y: Tensor, dim: int, size: int, to: int, axes: Axes, window: Window, counted: int = 0) -> Tensor:
    """Averages over full windows ``y`` → over positions within ``counted`` of the operand."""
    comm = current()
    first, length = comm.chunk(to, comm.active(axes))
    starts = torch.arange(first, first + length, device=y.device) * window.stride - window.padding
    counts = (starts + window.kernel).clamp(max=size + counted) - starts.clamp(min=-counted)
    return y * window.kernel / counts.view(-1, *(1,) * (y.dim() - dim - 1))

"""Dropout and random draws that equal one device's: same seed, same values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from autoshard.errors import LayoutError
from autoshard.runtime.transport.communicator import Axes, Communicator, bind, current
from autoshard.runtime.transport.generators import set_states, states, synchronised_generators
from autoshard.runtime.transport.handed_on import HandingOn
from autoshard.runtime.transport.process_group import TorchCommunicator


def shared(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``fn(*args, **kwargs)``, a random draw of global shape, the same on every rank.

    In one process a single draw from torch's default generator serves all ranks. Under
    torch.distributed every rank draws, from generators that :func:`synchronised_rng` made equal.
    Each rank gets its own tensor."""
    comm = current()
    drawn = comm.shared(fn, args, kwargs)
    if isinstance(comm, TorchCommunicator):
        return drawn
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, drawn)


def synchronised_rng(comm: Communicator) -> AbstractContextManager[None]:
    """Inside, every rank draws what rank 0 would; wrap a forward that calls :func:`shared`.

    Under torch.distributed rank 0's generator states are broadcast at the first draw. Afterwards
    ranks seeded like rank 0 keep the advanced states, and others get their own back. No effect in
    one process."""
    if isinstance(comm, TorchCommunicator) and comm.world_size > 1:
        return synchronised_generators(comm)
    return nullcontext()


def dropout(
    x: torch.Tensor,
    p: float,
    shape: Sequence[int],
    dims: Mapping[int, Axes],
    order: Sequence[int] = (),
    batch: int | None = None,
    again: bool = False,
) -> torch.Tensor:
    """``F.dropout(training=True)`` of the global tensor, on this rank's shard ``x``.

    ``shape``: global shape; ``dims``: the axes that shard each dim. The unsharded model drops the
    same elements from the same seed. ``order``: the dims of its tensor in memory order, which eager
    draws follow. ``batch``: the dim that micro-batches divide; each takes its slice of the full
    batch's draw. ``again``: the backward draws the mask again instead of saving it."""
    if not 0.0 <= p <= 1.0:
        raise LayoutError(f"dropout probability {p} is not between 0 and 1")
    if p == 0.0 or 0 in shape:
        return x
    if p == 1.0:
        return x * 0.0
    redraw = None
    if again and x.requires_grad and torch.is_grad_enabled():
        fill = partial(noise, p=p, dtype=x.dtype, device=x.device)
        redraw = _later(lambda: part(drawn(fill, shape, order, batch), dims))
    scales = noise_like(x, p, shape, order, batch)
    dropped: torch.Tensor = _Drop.apply(x, part(scales, dims), p, redraw)
    return dropped


def _later(draw: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """``draw`` for the backward: with the generator states and the micro-batch of now."""
    comm = current()
    now, micro_batch = comm.random_states(), comm.micro_batch

    def drawn_then() -> torch.Tensor:
        before, entered = states(), comm.micro_batch
        set_states(now)
        comm.micro_batch = micro_batch
        try:
            with bind(comm):
                return draw()
        finally:
            set_states(before)
            comm.micro_batch = entered

    return drawn_then


def noise_like(
    x: torch.Tensor, p: float, shape: Sequence[int], order: Sequence[int] = (), batch: int | None = None
) -> torch.Tensor:
    """Dropout factors of the full tensor of ``shape``; ``x``: for dtype and device."""
    return drawn(lambda s: current().shared(noise, (s, p, x.dtype, x.device), {}), shape, order, batch)


class _Drop(HandingOn):
    """``x * noise``; saves one byte per element, or nothing with ``redraw``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, noise: torch.Tensor, p: float, redraw: Callable[[], torch.Tensor] | None
    ) -> torch.Tensor:
        if redraw is None:
            ctx.save_for_backward(noise != 0)
        ctx.p, ctx.redraw = p, redraw
        return x * noise

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        kept = ctx.saved_tensors[0] if ctx.redraw is None else ctx.redraw() != 0
        return gradient * scaled(kept.to(gradient.dtype), ctx.p), None, None, None


def scaled(kept: torch.Tensor, p: float) -> torch.Tensor:
    """Dropout factors of ones where an element is kept, rounded like ATen's."""
    return kept.div_(1 - p) if kept.device.type == "cpu" else kept.mul_(1 / (1 - p))


def noise(shape: tuple[int, ...], p: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Dropout factors, drawn step by step like ATen's."""
    if device.type == "cpu":
        return scaled(torch.empty(shape, dtype=dtype, device=device).bernoulli_(1 - p), p)
    ones = torch.ones(shape, dtype=dtype, device=device)
    return torch.native_dropout(ones, p, True)[0]


def drawn(
    draw: Callable[[tuple[int, ...]], torch.Tensor], shape: Sequence[int], order: Sequence[int], batch: int | None
) -> torch.Tensor:
    """What ``draw`` makes in memory order ``order``; with ``batch`` this micro-batch's slice."""
    index, count = current().micro_batch
    if batch is None or count == 1:
        return in_memory_order(order, draw, shape)
    length = shape[batch]
    whole = [n * count if d == batch else n for d, n in enumerate(shape)]
    return in_memory_order(order, draw, whole).narrow(batch, index * length, length)


def in_memory_order(
    order: Sequence[int], draw: Callable[[tuple[int, ...]], torch.Tensor], shape: Sequence[int]
) -> torch.Tensor:
    """What ``draw(shape)`` makes with dims in memory order ``order`` (empty: as numbered)."""
    if not order:
        return draw(tuple(shape))
    return draw(tuple(shape[d] for d in order)).permute([order.index(d) for d in range(len(order))])


def part(x: torch.Tensor, dims: Mapping[int, Axes]) -> torch.Tensor:
    """This rank's shard of a global ``x``, copied: a view would keep all of ``x`` alive."""
    comm, cut = current(), x
    for dim, axes in dims.items():
        cut = cut.narrow(dim, *comm.chunk(x.shape[dim], comm.active(axes)))
    return x if cut is x else cut.clone()

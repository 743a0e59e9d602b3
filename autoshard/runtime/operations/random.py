"""Random ops that agree with one device: the same seed gives the values that the unsharded model draws."""

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

    In-process one rank draws for all, from torch's default generator. Under torch.distributed every rank draws, from
    generators that :func:`synchronised_rng` has made equal. Every rank gets a tensor of its own.
    """
    comm = current()
    drawn = comm.shared(fn, args, kwargs)
    if isinstance(comm, TorchCommunicator):
        return drawn
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, drawn)


def synchronised_rng(comm: Communicator) -> AbstractContextManager[None]:
    """Inside, every rank draws what rank 0 would draw; put it around a forward that calls :func:`shared`.

    Under torch.distributed rank 0's generator states are broadcast at the first draw; afterwards ranks seeded as rank 0
    keep the advanced states, as it does, and others get their own back. In-process there is one generator and nothing to do.
    """
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
    """``F.dropout(training=True)`` of the global tensor, on this rank's part ``x``.

    ``shape``: the global shape; ``dims``: the axes that cut each sharded tensor dim. Every element is dropped exactly
    when the unsharded model drops it, from the same seed. ``order``: the dims of the unsharded model's tensor as they
    lie in memory, if not as they are numbered: eager dropout draws in memory order. ``batch``: where ``x`` belongs to
    one of several micro-batches, the dim that they share: this one takes its part of what the whole batch draws.
    ``again``: the backward draws again what is dropped, and nothing is kept for it.
    """
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
    """``draw``, to be called in the backward: it draws what it would draw now."""
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
    """What :func:`dropout` multiplies the whole tensor of ``shape`` with; ``x``: for its dtype and device."""
    return drawn(lambda s: current().shared(noise, (s, p, x.dtype, x.device), {}), shape, order, batch)


class _Drop(HandingOn):
    """``x * noise``; one byte per element is kept for the backward, or nothing where ``redraw`` gives the noise again."""

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
    """What eager dropout multiplies with, of ones where an element is kept; as ATen rounds it."""
    return kept.div_(1 - p) if kept.device.type == "cpu" else kept.mul_(1 / (1 - p))


def noise(shape: tuple[int, ...], p: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What eager dropout multiplies with; every step as ATen does it, so that it takes the same draws."""
    if device.type == "cpu":
        return scaled(torch.empty(shape, dtype=dtype, device=device).bernoulli_(1 - p), p)
    ones = torch.ones(shape, dtype=dtype, device=device)
    return torch.native_dropout(ones, p, True)[0]


def drawn(
    draw: Callable[[tuple[int, ...]], torch.Tensor], shape: Sequence[int], order: Sequence[int], batch: int | None
) -> torch.Tensor:
    """What ``draw`` makes in the memory order ``order``; of several micro-batches along dim ``batch`` the present one's."""
    index, count = current().micro_batch
    if batch is None or count == 1:
        return in_memory_order(order, draw, shape)
    length = shape[batch]
    whole = [n * count if d == batch else n for d, n in enumerate(shape)]
    return in_memory_order(order, draw, whole).narrow(batch, index * length, length)


def in_memory_order(
    order: Sequence[int], draw: Callable[[tuple[int, ...]], torch.Tensor], shape: Sequence[int]
) -> torch.Tensor:
    """What ``draw(shape)`` makes, with dims that lie in memory in this ``order`` (none given: as they are numbered)."""
    if not order:
        return draw(tuple(shape))
    return draw(tuple(shape[d] for d in order)).permute([order.index(d) for d in range(len(order))])


def part(x: torch.Tensor, dims: Mapping[int, Axes]) -> torch.Tensor:
    """This rank's part of the global tensor ``x``, in memory of its own: the rest is not kept for the backward."""
    comm, cut = current(), x
    for dim, axes in dims.items():
        cut = cut.narrow(dim, *comm.chunk(x.shape[dim], comm.active(axes)))
    return x if cut is x else cut.clone()

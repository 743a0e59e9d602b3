"""Random ops that agree with one device: the same seed gives the values that the unsharded model draws."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from autoshard.errors import LayoutError
from autoshard.runtime.communicator import Axes, Communicator, current
from autoshard.runtime.process_group import TorchCommunicator, synchronised_generators


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


@contextlib.contextmanager
def synchronised_rng(comm: Communicator) -> Iterator[None]:
    """Inside, every rank draws what rank 0 would draw; put it around a forward that calls :func:`shared`.

    Under torch.distributed rank 0's generator states are broadcast at the first draw; afterwards rank 0 keeps the
    advanced state and the other ranks get their own back. In-process there is one generator and nothing to do.
    """
    if isinstance(comm, TorchCommunicator) and comm.world_size > 1:
        with synchronised_generators(comm):
            yield
    else:
        yield


def dropout(
    x: torch.Tensor, p: float, shape: Sequence[int], dims: Mapping[int, Axes], order: Sequence[int] = ()
) -> torch.Tensor:
    """``F.dropout(training=True)`` of the global tensor, on this rank's part ``x``.

    ``shape``: the global shape; ``dims``: the axes that cut each sharded tensor dim. Every element is dropped exactly
    when the unsharded model drops it, from the same seed. ``order``: the dims of the unsharded model's tensor as they
    lie in memory, if not as they are numbered: eager dropout draws in memory order.
    """
    if not 0.0 <= p <= 1.0:
        raise LayoutError(f"dropout probability {p} is not between 0 and 1")
    if p == 0.0 or 0 in shape:
        return x
    if p == 1.0:
        return x * 0.0
    noise = in_memory_order(order, lambda s: current().shared(_noise, (s, p, x.dtype, x.device), {}), shape)
    return x * part(noise, dims)


def _noise(shape: tuple[int, ...], p: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What eager dropout multiplies with; every step as ATen does it, so that it takes the same draws."""
    if device.type == "cpu":
        return torch.empty(shape, dtype=dtype, device=device).bernoulli_(1 - p).div_(1 - p)
    ones = torch.ones(shape, dtype=dtype, device=device)
    return torch.native_dropout(ones, p, True)[0]


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

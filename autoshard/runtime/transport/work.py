"""Pending collectives of torch.distributed: process group, work handle, and sums to finish."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autoshard.runtime.transport.move import EXCHANGED, is_few
from autoshard.runtime.transport.peers import Notes, wait

# Called all_gather_into_tensor and reduce_scatter_tensor before torch 2.13.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce_sum(x: torch.Tensor, group: Any, async_op: bool = True) -> Any:
    """Begin ``dist.all_reduce(x, group=group)`` without its per-call checks."""
    return group.allreduce([torch.view_as_real(x) if x.is_complex() else x])


def all_to_all_rows(
    out: torch.Tensor, x: torch.Tensor, gets: list[int], gives: list[int], group: Any, async_op: bool = True
) -> Any:
    """Begin ``dist.all_to_all_single(out, x, gets, gives, group)`` without its checks."""
    if x.is_complex():
        out, x = torch.view_as_real(out), torch.view_as_real(x)
    return group.alltoall_base(out, x, gets, gives)


class Group(NamedTuple):
    """The process group of some axes."""

    handle: Any
    size: int
    number: int
    """this rank's number along the axes"""
    members: tuple[int, ...]
    """global ranks, in the order of the axes"""
    order: tuple[int, ...] | None
    """number along the axes of each member in the process group's order; None: the same order"""
    gloo: bool

    def in_order(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """``parts`` in the process group's order, put in the order of the axes."""
        if self.order is None:
            return list(parts)
        out = list(parts)
        for position, k in enumerate(self.order):
            out[k] = parts[position]
        return out


def to_exchange(group: Group, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[int]] | None:
    """(receive buffer, sent tensor, elements per member or []) to exchange summands, else None.

    An exchange meets once, a ring 2 (n - 1) times. Two ranks send as much as in a ring, and
    exchange unless the buffer would be large. More ranks exchange few numbers; for one number their
    ring has a single segment."""
    if not x.is_floating_point():
        return None
    if group.size == 2 and x.nbytes <= EXCHANGED:
        counts = [0 if m == group.members[group.number] else x.numel() for m in sorted(group.members)]
        return torch.empty_like(x).view(-1), x.view(-1), counts
    if group.size > 2 and x.numel() > 1 and is_few(x.nbytes, group.size):
        parts = x.view(-1).expand(group.size, -1).contiguous()
        return torch.empty_like(parts), parts, []
    return None


class Underway(NamedTuple):
    """A collective that has begun."""

    work: Any
    notes: Notes | None
    """of the rank, if gloo executes it"""
    what: Callable[[], str]
    """its name, for messages"""

    def wait(self) -> None:
        """Wait for its result, once. Raises :class:`CommunicationError` if gloo cannot get it."""
        if self.notes is None:
            self.work.wait()
        else:
            wait(self.work, self.notes, self.what)


class Added(NamedTuple):
    """A pending sum by all-to-all: a reduce-scatter, a small all-reduce, or one of two ranks."""

    work: Underway
    received: torch.Tensor
    """all ranks' summands; if it is as large as ``out``, the other one's of two"""
    out: torch.Tensor

    def wait(self) -> None:
        """Wait for the summands and add them up."""
        self.work.wait()
        ranks = self.received.numel() // max(1, self.out.numel())
        if ranks == 1:
            self.out.add_(self.received.view(self.out.shape))
            return
        torch.sum(self.received.view(ranks, *self.out.shape), 0, dtype=self.out.dtype, out=self.out)

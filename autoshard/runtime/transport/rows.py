"""Rows that processes send each other, as many as each has for the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from autoshard.runtime.transport.move import Splits
from autoshard.runtime.transport.wire import raw


def all_to_all_rows(
    out: torch.Tensor, x: torch.Tensor, gets: list[int], gives: list[int], group: Any, async_op: bool = True
) -> Any:
    """Begin ``dist.all_to_all_single(out, x, gets, gives, group)``, without what that looks up in every call."""
    if x.is_complex():
        out, x = torch.view_as_real(out), torch.view_as_real(x)
    return group.alltoall_base(out, x, gets, gives)


def begin_rows(comm: Any, splits: Splits, group: Any, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begin to send rows of ``x`` on ``comm`` among the ranks of ``group``; what is returned waits for theirs, once.

    They go from where they lie to where they stay, unless the process group has an order of its own.
    """
    order = range(group.size) if group.order is None else group.order
    gives, gets = [splits.sent[k] for k in order], [splits.received[k] for k in order]
    if group.order is not None:
        pieces = x.split(splits.sent)
        x = torch.cat([pieces[k] for k in order])
    out, sent = x.new_empty(sum(gets), *x.shape[1:]), raw(x.contiguous())
    exchange = all_to_all_rows if group.gloo else dist.all_to_all_single
    work = comm.begin(group, exchange, raw(out), sent, gets, gives)

    def arrive() -> torch.Tensor:
        work.wait()
        sent.numel()  # not freed before
        return out if group.order is None else torch.cat(by_index(out.split(gets), group))

    return arrive


def by_index(parts: Sequence[torch.Tensor], group: Any) -> list[torch.Tensor]:
    """Parts that lie in the process group's order, in the order of the axes."""
    if group.order is None:
        return list(parts)
    out = list(parts)
    for position, k in enumerate(group.order):
        out[k] = parts[position]
    return out

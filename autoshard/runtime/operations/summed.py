"""An all-reduce that overlaps with computation."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from autoshard.runtime.operations.collectives import statistic
from autoshard.runtime.transport.communicator import Axes, current
from autoshard.runtime.transport.move import Move
from autoshard.runtime.transport.process_group import TorchCommunicator
from autoshard.runtime.transport.profiling import named, recorded


def begin_sum(x: torch.Tensor, axes: Axes) -> Callable[[], torch.Tensor]:
    """Begin to sum ``x`` over the ranks of ``axes``, without gradient; call the result to wait."""
    comm, out = current(), x.detach()
    names = comm.active(axes)
    if not isinstance(comm, TorchCommunicator) or not names or comm.sums is not None:
        whole = statistic(out, names, to="R")
        return lambda: whole
    move, group, out = named(Move("P", "R", names), always=True), comm.process_group(names), out.clone()
    comm.record("all_reduce", names, comm.phase, move.ring_bytes(out, group.size))
    comm.during(move, comm.phase)
    with recorded(comm, move, comm.phase):
        work = comm.begin(group, dist.all_reduce, out)

    def arrived() -> torch.Tensor:
        work.wait()
        return out

    return arrived

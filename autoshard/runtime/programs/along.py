"""The ranks along the axis of stages: which stages each runs, and what one of them tells the others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from autoshard.runtime.transport.peers import Notes, lost, wait
from autoshard.runtime.transport.wire import raw


class Along:
    """This rank among those of ``group``, which have its coordinates along all other axes."""

    def __init__(self, group: Any, notes: Notes) -> None:
        self.group, self.notes = group, notes
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def runs(self, stage: int) -> int:
        """The rank that runs a stage."""
        return stage % self.ranks

    def is_mine(self, stage: int) -> bool:
        """Whether this rank runs it."""
        return self.runs(stage) == self.rank

    def tell(self, stage: int, x: torch.Tensor, what: str) -> None:
        """``x`` of the rank that runs ``stage``, into that of all others. Collective."""
        if x.numel() and self.ranks > 1:
            src = dist.get_global_rank(self.group, self.runs(stage))
            self._run(what, lambda: dist.broadcast(raw(x), src, group=self.group, async_op=True))

    def add_up(self, x: torch.Tensor, stages: Sequence[int], what: str) -> None:
        """Sum ``x`` in place over the ranks that run ``stages``; each of these ranks calls it, in the same order.

        Some ranks send each other what they have. In a process group of theirs they might wait for ever: torch names one
        by how many its members have, and those that share other parameters too have more.
        """
        ranks = sorted({self.runs(stage) for stage in stages})
        if self.rank not in ranks or len(ranks) == 1 or not x.numel():
            return
        mine = x.contiguous()
        if len(ranks) == self.ranks:
            self._run(what, lambda: dist.all_reduce(mine, group=self.group, async_op=True))
            total = mine
        else:
            parts = [mine if r == self.rank else torch.empty_like(mine) for r in ranks]
            ops = []
            for r, part in zip(ranks, parts, strict=True):
                if r != self.rank:
                    peer = dist.get_global_rank(self.group, r)
                    ops.append(dist.P2POp(dist.isend, raw(mine), peer, self.group))
                    ops.append(dist.P2POp(dist.irecv, raw(part), peer, self.group))
            self._run(what, lambda: dist.batch_isend_irecv(ops))
            total = functools.reduce(torch.add, parts)  # in the same order on all: the same bits
        if total is not x:
            x.copy_(total)

    def gathered(self, mine: Any) -> list[Any]:
        """``mine``, any object, of every rank. Collective."""
        every: list[Any] = [None] * self.ranks
        dist.all_gather_object(every, mine, group=self.group)
        return every

    def _run(self, what: str, begin: Callable[[], Any]) -> None:
        """Wait for the collective, or the messages, that ``begin`` begins.

        Raises :class:`CommunicationError` where these cannot end.
        """
        self.notes.settle()
        what = f"{what}, among stages"
        try:
            work = begin()
            if isinstance(work, list):  # with gloo a wait for a message that is cut short ends the connection
                for message in work:
                    message.wait()
                return
        except RuntimeError as error:
            raise lost(error, self.notes, what) from error
        if dist.get_backend(self.group) == "gloo":
            wait(work, self.notes, lambda: what)
        else:
            work.wait()

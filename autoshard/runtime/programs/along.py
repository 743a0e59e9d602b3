"""Ranks along the pipeline-stage axis: which stages each runs, and messages among them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from autoshard.runtime.transport import sparse
from autoshard.runtime.transport.peers import Notes, lost, wait
from autoshard.runtime.transport.wire import raw


class Along:
    """This rank in ``group``, whose ranks have its coordinates along all other axes."""

    def __init__(self, group: Any, notes: Notes) -> None:
        self.group, self.notes = group, notes
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def runs(self, stage: int) -> int:
        """The rank that runs ``stage``."""
        return stage % self.ranks

    def is_mine(self, stage: int) -> bool:
        """Whether this rank runs ``stage``."""
        return self.runs(stage) == self.rank

    def tell(self, stage: int, x: torch.Tensor, what: str) -> None:
        """Broadcast ``x`` in place from the rank that runs ``stage``. Collective."""
        if x.numel() and self.ranks > 1:
            src = dist.get_global_rank(self.group, self.runs(stage))
            self._run(what, lambda: dist.broadcast(raw(x), src, group=self.group, async_op=True))

    def add_up(self, x: torch.Tensor, stages: Sequence[int], what: str) -> None:
        """Sum ``x`` in place over the ranks that run ``stages``; each calls it, in the same order.

        A subset of the ranks exchanges messages. Its own process group could deadlock: torch names
        a group by how many its members have, and ranks that share other parameters have more."""
        ranks = sorted({self.runs(stage) for stage in stages})
        if self.rank not in ranks or len(ranks) == 1:
            return
        if x.is_sparse:
            numbers, rows = sparse.rows_of(x)
            counts = [int(n) for n in self._of_each(ranks, torch.tensor([len(numbers)], device=x.device), what)]
            every = [self._of_each(ranks, part, what, counts) for part in (numbers, rows)]
            total = sparse.summed([sparse.from_rows(n, r, x.shape[0]) for n, r in zip(*every, strict=True)])
        elif len(ranks) == self.ranks:
            total = x.contiguous()
            self._run(what, lambda: dist.all_reduce(total, group=self.group, async_op=True))
        else:  # the same order on all ranks: bitwise equal sums
            total = functools.reduce(torch.add, self._of_each(ranks, x.contiguous(), what))
        if total is not x:
            x.copy_(total)

    def _of_each(
        self, ranks: Sequence[int], x: torch.Tensor, what: str, lengths: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """``x`` of each of ``ranks``, in point-to-point messages; each of them calls it.

        All have one shape, or ``lengths`` along dim 0."""
        parts, ops = [], []
        for place, r in enumerate(ranks):
            if r == self.rank:
                parts.append(x)
                continue
            parts.append(x.new_empty(x.shape if lengths is None else (lengths[place], *x.shape[1:])))
            peer = dist.get_global_rank(self.group, r)
            ops += [dist.P2POp(dist.isend, raw(x), peer, self.group)] if x.numel() else []
            ops += [dist.P2POp(dist.irecv, raw(parts[-1]), peer, self.group)] if parts[-1].numel() else []
        self._run(what, lambda: dist.batch_isend_irecv(ops) if ops else [])
        return parts

    def gathered(self, mine: Any) -> list[Any]:
        """``mine``, any object, of every rank. Collective."""
        every: list[Any] = [None] * self.ranks
        dist.all_gather_object(every, mine, group=self.group)
        return every

    def _run(self, what: str, begin: Callable[[], Any]) -> None:
        """Begin and wait. Raises :class:`CommunicationError` if a rank failed or is gone."""
        self.notes.settle()
        what = f"{what}, among stages"
        try:
            work = begin()
            if isinstance(work, list):  # gloo ends the connection if a wait for a message times out
                for message in work:
                    message.wait()
                return
        except RuntimeError as error:
            raise lost(error, self.notes, what) from error
        if dist.get_backend(self.group) == "gloo":
            wait(work, self.notes, lambda: what)
        else:
            work.wait()

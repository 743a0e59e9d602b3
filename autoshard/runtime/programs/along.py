"""The ranks along the axis of stages: which stages each runs, and what one of them tells the others."""

from __future__ import annotations

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
        self._groups: dict[tuple[int, ...], Any] = {tuple(range(self.ranks)): group}

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
            self._run(what, dist.broadcast, raw(x), src, group=self.group)

    def add_up(self, x: torch.Tensor, stages: Sequence[int], what: str) -> None:
        """Sum ``x`` in place over the ranks that run ``stages``; each of these ranks calls it, in the same order."""
        ranks = tuple(sorted({self.runs(stage) for stage in stages}))
        if self.rank not in ranks or len(ranks) == 1:
            return
        if ranks not in self._groups:
            members = [dist.get_global_rank(self.group, r) for r in ranks]
            self._groups[ranks] = dist.new_group(members, use_local_synchronization=True)
        dense = x.contiguous()
        self._run(what, dist.all_reduce, dense, group=self._groups[ranks])
        if dense is not x:
            x.copy_(dense)

    def gathered(self, mine: Any) -> list[Any]:
        """``mine``, any object, of every rank. Collective."""
        every: list[Any] = [None] * self.ranks
        dist.all_gather_object(every, mine, group=self.group)
        return every

    def _run(self, what: str, collective: Callable[..., Any], *args: Any, group: Any) -> None:
        """Raises :class:`CommunicationError` where it cannot end."""
        self.notes.settle()
        what = f"{what}, among stages"
        try:
            work = collective(*args, group=group, async_op=True)
        except RuntimeError as error:
            raise lost(error, self.notes, what) from error
        if dist.get_backend(group) == "gloo":
            wait(work, self.notes, lambda: what)
        else:
            work.wait()

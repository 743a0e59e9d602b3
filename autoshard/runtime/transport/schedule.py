"""Threads of the in-process ranks, one of which runs at a time.

A waiting rank hands the turn to the next one that can run; nothing polls or times out. The schedule
knows when a rank will never come, so a mistake in one rank ends the run instead of hanging it."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from autoshard.errors import RuntimeMismatchError
from autoshard.runtime.autocast import autocast_state

Joint = Callable[[list[Any]], Sequence[Any]]


class Threads:
    """One waiting thread per rank but 0, which runs in the caller. They end with this object."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turns = [threading.Lock() for _ in range(size)]
        for turn in self.turns:
            turn.acquire()
        self.job: list[Callable[[int], None] | None] = [None]
        for rank in range(1, size):
            args = (self.turns[rank], self.job, rank)
            threading.Thread(target=_work, args=args, name=f"autoshard rank {rank}", daemon=True).start()
        weakref.finalize(self, _release, self.turns, self.job)


def _work(turn: threading.Lock, job: list[Callable[[int], None] | None], rank: int) -> None:
    while True:
        turn.acquire()
        if job[0] is None:
            return
        job[0](rank)


def _release(turns: list[threading.Lock], job: list[Callable[[int], None] | None]) -> None:
    job[0] = None
    for turn in turns[1:]:
        if turn.locked():
            turn.release()


class Schedule:
    """One run: whose turn it is, who waits with what, and the first failure."""

    def __init__(self, threads: Threads) -> None:
        self.failure: BaseException | None = None
        self._size, self._turns = threads.size, threads.turns
        self._running = 0
        self._ended: set[int] = set()
        self._waiting: dict[int, tuple[Any, Any]] = {}
        self._results: Sequence[Any] = ()
        self._done = threading.Lock()
        self._done.acquire()

    def rank_main(self, rank: int, fn: Callable[[], None]) -> None:
        """Body of a rank's thread, from its first turn to the end of the run."""
        try:
            if self.failure is None:
                fn()
        except _Aborted:
            pass
        except BaseException as error:  # the caller's thread raises it
            self.failure = self.failure or error
        self._ended.add(rank)
        self._waiting.pop(rank, None)
        self._pass_on(rank)

    def wait(self) -> None:
        """Wait until every rank has ended; raise the first failure."""
        self._done.acquire()
        if self.failure is not None:
            raise self.failure

    def meet(self, rank: int, what: Any, value: Any, joint: Joint) -> Any:
        """See ``World.meet``."""
        if self.failure is not None:
            raise _Aborted
        self._waiting[rank] = (what, value)
        if len(self._waiting) < self._size:
            self._pass_on(rank)
            self._turns[rank].acquire()
            if isinstance(self.failure, RuntimeMismatchError):
                raise RuntimeMismatchError(*self.failure.args)
            if self.failure is not None:
                raise _Aborted
            return self._results[rank]
        try:
            self._check_agreement()
            self._results = joint([self._waiting[r][1] for r in range(self._size)])
        except BaseException as error:
            self.failure = error
            raise
        self._waiting.clear()
        return self._results[rank]

    def _pass_on(self, rank: int) -> None:
        """Give the turn to the next rank that can run; if all others wait in vain, fail."""
        if self._running != rank:  # an interrupt ended this rank in another one's turn
            return
        ready = [r for r in range(self._size) if r not in self._ended and r not in self._waiting]
        if not ready and self._waiting:
            self.failure = self.failure or self._waits_in_vain()
            ready = sorted(self._waiting)
        if ready:
            self._running = ready[0]
            self._waiting.pop(ready[0], None)
            self._turns[ready[0]].release()
        else:
            self._done.release()

    def _waits_in_vain(self) -> RuntimeMismatchError:
        waiter = min(self._waiting)
        return RuntimeMismatchError(
            f"rank {waiter} waits in {self._waiting[waiter][0]}, but rank {min(self._ended)} has ended without it; "
            "every rank must call the same collectives in the same order"
        )

    def _check_agreement(self) -> None:
        first = self._waiting[0][0]
        for rank in range(1, self._size):
            if self._waiting[rank][0] != first:
                raise RuntimeMismatchError(
                    f"rank 0 calls {first}, but rank {rank} calls {self._waiting[rank][0]}; "
                    "every rank must call the same collectives in the same order"
                )


class _Aborted(BaseException):
    """Unwinds a rank after another one failed; never leaves the schedule."""


class ThreadState:
    """The caller's thread-local torch state, restored in the threads of other ranks."""

    def __init__(self) -> None:
        self.grad, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.device = torch.get_default_device()
        self.stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self.autocast = autocast_state()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the caller's grad and inference mode, autocast, default device, CUDA stream."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.device.type != "cpu":
                stack.enter_context(self.device)
            if self.stream is not None:
                stack.enter_context(torch.cuda.stream(self.stream))
            for kind, dtype, cache in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, True, cache))
            yield

"""One call at a time in a process, over all threads and modules; none during a trace."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from autoshard.errors import RuntimeMismatchError
from autoshard.passes.capture.export import ALONE
from autoshard.runtime.transport.groups import once


class Turns:
    """A reentrant lock. ``waits``: other threads wait, also for other modules and traces.

    Ranks that are processes refuse instead: they would see two threads' calls in different orders.
    """

    def __init__(self, waits: bool = True) -> None:
        self.waits, self._lock = waits, ALONE if waits else once("turns", threading.RLock)

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=self.waits):
            raise RuntimeMismatchError(
                "a sharded module is called by two threads at once, or two modules are: the ranks would not meet in the same "
                "calls. Call them from one thread, or hold a lock that gives all ranks the same order."
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    def __reduce__(self) -> Any:
        return Turns, (self.waits,)  # locks are not copied

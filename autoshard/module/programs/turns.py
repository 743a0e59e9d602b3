"""One call at a time, of all modules of one process, whatever threads call them; and none while one is traced."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from autoshard.errors import RuntimeMismatchError
from autoshard.passes.capture.export import ALONE
from autoshard.runtime.transport.groups import once


class Turns:
    """A context in which one thread is at a time; it may enter again. ``waits``: others wait, else they are refused.

    Those that wait do so for calls of other modules, too: a trace sees what other threads run.

    Ranks that are processes would see the calls of two threads in different orders, so there they are refused.
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

"""One call of a module at a time, whatever threads call it; and of all modules of one process, none while one is traced."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from autoshard.errors import RuntimeMismatchError
from autoshard.passes.capture.export import ALONE


class Turns:
    """A context in which one thread is at a time; it may enter again. ``waits``: others wait, else they are refused.

    Those that wait do so for calls of other modules, too: a trace sees what other threads run.

    Ranks that are processes would see the calls of two threads in different orders, so there they are refused.
    """

    def __init__(self, waits: bool = True) -> None:
        self.waits, self._lock = waits, ALONE if waits else threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=self.waits):
            raise RuntimeMismatchError(
                "a sharded module is called by two threads at once: the ranks would not meet in the same calls. "
                "Call it from one thread, or hold a lock that gives all ranks the same order."
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    def __reduce__(self) -> Any:
        return Turns, (self.waits,)  # a copy of the module is called on its own

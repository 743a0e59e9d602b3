"""Progress of long compile phases on terminals and in logs; less garbage collection."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TextIO

SILENT_SECONDS = 2.0
"""seconds before a phase is shown on a terminal"""
LOG_SECONDS = 20.0
"""seconds between lines in a log"""
_GC_THRESHOLDS = (50_000, 1000, 1000)
"""threshold of the young generation, in objects"""

_phases: list[str] = []
"""names of the phases that run, outermost first; only the outermost writes"""


@contextmanager
def shown_progress(name: str, stream: TextIO | None = None) -> Iterator[None]:
    """Show ``name``, the phase inside it and elapsed seconds on ``stream`` (default: stderr).
    On a terminal one line is rewritten every second after the first two. In a log, a line is
    written every 20 seconds. Under torchrun only the first rank writes."""
    out = sys.stderr if stream is None else stream
    inner = bool(_phases)
    _phases.append(name)
    try:
        with nullcontext() if inner or os.environ.get("RANK", "0") != "0" else _written(name, out):
            yield
    finally:
        _phases.pop()


@contextmanager
def _written(name: str, out: TextIO) -> Iterator[None]:
    begin, done, terminal = time.perf_counter(), threading.Event(), out.isatty()
    silent = SILENT_SECONDS if terminal else LOG_SECONDS
    start, end = ("\r", "") if terminal else ("", "\n")

    def show() -> None:
        wait = silent
        while not done.wait(wait):
            where = ", ".join(dict.fromkeys((name, *_phases)))
            out.write(f"{start}autoshard: {where} … {time.perf_counter() - begin:.0f} s{end}")
            out.flush()
            wait = 1.0 if terminal else LOG_SECONDS

    thread = threading.Thread(target=show, name=f"autoshard {name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        seconds = time.perf_counter() - begin
        if seconds >= silent:
            out.write(f"{start}autoshard: {name}   {seconds:.1f} s\n")
            out.flush()


_deadlines: list[float] = []
"""ends of the time limits that hold, on the clock of :func:`time.perf_counter`"""


@contextmanager
def limited_time(seconds: float | None) -> Iterator[None]:
    """Searches inside end after ``seconds`` with the best that they have; None: no limit."""
    if seconds is None:
        yield
        return
    _deadlines.append(time.perf_counter() + seconds)
    try:
        yield
    finally:
        _deadlines.pop()


def is_time_up() -> bool:
    """Whether a limit of :func:`limited_time` has passed."""
    return bool(_deadlines) and time.perf_counter() > min(_deadlines)


@contextmanager
def infrequent_gc() -> Iterator[None]:
    """Let Python's garbage collector run less often, and on young objects only.
    A compile creates millions of lasting objects; scanning them repeatedly takes a quarter of its
    time."""
    before = gc.get_threshold()
    if 0 < before[0] < _GC_THRESHOLDS[0]:
        gc.set_threshold(*_GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)

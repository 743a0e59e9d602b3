"""Progress display of long compile phases on terminals, and less garbage collection during them."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

SILENT_SECONDS = 2.0
"""seconds before a phase is shown"""
_GC_THRESHOLD = 50_000
"""threshold of the young generation, in objects"""


@contextmanager
def shown_progress(name: str, stream: TextIO | None = None) -> Iterator[None]:
    """Show ``name`` and elapsed seconds on ``stream`` (default: stderr) after two seconds.

    Silent if the stream is no terminal, and under torchrun on every rank but the first.
    """
    out = sys.stderr if stream is None else stream
    if not out.isatty() or os.environ.get("RANK", "0") != "0":
        yield
        return
    begin, done = time.perf_counter(), threading.Event()

    def show() -> None:
        wait = SILENT_SECONDS
        while not done.wait(wait):
            out.write(f"\rautoshard: {name} … {time.perf_counter() - begin:.0f} s")
            out.flush()
            wait = 1.0

    thread = threading.Thread(target=show, name=f"autoshard {name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        seconds = time.perf_counter() - begin
        if seconds >= SILENT_SECONDS:
            out.write(f"\rautoshard: {name}   {seconds:.1f} s\n")
            out.flush()


@contextmanager
def infrequent_gc() -> Iterator[None]:
    """Let Python's garbage collector run less often, and on young objects only.

    A compile creates millions of lasting objects; scanning them repeatedly takes a quarter of its
    time.
    """
    before = gc.get_threshold()
    if 0 < before[0] < _GC_THRESHOLD:
        gc.set_threshold(_GC_THRESHOLD, 1000, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)

"""Say on a terminal which stage runs when it takes long; say nothing anywhere else."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

PATIENCE = 2.0
"""seconds of silence"""


@contextmanager
def stage(name: str, stream: TextIO | None = None) -> Iterator[None]:
    """Show ``name`` and the elapsed seconds on ``stream`` (default: stderr) once the body takes over two seconds.

    Silent where the stream is no terminal, and on every rank but the first under torchrun.
    """
    out = sys.stderr if stream is None else stream
    if not out.isatty() or os.environ.get("RANK", "0") != "0":
        yield
        return
    begin, done = time.perf_counter(), threading.Event()

    def show() -> None:
        wait = PATIENCE
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
        if seconds >= PATIENCE:
            out.write(f"\rautoshard: {name}   {seconds:.1f} s\n")
            out.flush()

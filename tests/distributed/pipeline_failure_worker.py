"""Two gloo ranks in pipeline stages, of which rank 1 is killed in the middle of a schedule; the result is what rank 0 sees.

Started by test_failures_gloo.py.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any, TextIO

import torch
from failure_worker import Net, main

import autoshard


def run(rank: int, said: TextIO) -> None:
    x = torch.ones(8, 6)
    sharded: Any = autoshard.compile(Net(), {"pp": 2}, (x,), stages="pp", micro_batches=4)
    sharded(x).backward()
    begin, right = time.monotonic(), sharded._results

    def killed(part: Any, inputs: Any) -> Any:
        if sharded._comm.micro_batch[0] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return right(part, inputs)

    if rank == 1:
        object.__setattr__(sharded, "_results", killed)
    try:
        sharded(x)
    except Exception as error:
        print(f"{time.monotonic() - begin:.2f} s: {type(error).__name__}: {error}", file=said)


if __name__ == "__main__":
    main(run)

"""One of two gloo ranks in pipeline stages, of which rank 1 is killed in the middle of a schedule; rank 0 prints what it sees.

Arguments: rank, rendezvous. Started by test_pipeline_gloo.py.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from failure_worker import Net

import autoshard


def main() -> None:
    rank, rendezvous = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
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
        print(f"{time.monotonic() - begin:.2f} s: {type(error).__name__}: {error}", flush=True)
    os._exit(0)  # as a script that ends, without torch's own way out


if __name__ == "__main__":
    main()

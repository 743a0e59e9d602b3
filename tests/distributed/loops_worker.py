"""One rank of a gloo world that runs training loops, sharded; see test_loops_gloo.py."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import loops
import world


def main(rank: int, ranks: int, rendezvous: str, result: str) -> None:
    os.environ["LOCAL_RANK"] = str(rank)  # Ignite warns without
    world.join(rendezvous, rank, ranks)
    found = {}
    for name in sys.argv[4].split(","):
        if name == "ignite" and not importlib.util.find_spec("ignite"):
            continue
        folder = Path(result).parent / f"{name}{rank}"
        folder.mkdir()
        found[name] = loops.run(name, str(folder), sharded=True)
    if rank == 0:
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    world.main(main)

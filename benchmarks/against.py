"""How long plans and compilations of small models take, in this tree and, round by round in turn, in another one.

    git worktree add ../before SOME_COMMIT
    python benchmarks/against.py ../before --seconds 200

Processor seconds of one thread, each the least of three calls after one that is not counted (imports, tables that are kept).
The ratio is the median over the rounds. Only what both trees have is run: the reference models, ``plan`` and ``compile``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent.parent
CALLS = 3


def worker() -> None:
    import torch
    from torch import nn

    import autoshard
    from autoshard import models

    torch.set_num_threads(1)
    convolutions = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    cases: dict[str, Any] = {"convolutions": (lambda: convolutions, ((torch.randn(8, 3, 32, 32),), {}))}
    for name in ("mlp", "gpt", "llama", "moe", "vit"):
        reference = models.get(name)
        cases[name] = reference.model, reference.inputs(batch=4)
    mesh = autoshard.Mesh({"dp": 2, "tp": 2}, hardware="h100")
    took: dict[str, list[float]] = {}
    for name, (model, (args, kwargs)) in cases.items():
        for what in ("plan", "compile"):
            for call in range(CALLS + 1):
                made, start = model(), time.process_time()
                getattr(autoshard, what)(made, mesh, args, kwargs)
                if call:
                    took.setdefault(f"{name} {what}", []).append(time.process_time() - start)
    print(json.dumps({name: min(each) for name, each in took.items()}))


def measured(tree: Path) -> dict[str, float]:
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__, "--worker"]
    done = subprocess.run(command, env=env, cwd=tree, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"in {tree}:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", nargs="?", type=Path, help="the root of another checkout; default: none")
    parser.add_argument("--seconds", type=float, default=60.0, help="no round begins later")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        worker()
        return
    trees = [HERE] if asked.other is None else [HERE, asked.other.resolve()]
    start, rounds = time.monotonic(), list[list[dict[str, float]]]()
    while not rounds or time.monotonic() - start < asked.seconds:
        rounds.append([measured(tree) for tree in trees])
        show(rounds)  # what there is, should it be stopped


def show(rounds: list[list[dict[str, float]]]) -> None:
    """Least seconds of each tree, and the median of the ratios."""
    count = len(rounds[0])
    titles = ("this", "other", "this/other")[: 2 * count - 1]
    print(f"{len(rounds)} rounds, processor seconds\n{'':22}" + "".join(f"{title:>12}" for title in titles))
    for name in rounds[0][0]:
        row = [min(each[side][name] for each in rounds) for side in range(count)]
        row += [statistics.median(each[0][name] / each[1][name] for each in rounds)] if count > 1 else []
        print(f"{name:22}" + "".join(f"{figure:12.3f}" for figure in row))
    print(flush=True)


if __name__ == "__main__":
    main()

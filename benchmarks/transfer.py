"""Weights from one layout to another on gloo ranks: seconds of autoshard.transfer and of the usual ways.

``python benchmarks/transfer.py [--ranks 4] [--megabytes 500]`` prints a table: the transfer; (a) each full tensor is
gathered on every rank, which keeps its shard; (b) the source is saved by torch.distributed.checkpoint, and the target
loads the folder, on the local disk. All read the same trainer (FSDP, and tensor parallel on four ranks) and fill the
same tensor-parallel generator; times are medians of ``--rounds`` after a first, of the slowest rank.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import worlds
from torch import nn

import autoshard


def model(megabytes: int) -> nn.Module:
    """Eight layers of equal size in float32."""
    width = int((megabytes * 1e6 / 4 / 8 / 8) ** 0.5) // 16 * 16
    layers = [
        layer for _ in range(8) for layer in (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    ]
    return nn.Sequential(*layers)


def seconds(do: Callable[[], object]) -> float:
    """Of the slowest rank."""
    dist.barrier()
    began = time.perf_counter()
    do()
    taken = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def measure(ranks: int, megabytes: int, rounds: int) -> None:
    mesh = {"dp": 2, "tp": ranks // 2} if ranks > 2 else {"dp": 2}
    like = {"dp": "fsdp", "tp": "megatron"} if ranks > 2 else "fsdp"
    torch.manual_seed(0)
    x = torch.zeros(8, model(megabytes)[0].in_features)  # type: ignore[index]
    torch.manual_seed(0)
    source = autoshard.compile(model(megabytes), mesh, (x,), like=like)
    torch.manual_seed(1)
    target = autoshard.compile(model(megabytes).eval(), {"tp": ranks}, (x,), like="megatron", training=False)
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
    folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(folder)

    def gathered() -> None:
        target.load_full_state_dict(source.full_state_dict())

    def by_files() -> None:
        dcp.save(source.state_dict(), checkpoint_id=folder[0])
        state = target.state_dict()
        dcp.load(state, checkpoint_id=folder[0])
        target.load_state_dict(state)

    report = autoshard.transfer(source, target)
    ways = {
        "autoshard.transfer": lambda: autoshard.transfer(source, target),
        "(a) gather whole, cut": gathered,
        "(b) DCP save and load": by_files,
    }
    rows = {name: statistics.median([seconds(do) for _ in range(rounds + 1)][1:]) for name, do in ways.items()}
    have, found = source.full_state_dict(), target.full_state_dict()
    assert all(torch.equal(have[n], found[n]) for n in have)
    if dist.get_rank() == 0:
        size = sum(x.nbytes for x in have.values())
        print(f"{size / 1e6:.0f} MB, {ranks} ranks: {mesh} → {{'tp': {ranks}}}")
        print(report)
        ours, best = rows["autoshard.transfer"], min(s for n, s in rows.items() if n.startswith("("))
        for name, taken in rows.items():
            print(f"  {name:<24} {taken * 1e3:8.0f} ms")
        print(f"  of the better of (a), (b): {ours / best:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--rendezvous", type=Path)
    options = parser.parse_args()
    if options.rank is None:
        sys.exit(worlds.launch(__file__, sys.argv[1:], options.ranks))
    worlds.join(options.rank, options.ranks, options.rendezvous)
    measure(options.ranks, options.megabytes, options.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

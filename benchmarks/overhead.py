"""Milliseconds per forward of a tiny model: one device, its collectives alone, and two gloo ranks.

    python benchmarks/overhead.py

Two processes with a thread each. The first calls are compared with the values of their inputs, later ones where they do
not repeat the call before; ``AUTOSHARD_CHECK=inputs`` makes every call a first one, ``replicas`` compares weights and
buffers too. What is above "one device, then the collectives" is the library's. The contestants take turns, so that other
work on the machine meets all of them alike. Processor: median of rank 0.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import worlds
from rich.console import Console
from rich.table import Table
from torch import nn

import autoshard
from autoshard.models import Llama, LlamaConfig
from autoshard.runtime.transport.communicator import Executed

RANKS = 2
WARM_UP = 3
"""turns: more calls than are checked by default"""
TURN = 5
"""calls, of which the first does not count"""


def timed(call: Callable[[], object], calls: int) -> list[tuple[float, float]]:
    """Milliseconds of wall and of processor time of every call."""
    times = []
    for _ in range(calls):
        begin = time.perf_counter(), time.process_time()
        call()
        times.append((1e3 * (time.perf_counter() - begin[0]), 1e3 * (time.process_time() - begin[1])))
    return times


def sharded(model: nn.Module, axis: str, checks: str, batch: tuple[torch.Tensor, ...]) -> nn.Module:
    """Everything that can be cut is cut."""
    os.environ["AUTOSHARD_CHECK"] = checks
    mesh = autoshard.Mesh({axis: RANKS}, hardware="ideal_network")
    return autoshard.compile(model, mesh, batch[:1], {"labels": batch[1]})


def executed(module: nn.Module, batch: tuple[torch.Tensor, ...]) -> list[Executed]:
    """The collectives of a forward."""
    found: list[Executed] = []
    module._comm.log = found
    module(batch[0], labels=batch[1])
    module._comm.log = None
    return found


def alone(collectives: list[Executed]) -> Callable[[], None]:
    """What torch.distributed itself takes for as many collectives that send as many bytes."""
    calls: list[Callable[[], object]] = []
    for kind, _, _, size in collectives:
        x = torch.zeros(round(size / 4) * (1 if kind == "all_reduce" else RANKS))
        if kind == "all_reduce":
            calls.append(lambda x=x: dist.all_reduce(x))
        else:  # every rank has a part for every other one
            calls.append(lambda x=x: dist.all_to_all_single(torch.empty_like(x), x))
    return lambda: [call() for call in calls] and None


def work(calls: int) -> None:
    """One rank; rank 0 prints."""
    torch.manual_seed(0)
    text = torch.randint(0, 128, (4, 65))
    batch = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    model = Llama(LlamaConfig.tiny())
    compiled = {
        "two ranks": sharded(model, "tp", "", batch),
        "two ranks, every call checked": sharded(model, "tp", "inputs", batch),
        "two ranks, replicas checked too": sharded(model, "tp", "inputs,replicas", batch),
    }
    collectives = alone(executed(compiled["two ranks"], batch))
    contestants: dict[str, Callable[[], object]] = {
        "one device": lambda: model(batch[0], labels=batch[1]),
        "the collectives alone": collectives,
        "one device, then the collectives": lambda: (model(batch[0], labels=batch[1]), collectives()),
        **{name: lambda m=module: m(batch[0], labels=batch[1]) for name, module in compiled.items()},
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for turn in range(-WARM_UP, calls // TURN):
        for name, call in contestants.items():
            dist.barrier()
            found = timed(call, TURN)
            times[name] += found[1:] if turn >= 0 else []
    table = Table("ms per forward, in training", "median", "lower quartile", "processor")
    for name, found in times.items():
        wall = [w for w, _ in found]
        row = statistics.median(wall), statistics.quantiles(wall)[0], statistics.median(cpu for _, cpu in found)
        table.add_row(name, *(f"{t:.2f}" for t in row))
    count = len(executed(compiled["two ranks"], batch))
    if dist.get_rank() == 0:
        Console(width=110).print(table, f"{count} collectives in a forward", sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--rendezvous")
    options = parser.parse_args()
    if options.rank is None:
        sys.exit(worlds.launch(__file__, ["--calls", str(options.calls)], RANKS))
    worlds.join(options.rank, RANKS, options.rendezvous)
    work(options.calls)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

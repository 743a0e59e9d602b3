"""Steps of a pipeline on gloo ranks beside their prediction: ``torchrun --nproc-per-node 2 benchmarks/pipeline_step.py``.

The machine is measured first, by the ranks together. A model whose layers differ is cut at every place between two layers (for
more ranks: in every way), and where it would be, if that is elsewhere; the cuts take turns of a few steps, so that whatever
else the machine does meets all alike, and the medians of the slowest rank are compared: with what was predicted for each cut,
and the cut that would be chosen with the best. Nothing else may run beside: a rank that waits for the processor looks like one
that waits for a message. On a busy machine the least of many rounds says more. A step in which a virtual machine did not have
its cores (steal time) is not counted, as long as others are left. Freed memory stays with the processes: calibration has no
page faults either.

``--memory``: instead, the resident memory of every rank that holds its stage of a GPT of 200 M parameters.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import worlds
from torch import Tensor, nn

import autoshard
from autoshard.compiler import capture_graph, compile_graph
from autoshard.models import Gpt, GptConfig
from autoshard.passes.ir.text import show_bytes, show_seconds
from autoshard.passes.microbatch import micro_batched
from autoshard.passes.pipeline.schedules import SCHEDULES
from autoshard.plans.options import CompileOptions, KnownLayouts

STEPS = 3
"""steps of a cut one after another; the first is not counted: what others did since its last turn emptied the caches"""
FINAL = 4
"""those measured the fastest, which race again, with the chosen one: the best of many medians is partly luck"""
WARM_UP = 3
"""rounds, of more calls than are compared with their inputs by default"""


class Uneven(nn.Module):
    """Residual layers of different widths."""

    def __init__(self, width: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, n), nn.GELU(), nn.Linear(n, width)) for n in widths)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(x, y)


@dataclass
class Cut:
    """Where the graph is cut, what its step should take, and what it took."""

    name: str
    sharded: Any
    predicted: float
    steps: list[worlds.Taken] = field(default_factory=list)

    @property
    def taken(self) -> list[float]:
        """Seconds of the steps that count."""
        return [taken.wall for taken in worlds.counted(self.steps)]

    @property
    def median(self) -> float:
        return statistics.median(self.taken)


def cuts(model: nn.Module, args: tuple[Tensor, ...], mesh: autoshard.Mesh, count: int) -> tuple[list[Cut], str]:
    """A compiled module per way to cut between layers, and the name of the one that is chosen."""
    graph = capture_graph(model, args, {}, training=True)
    nodes = micro_batched(graph, count)[0].nodes
    layers = [int(n.fqn.split(".")[1]) if n.fqn.startswith("blocks.") else -1 for n in nodes]
    places = {layers.index(n): n for n in range(1, max(layers) + 1)}
    staged = compile_graph(graph, mesh, CompileOptions(stages="pp", micro_batches=count)).plan.staged
    assert staged is not None
    chosen, found = staged.boundaries, []
    for cut in dict.fromkeys([*itertools.combinations(places, mesh.size - 1), chosen]):
        plan = compile_graph(
            graph, mesh, CompileOptions(stages="pp", micro_batches=count), KnownLayouts(boundaries=cut)
        ).plan
        sharded = autoshard.compile(model, mesh, args, stages="pp", micro_batches=count, plan=plan)
        found.append(Cut(named(cut, places), sharded, plan.cost.total_s - plan.cost.optimizer_s))
    return found, named(chosen, places)


def schedules(model: nn.Module, args: tuple[Tensor, ...], mesh: autoshard.Mesh, count: int) -> tuple[list[Cut], str]:
    """A compiled module per schedule, and the name of the one that is predicted the fastest."""
    found = []
    for name in SCHEDULES:
        sharded = autoshard.compile(model, mesh, args, stages="pp", micro_batches=count, schedule=name)
        cost = sharded.plan.cost
        found.append(Cut(name, sharded, cost.total_s - cost.optimizer_s))
    return found, min(found, key=lambda c: c.predicted).name


def named(cut: Sequence[int], places: Mapping[int, int]) -> str:
    """A way to cut by the first layers of its later stages, or operations. ``places``: operation → layer that it begins."""
    layers = [places[place] for place in cut if place in places]
    what, numbers = ("before", layers) if len(layers) == len(cut) else ("operations", cut)
    return f"{what} {', '.join(map(str, numbers))}"


def stepped(cut: Cut, args: tuple[Tensor, ...]) -> None:
    cut.sharded(*args).backward()


def race(found: Sequence[Cut], args: tuple[Tensor, ...], rounds: int, seconds: float) -> None:
    """A few steps of every cut a round, for so many rounds or seconds."""
    spent = 0.0  # as all ranks have it
    for number in range(rounds + WARM_UP):
        for cut, step in itertools.product(found, range(STEPS)):
            cut.sharded.zero_grad()
            took = worlds.timed(partial(stepped, cut, args))[1]
            spent += took.wall
            if number >= WARM_UP and step:
                cut.steps.append(took)
        if spent > seconds and number > WARM_UP:
            break


def steps(options: argparse.Namespace) -> None:
    hardware = autoshard.Hardware.load(options.hardware) if options.hardware else autoshard.calibrate(quick=False)
    mesh = autoshard.Mesh({"pp": dist.get_world_size()}, hardware=hardware)
    torch.manual_seed(0)
    model = Uneven(options.width, [n * options.width for n in (1, 1, 4, 1, 2, 1, 1, 1)[: options.layers]])
    args = tuple(torch.randn(options.rows, options.width) for _ in range(2))
    if options.save and dist.get_rank() == 0:
        hardware.save(options.save)
    measured = schedules if options.schedules else cuts
    found, chosen = measured(model, args, mesh, options.micro_batches)
    race(found, args, options.rounds, options.seconds)
    if dist.get_rank() == 0:
        show(found, chosen, hardware, options)
    fastest = sorted(found, key=lambda c: c.median)[:FINAL]  # the same on all ranks, as times are
    last = [cut for cut in found if cut in fastest or cut.name == chosen]
    for cut in last:
        cut.steps.clear()
    race(last, args, 2 * options.rounds, options.seconds)
    if dist.get_rank() == 0:
        best = min(last, key=lambda c: c.median)
        mine = next(c for c in last if c.name == chosen)
        print("again:", ", ".join(f"{cut.name}: {show_seconds(cut.median)}" for cut in last))
        print(f"best measured: {best.name}; the chosen one takes {mine.median / best.median - 1:+.1%}")


def show(found: Sequence[Cut], chosen: str, hardware: autoshard.Hardware, options: argparse.Namespace) -> None:
    """The table."""
    count, each = sum(len(cut.taken) for cut in found), len(found[0].steps)
    print(f"{hardware.name}; {options.micro_batches} micro-batches, {each} steps of each; {count} of all counted")
    print(f"{'cut':20}{'predicted':>12}{'measured':>12}{'error':>9}{'least':>12}{'error':>9}   quartiles")
    for cut in found:
        low, _, high = statistics.quantiles(cut.taken, n=4)
        least, mark = min(cut.taken), "  chosen" if cut.name == chosen else ""
        times = "".join(f"{show_seconds(x):>12}{cut.predicted / x - 1:>+9.1%}" for x in (cut.median, least))
        print(
            f"{cut.name:20}{show_seconds(cut.predicted):>12}{times}   {show_seconds(low)} … {show_seconds(high)}{mark}"
        )


def memory() -> None:
    """What a rank holds beside an empty process, after a step's gradients are there."""
    mesh = autoshard.Mesh({"pp": dist.get_world_size()}, hardware="cpu")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    config = GptConfig(vocab=16000, positions=64, width=1024, heads=16, layers=14, dropout=0.0)
    model = autoshard.deferred_init(Gpt, config)
    whole = sum(p.numel() * p.itemsize for p in model.parameters())
    torch.manual_seed(0)
    ids = torch.randint(0, config.vocab, (4, 32))
    sharded = autoshard.compile(model, mesh, (ids, ids), stages="pp", micro_batches=4)
    held = sum(p.to_local().nbytes for p in sharded.parameters())
    made = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sharded(ids, ids).loss.backward()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (held, made - before, after - before))
    if dist.get_rank() == 0:
        print(f"{whole / 4e6:.0f} M parameters, {show_bytes(whole)} in all")
        for rank, (own, compiled, stepped) in enumerate(every):
            print(
                f"rank {rank}: parameters {show_bytes(own)}; peak resident memory beside an empty process "
                f"{show_bytes(compiled)} compiled, {show_bytes(stepped)} after a step with gradients"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--schedules", action="store_true", help="instead of cuts: every schedule, each cut as chosen")
    parser.add_argument("--save", help="a file for what was calibrated")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end the race after so long")
    parser.add_argument("--hardware", help="what calibrate() saved (default: it runs first)")
    parser.add_argument("--layers", type=int, default=8, help="at most 8")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--micro-batches", type=int, default=4)
    options = parser.parse_args()
    if not options.memory:
        worlds.keep()
    worlds.pin(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    dist.init_process_group("gloo")
    memory() if options.memory else steps(options)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

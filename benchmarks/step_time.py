"""Step time on gloo ranks: plans by an expert's name and the free plan against DDP, FSDP2 and parallelize_module.

    python benchmarks/step_time.py --steps 20
    python benchmarks/step_time.py --models vit:middle --steps 60 --worlds 5
    python benchmarks/step_time.py --models gpt:tiny,vit:tiny,mlp:base --ranks 4
    python benchmarks/step_time.py --memory

One thread per process, fp32, forward + backward + fused AdamW. The contestants take turns within one run
(A A A A B B B B … B B B B A A A A …), so that whatever else the machine does meets all of them alike; the first step of a
turn, which follows another model's, does not count. A step's time is that of the slowest
rank; the table shows median and quartiles, and the ratio of medians to what each is measured against. CPU: processor
time of the busiest rank, which other work on the machine disturbs less. Steps in which a virtual machine did not have its
cores (steal time) do not count; the table says how many do. ``--memory``: instead, the peak of resident memory that a world
with one contestant alone adds to that of a world without a model.
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import six_models
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
import worlds
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import autoshard

WARM_UP = 9
"""steps: more calls than are compared with their inputs by default"""

HANDLERS: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
TORCHS = dict(HANDLERS)
"""how DTensor carries out operations before a module of ours has it step on parts: the peers keep it so"""

Step = Callable[[], float]
"""one training step of this rank; returns the loss"""


@dataclass(frozen=True)
class Task:
    """A model, and the global batch that every rank has."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rows: int

    @staticmethod
    def of(name: str, batch: int = 0, sequence: int = 0) -> Task:
        """``batch``, ``sequence``: 0 for the model's own."""
        torch.manual_seed(0)
        sizes = {"batch": batch, "seq": sequence}
        args, kwargs = six_models.get(name).inputs(**{n: size for n, size in sizes.items() if size})
        return Task(name, tuple(args), dict(kwargs), len(args[0]))

    def model(self) -> nn.Module:
        """The same weights for everybody; no dropout, which ranks would draw differently."""
        torch.manual_seed(0)
        return six_models.get(self.name).model().eval()

    def mine(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """This rank's part of the batch."""
        rank, ranks = dist.get_rank(), dist.get_world_size()

        def part(x: Tensor) -> Tensor:
            return x.chunk(ranks)[rank].contiguous() if x.ndim and x.shape[0] == self.rows else x

        found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(Tensor, part, (self.args, self.kwargs))
        return found


@dataclass(frozen=True)
class Contestant:
    """``against``: the contestants to whose best median its ratio is taken, and the ratio it should not exceed."""

    name: str
    make: Callable[[Task], Step]
    against: tuple[str, ...] = ()
    target: float = 0.0
    only: str = ""
    """family of models that it is for; "": all"""


def loss_of(out: Any) -> Tensor:
    """The model's loss; of a bare tensor the mean square."""
    found: Tensor = out.square().mean() if isinstance(out, Tensor) else out.loss
    return found


class TrainingStep:
    """Forward, backward and fused AdamW. ``phases``: seconds of these three, of every step."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        self.phases: list[tuple[float, float, float]] = []

    def __call__(self) -> float:
        begin = time.perf_counter()
        loss = loss_of(self.model(*self.args, **self.kwargs))
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.phases.append((forward - begin, backward - forward, time.perf_counter() - backward))
        return float(loss.detach())

    def medians(self, row: int = 1) -> list[float]:
        """Of the phases of the steps that :func:`race` timed."""
        timed = [x for i, x in enumerate(self.phases) if i >= row * warm_up(row) and worlds.is_timed(i % row, row)]
        return [statistics.median(x) for x in zip(*timed, strict=True)]


def ours(like: str | None, axis: str) -> Callable[[Task], Step]:
    """Ours takes the global batch on every rank."""

    def make(task: Task) -> Step:
        mesh = autoshard.Mesh({axis: dist.get_world_size()}, hardware="cpu")
        sharded = autoshard.compile(task.model(), mesh, task.args, dict(task.kwargs), like=like)
        return TrainingStep(sharded, task.args, task.kwargs)

    return make


def as_torch_does(step: Step) -> Step:
    """``step`` with DTensor's own handling of every operation."""

    def alone() -> float:
        ours = dict(HANDLERS)
        HANDLERS.clear()
        HANDLERS.update(TORCHS)
        try:
            return step()
        finally:
            HANDLERS.update(ours)

    return alone


def mean(step: Step) -> Step:
    """The loss of all ranks, as ours gives it."""

    def whole() -> float:
        loss = torch.tensor(step())
        dist.all_reduce(loss)
        return float(loss) / dist.get_world_size()

    return whole


def ddp(task: Task) -> Step:
    """DistributedDataParallel on this rank's part of the batch."""
    return mean(TrainingStep(DistributedDataParallel(task.model()), *task.mine()))


def fsdp2(task: Task) -> Step:
    """FSDP2 with a unit per repeated module."""
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), task.model()
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return as_torch_does(mean(TrainingStep(model, *task.mine())))


def tensor_parallel(task: Task) -> Step:
    """torch's parallelize_module with the plan torchtitan has for Llama, without sequence parallelism."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model: Any = task.model()
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, {"embedding": RowwiseParallel(input_layouts=Replicate()), "head": head})
    plan: dict[str, Any] = {f"attention.{n}": ColwiseParallel() for n in "qkv"}
    plan |= {"attention.out": RowwiseParallel(), "feed_forward.down": RowwiseParallel()}
    plan |= {"feed_forward.gate": ColwiseParallel(), "feed_forward.up": ColwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    tokens, labels = task.args[0], task.kwargs["labels"]
    # Fused AdamW does not take plain tensors and DTensors in one list.
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizers = [torch.optim.AdamW(group, lr=1e-3, fused=True) for group in (sharded, whole)]

    def step() -> float:
        with loss_parallel():
            logits = model(tokens).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.detach().full_tensor())

    return as_torch_does(step)


def one_process(task: Task) -> Step:
    """The whole batch on rank 0, while the other ranks wait."""
    if dist.get_rank():
        return lambda: float("nan")
    return TrainingStep(task.model(), task.args, task.kwargs)


CONTESTANTS = (
    Contestant('like="ddp"', ours("ddp", "dp"), ("DDP",), 1.02),
    Contestant("DDP", ddp, ("one process",)),
    Contestant('like="fsdp"', ours("fsdp", "dp"), ("FSDP2",), 1.0),
    Contestant('like="zero1"', ours("zero1", "dp"), ("DDP",)),
    Contestant('like="zero2"', ours("zero2", "dp"), ("FSDP2",)),
    Contestant("FSDP2", fsdp2, ("one process",)),
    Contestant('like="megatron"', ours("megatron", "tp"), ("parallelize_module",), 0.9, "llama"),
    Contestant("parallelize_module", tensor_parallel, ("one process",), 0.0, "llama"),
    Contestant("free plan", ours(None, "x"), ("DDP", "FSDP2", "parallelize_module"), 1.0),
    Contestant("one process", one_process),
)


@dataclass(frozen=True)
class Times:
    """The steps of a contestant."""

    steps: list[worlds.Taken] = field(default_factory=list)

    @property
    def wall(self) -> list[float]:
        """Seconds of the slowest rank, of the steps that count."""
        return [taken.wall for taken in worlds.counted(self.steps)]

    @property
    def median(self) -> float:
        """Of :attr:`wall`."""
        return statistics.median(self.wall)

    @property
    def cpu(self) -> list[float]:
        """Processor seconds of the busiest rank."""
        return [taken.cpu for taken in worlds.counted(self.steps)]


def warm_up(row: int) -> int:
    """Rounds that do not count, of so many steps in a row."""
    return -(-WARM_UP // row)


def race(steps: Mapping[str, Step], count: int, seconds: float = math.inf, row: int = 1) -> dict[str, Times]:
    """Time the contestants in turns, for so many rounds or seconds; says where their losses differ.

    ``row``: steps of a turn, see :func:`worlds.turns`.
    """
    times = {name: Times() for name in steps}
    spent, begun, warm = 0.0, 0.0, warm_up(row)  # seconds spent: as all ranks have them
    for round_ in range(count + warm):
        losses = {}
        for name, place in worlds.turns(steps, round_, row):
            losses[name], took = worlds.timed(steps[name])
            spent += took.wall
            if round_ >= warm and worlds.is_timed(place, row):
                times[name].steps.append(took)
        known = [x for x in losses.values() if x == x]
        begun = begun or abs(known[0])  # what is left of a loss that was learnt by heart is rounding in all of it
        apart = 1e-3 if round_ < warm else 1e-2  # AdamW makes steps of one size of the smallest differences
        if max(known) - min(known) > apart * begun + 1e-6:
            raise SystemExit(f"round {round_}: the losses differ: {losses}")
        if spent > seconds and round_ > warm:
            break
    return times


def report(title: str, chosen: list[Contestant], times: Mapping[str, Times]) -> Table:
    """One row per contestant."""
    table = Table(title=f"{title}, {dist.get_world_size()} gloo ranks, torch {torch.__version__}; ms per step")
    table.add_column("")
    for column in ("counted", "median", "quartiles", "CPU", "ratio", "CPU ratio", "target"):
        table.add_column(column, justify="right")
    wall = {name: t.median for name, t in times.items()}
    cpu = {name: statistics.median(t.cpu) for name, t in times.items()}
    for c in chosen:
        low, _, high = statistics.quantiles(times[c.name].wall, n=4)
        against = [name for name in c.against if name in wall]
        best = min(against, key=lambda name: wall[name], default="")
        ratios = [f"{of[c.name] / of[best]:.2f}" if best else "" for of in (wall, cpu)]
        shown = [f"{s * 1e3:.1f}" for s in (wall[c.name], low, high, cpu[c.name])]
        target = f"≤ {c.target} × {best}" if c.target else f"(to {best})" if best else ""
        count = f"{len(times[c.name].wall)}/{len(times[c.name].steps)}"
        table.add_row(c.name, count, shown[0], f"{shown[1]} … {shown[2]}", shown[3], *ratios, target)
    return table


def compared(chosen: list[Contestant], times: Mapping[str, Times]) -> dict[str, float]:
    """Ratios of medians, to each of those that a contestant is measured against."""
    pairs = ((c, other) for c in chosen if c.target for other in c.against if other in times)
    return {f"{c.name} / {other} (≤ {c.target})": times[c.name].median / times[other].median for c, other in pairs}


def for_model(name: str, only: str) -> list[Contestant]:
    """The contestants for a model; ``only``: names, separated by commas."""
    fits = [c for c in CONTESTANTS if c.only in ("", name.split(":")[0])]
    return [c for c in fits if not only or c.name in only.split(",")]


def rank_main(options: argparse.Namespace) -> None:
    worlds.join(options.rank, options.ranks, options.rendezvous)
    for name in options.models.split(","):
        task = Task.of(name, options.batch, options.sequence)
        chosen = for_model(name, options.only)
        if options.memory:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for contestant in chosen:
                step = contestant.make(task)
                for _ in range(3):
                    step()
            more = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, dtype=torch.float64)
            dist.all_reduce(more, op=dist.ReduceOp.MAX)
            if options.rank == 0:
                print(f"{name}  {options.only}: {float(more) * 1024 / 1e6:.0f} MB", flush=True)
        else:
            steps = {c.name: c.make(task) for c in worlds.shuffled(chosen)}
            times = race(steps, options.steps, options.seconds, worlds.ROW)
            if options.rank == 0:
                Console(width=120).print(report(name, chosen, times))
                for what, ratio in compared(chosen, times).items():
                    worlds.note(f"{name}, {what}", ratio)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama:small", help="names from autoshard.models, separated by commas")
    parser.add_argument("--only", default="", help="contestants, separated by commas (default: all)")
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end the race of a model after so long")
    parser.add_argument("--batch", type=int, default=0, help="rows of the global batch (default: the model's)")
    parser.add_argument("--sequence", type=int, default=0, help="tokens of a row (default: the model's)")
    parser.add_argument("--worlds", type=int, default=1, help="so many times, and medians of the ratios")
    parser.add_argument("--memory", action="store_true", help="peak of resident memory instead, one world each")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    _ = [six_models.get(name) for name in options.models.split(",")]  # raises before a world begins
    if options.rank is not None:
        rank_main(options)
    elif options.memory:
        chosen = {c.name for name in options.models.split(",") for c in for_model(name, options.only)}
        names = [c.name for c in CONTESTANTS if c.name in chosen and c.name != "one process"]
        raise SystemExit(
            max(
                (
                    worlds.launch(__file__, [*sys.argv[1:], "--only", name], options.ranks, keeping=False)
                    for name in names
                ),
                key=abs,
            )
        )
    else:
        raise SystemExit(worlds.launch(__file__, sys.argv[1:], options.ranks, count=options.worlds))


if __name__ == "__main__":
    main()

"""Step time of a 20M-parameter Llama on gloo: autoshard against parallelize_module, DDP and one process.

    python benchmarks/step_time.py --steps 20

Two processes, one thread each, fp32, forward + backward + fused AdamW. The contestants take turns within one run
(A B C … A B C …), so that whatever else the machine does meets all of them alike. A step's time is that of the slower
rank; the table shows median and quartiles, and the ratio of medians to what each is measured against. CPU: processor
time of the busier rank, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import autoshard
from autoshard.models import Llama, LlamaConfig

RANKS = 2
WARM_UP = 2
MEGATRON = {
    "*.[qkv]": "colwise",
    "*.gate": "colwise",
    "*.up": "colwise",
    "*.attention.out": "rowwise",
    "*.down": "rowwise",
    "head": "colwise",
    "embedding.weight": autoshard.Shard(0),
    "tokens": "replicate",
    **{m: autoshard.Replicate() for m in ("embedding", "blocks.?", "*.attention", "*norm")},
}
"""Megatron's tensor parallelism: two all-reduces per layer each way, vocabulary-parallel embedding and loss"""
DATA_PARALLEL = {
    "*weight": "replicate",
    **{m: autoshard.Shard(0) for m in ("tokens", "labels", "embedding", "blocks.?", "*.[qkv]", "*.attention", "*norm")},
    **{m: autoshard.Shard(0) for m in ("*.gate", "*.up", "*.down", "head")},
}
"""DDP: gradients are all-reduced, nothing else"""

Step = Callable[[], float]
"""one training step of this rank; returns the loss"""


@dataclass(frozen=True)
class Contestant:
    """``against``: the contestant whose median its ratio is taken to, and the ratio it should not exceed."""

    name: str
    step: Step
    against: str = ""
    target: float = 0.0


def training_step(model: nn.Module, tokens: Tensor, labels: Tensor) -> Step:
    """Forward, backward and fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> float:
        loss = model(tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def make_model() -> Llama:
    torch.manual_seed(0)
    return Llama(LlamaConfig.small())


def compiled(axes: dict[str, int], hints: dict[str, object] | None, batch: tuple[Tensor, Tensor]) -> Step:
    """Ours takes the global batch on every rank."""
    tokens, labels = batch
    # On the h100 preset the hints leave nothing to choose; on the cpu preset the compiler would still mix schemes.
    mesh = autoshard.Mesh(axes, hardware="cpu" if hints is None else "h100")
    sharded = autoshard.compile(make_model(), mesh, (tokens,), {"labels": labels}, hints=hints)
    if dist.get_rank() == 0:
        counts = Counter(f"{c.kind} {c.phase}" for c in sharded.collectives)
        moved = sum(c.bytes for c in sharded.collectives) / 1e6
        listed = ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
        print(f"ours {axes}{' (no hints)' if hints is None else ''}: {listed}; {moved:.1f} MB per rank", flush=True)
    return training_step(sharded, tokens, labels)


def tensor_parallel(batch: tuple[Tensor, Tensor]) -> Step:
    """torch's parallelize_module with the plan torchtitan has for Llama, without sequence parallelism."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    model = make_model()
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        },
    )
    plan = {f"attention.{n}": ColwiseParallel() for n in "qkv"}
    plan |= {"attention.out": RowwiseParallel(), "feed_forward.down": RowwiseParallel()}
    plan |= {"feed_forward.gate": ColwiseParallel(), "feed_forward.up": ColwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    tokens, labels = batch
    # Fused AdamW does not take plain tensors and DTensors in one list.
    sharded = [p for p in model.parameters() if hasattr(p, "placements")]
    whole = [p for p in model.parameters() if not hasattr(p, "placements")]
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

    return step


def data_parallel(batch: tuple[Tensor, Tensor]) -> Step:
    """DistributedDataParallel on this rank's half of the batch."""
    mine = [x.chunk(RANKS)[dist.get_rank()].contiguous() for x in batch]
    step = training_step(DistributedDataParallel(make_model()), mine[0], mine[1])

    def mean() -> float:
        loss = torch.tensor(step())
        dist.all_reduce(loss)
        return float(loss) / RANKS

    return mean


def one_process(batch: tuple[Tensor, Tensor]) -> Step:
    """The whole batch on rank 0, while the other rank waits."""
    if dist.get_rank():
        return lambda: float("nan")
    return training_step(make_model(), *batch)


@dataclass(frozen=True)
class Times:
    """Seconds per step: of the slower rank, and processor time of the busier rank."""

    wall: list[float]
    cpu: list[float]


def race(contestants: list[Contestant], steps: int) -> dict[str, Times]:
    """Time the contestants in turns. Their losses have to agree."""
    times = {c.name: Times([], []) for c in contestants}
    for round_ in range(steps + WARM_UP):
        losses = {}
        for c in contestants:
            dist.barrier()
            begin = time.perf_counter(), time.process_time()
            losses[c.name] = c.step()
            took = torch.tensor([time.perf_counter() - begin[0], time.process_time() - begin[1]])
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if round_ >= WARM_UP:
                times[c.name].wall.append(float(took[0]))
                times[c.name].cpu.append(float(took[1]))
        known = [x for x in losses.values() if x == x]
        if max(known) - min(known) > 1e-3 * abs(known[0]):
            raise SystemExit(f"round {round_}: the losses differ: {losses}")
    return times


def report(contestants: list[Contestant], times: dict[str, Times]) -> Table:
    """One row per contestant."""
    table = Table(title=f"{RANKS} gloo ranks, one thread each, torch {torch.__version__}; ms per step")
    table.add_column("")
    for column in ("median", "quartiles", "CPU", "ratio", "CPU ratio", "target"):
        table.add_column(column, justify="right")
    wall = {name: statistics.median(t.wall) for name, t in times.items()}
    cpu = {name: statistics.median(t.cpu) for name, t in times.items()}
    for c in contestants:
        low, _, high = statistics.quantiles(times[c.name].wall, n=4)
        ratios = [f"{of[c.name] / of[c.against]:.2f}" if c.against else "" for of in (wall, cpu)]
        shown = [f"{s * 1e3:.0f}" for s in (wall[c.name], low, high, cpu[c.name])]
        target = f"≤ {c.target} × {c.against}" if c.target else f"(to {c.against})" if c.against else ""
        table.add_row(c.name, shown[0], f"{shown[1]} … {shown[2]}", shown[3], *ratios, target)
    return table


def rank_main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{options.rendezvous}", rank=options.rank, world_size=RANKS)
    shape = (options.batch, options.sequence + 1)
    text = torch.randint(0, LlamaConfig.small().vocab, shape, generator=torch.Generator().manual_seed(0))
    batch = (text[:, :-1].contiguous(), text[:, 1:].contiguous())
    contestants = [
        Contestant("ours tp=2", compiled({"tp": 2}, MEGATRON, batch), "parallelize_module", 1.0),
        Contestant("ours tp=2, no hints", compiled({"tp": 2}, None, batch), "parallelize_module", 1.0),
        Contestant("parallelize_module", tensor_parallel(batch), "one process"),
        Contestant("ours dp=2", compiled({"dp": 2}, DATA_PARALLEL, batch), "DDP", 1.1),
        Contestant("DDP", data_parallel(batch), "one process"),
        Contestant("one process", one_process(batch)),
    ]
    times = race(contestants, options.steps)
    if options.rank == 0:
        Console(width=110).print(report(contestants, times))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each")
    parser.add_argument("--batch", type=int, default=4, help="sequences of the global batch")
    parser.add_argument("--sequence", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank_main(options)
        return
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *sys.argv, "--rendezvous", f"{folder}/rendezvous"]
        workers = [subprocess.Popen([*command, "--rank", str(r)], env=env) for r in range(RANKS)]
        codes = [worker.wait() for worker in workers]
    raise SystemExit(max(codes, key=abs))


if __name__ == "__main__":
    main()

"""Operations and collectives alone, by size: what the cost model says of them on this machine, and what they take.

    python benchmarks/machine.py --ranks 2 --hardware here.json

Every rank does the same at once, so that what they share is shared as in training. Operations: forward and backward
through autograd, predicted as a plan of that one operation on one device. Collectives: forward, as generated code calls them.
The least of several repetitions, of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import worlds
from torch import Tensor, nn

import autoshard
from autoshard.check.clock import Clock, agreed
from autoshard.check.collective_timing import move_for_kind
from autoshard.runtime.transport.process_group import TorchCommunicator

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


class Operation(nn.Module):
    """One call of some weights, after its first operand, and before others that want no gradient."""

    def __init__(self, call: Callable[..., Tensor], *weights: Tensor) -> None:
        super().__init__()
        self.call = call
        self.weights = nn.ParameterList(nn.Parameter(x) for x in weights)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return self.call(x, *self.weights, *more)


def operations() -> Iterator[tuple[str, Operation, tuple[Tensor, ...]]]:
    """Name → the operation, and its operands beside weights."""
    for rows, inner, columns in (
        (8, 2048, 1024), (16, 2048, 2048), (64, 256, 768), (256, 128, 256), (256, 256, 256), (256, 256, 768),
        (256, 256, 2048), (256, 64, 256), (512, 64, 64), (256, 512, 256), (1024, 256, 256), (130, 256, 128),
    ):  # fmt: skip
        layer = Operation(F.linear, torch.rand(columns, inner))
        yield f"linear {rows} × {inner} × {columns}", layer, (torch.rand(rows, inner),)
    for n in (1 << 8, 1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22):
        yield f"mul {n}", Operation(torch.mul, torch.rand(n)), (torch.rand(n),)
    for n in (1 << 14, 1 << 16, 1 << 18, 1 << 20):
        for name, call in (("relu", F.relu), ("silu", F.silu), ("gelu", F.gelu)):
            yield f"{name} {n}", Operation(call), (torch.randn(n),)
        x = torch.rand(n // 256, 256)
        yield f"softmax {n // 256} × 256", Operation(partial(F.softmax, dim=-1)), (x,)
        norm = Operation(lambda x, w, b: F.layer_norm(x, (256,), w, b), torch.ones(256), torch.ones(256))
        yield f"layer_norm {n // 256} × 256", norm, (x,)
    for batch, heads, keys, width in ((2, 4, 64, 32), (2, 4, 128, 64), (1, 4, 128, 64), (4, 4, 65, 64)):
        q, k, v = (torch.rand(batch, heads, keys, width) for _ in range(3))
        for causal in (False, True):
            call = Operation(partial(F.scaled_dot_product_attention, is_causal=causal), k, v)
            yield f"attention{' causal' * causal} {batch, heads, keys, width}", call, (q,)
    for batch, channels, filters in ((8, 3, 48), (8, 48, 48), (4, 48, 48), (16, 48, 24), (16, 24, 48)):
        layer = Operation(partial(F.conv2d, padding=1), torch.rand(filters, channels, 3, 3))
        yield f"convolution {batch} × {channels} → {filters}", layer, (torch.rand(batch, channels, 32, 32),)
    for rows, looked_up in ((2048, 256), (60000, 512), (60000, 256)):
        yield (
            f"embedding {looked_up} of {rows}",
            Operation(F.embedding, torch.rand(rows, 64)),
            (torch.randint(0, rows, (looked_up,)),),
        )
    for rows, classes in ((256, 2048), (256, 4096), (128, 4096)):
        labels = torch.randint(0, classes, (rows,))
        yield f"cross_entropy {rows} × {classes}", Operation(F.cross_entropy), (torch.rand(rows, classes), labels)


def measured(module: Operation, operands: tuple[Tensor, ...]) -> Callable[[], object]:
    """Forward and backward, without a sum to a scalar."""
    out = module(*operands)
    wanting = [x for x in (*operands, *module.parameters()) if x.requires_grad]
    gradient = torch.ones_like(out)
    return lambda: torch.autograd.grad(module(*operands), wanting, gradient)


def updates() -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Fused AdamW of so many parameters of so many elements."""
    for count, size in ((1, 1 << 10), (16, 1 << 10), (64, 1 << 10), (16, 1 << 16), (4, 1 << 20), (1, 1 << 22)):
        parameters = [nn.Parameter(torch.rand(size)) for _ in range(count)]
        for p in parameters:
            p.grad = torch.rand(size)
        yield f"AdamW {count} × {size}", count * size, torch.optim.AdamW(parameters, fused=True).step


def work(options: argparse.Namespace) -> None:
    """One rank; the first prints."""
    worlds.join(options.rank, options.ranks, options.rendezvous)
    clock = Clock(torch.device("cpu"), 6)
    if not options.hardware.exists():
        found = autoshard.calibrate(quick=False)
        if options.rank == 0:
            found.save(options.hardware)
        dist.barrier()
    hardware = autoshard.Hardware.load(options.hardware)
    rows: list[tuple[str, float, float]] = []

    def row(name: str, predicted: float, call: Callable[[], object]) -> None:
        rows.append((name, predicted, agreed(clock.seconds(call, together=True), max)))
        if options.rank == 0:
            _, said, took = rows[-1]
            print(f"{name:34}{said * 1e6:12.1f}{took * 1e6:12.1f}{said / took:8.2f}", flush=True)

    if options.rank == 0:
        print(hardware, f"\n{'µs':34}{'predicted':>12}{'measured':>12}{'ratio':>8}")
    for kind in KINDS:
        comm = TorchCommunicator({"ranks": options.ranks}, range(options.ranks))
        for exponent in range(6, 23, 2):
            move, shape = move_for_kind(kind, options.ranks, 1 << exponent)
            x = torch.ones(shape)
            bytes_ = move.ring_bytes(x, options.ranks)
            said = hardware.route(options.ranks, 1).seconds(bytes_, kind)
            row(f"{kind} {4 << exponent} B", said, partial(comm.execute, move, x, "forward"))
    one = autoshard.Mesh({"x": 1}, hardware=hardware)
    for name, module, operands in operations():
        wanting = tuple(x.requires_grad_(x.is_floating_point()) for x in operands)
        plan = autoshard.plan(module, one, wanting, training=True)
        row(name, plan.cost.compute_s - plan.cost.optimizer_s, measured(module, wanting))
    for name, elements, step in updates():
        row(name, hardware.update_seconds(7 * 4 * elements), step)
    if options.rank == 0 and options.json:
        options.json.mkdir(parents=True, exist_ok=True)
        (options.json / f"machine-{options.ranks}.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument(
        "--hardware", type=Path, help="what calibrate() saved, or shall save: it runs first where there is none"
    )
    parser.add_argument("--json", type=Path, help="a folder for the table")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", type=Path, help=argparse.SUPPRESS)
    options: Any = parser.parse_args()
    if options.rank is not None:
        work(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        more = ["--ranks", str(options.ranks), "--hardware", str(options.hardware or Path(folder) / "hardware.json")]
        more += ["--json", str(options.json)] if options.json else []
        sys.exit(worlds.launch(__file__, more, options.ranks))


if __name__ == "__main__":
    main()

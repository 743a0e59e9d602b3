"""A decoding step on one device: what a call of a sharded module costs beside eager torch, inside CUDA graphs, compiled.

    python benchmarks/decode_gpu.py                                  # one GPU; the shapes of Llama-3-8B, 8 layers
    python benchmarks/decode_gpu.py --width 512 --layers 4           # small kernels: what Python costs
    python benchmarks/decode_gpu.py --device cpu --width 64          # without graphs

A mesh of one rank, {"tp": 1}: nothing is sent, so what differs from eager is the call itself. The model keeps its cache in
buffers of one size, as gpt-fast does. Every contestant begins with the same tokens as eager, and its logits have to agree; one
that fails says why. ``one process``: ranks as threads; ``NCCL`` (gloo on a CPU): a process group of one rank. ``graph``: the
step captured once in a CUDA graph, and replayed. Medians; time ends when the device is done.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard

START, CHECKED = 8, 6
Step = Callable[[], torch.Tensor]


def head_of(width: int) -> int:
    """Numbers of an attention head."""
    return 128 if width >= 2048 else 32


class Attention(nn.Module):
    def __init__(self, width: int, batch: int, length: int) -> None:
        super().__init__()
        self.head, groups = head_of(width), max(2, width // head_of(width) // 4)
        inner = groups * self.head
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(batch, groups, length, self.head))

    def forward(self, x: torch.Tensor, at: torch.Tensor, turn: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (m(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for m in (self.q, self.k, self.v))
        q, k = (turned(t, turn) for t in (q, k))
        self.keys.index_copy_(2, at, k)
        self.values.index_copy_(2, at, v)
        y = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


def turned(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * turn.cos() + torch.cat((-b, a), -1) * turn.sin()


class Block(nn.Module):
    def __init__(self, width: int, batch: int, length: int) -> None:
        super().__init__()
        hidden = 7 * width // 2
        self.attention, self.norms = (
            Attention(width, batch, length),
            nn.ModuleList(map(nn.RMSNorm, [width] * 2)),
        )
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, at: torch.Tensor, turn: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x), at, turn, mask)
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """tokens [batch, n] at positions [n] → logits."""

    def __init__(self, width: int, layers: int, vocabulary: int, batch: int, length: int) -> None:
        super().__init__()
        self.tokens, self.length = nn.Embedding(vocabulary, width), length
        self.blocks = nn.ModuleList(Block(width, batch, length) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("rates", 5e5 ** -(torch.arange(0, head_of(width), 2) / head_of(width)).repeat(2))

    def forward(self, tokens: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x, mask = self.tokens(tokens), torch.arange(self.length, device=at.device) <= at[:, None]
        turn = at[:, None] * self.rates
        for block in self.blocks:
            x = block(x, at, turn.to(x.dtype), mask)
        return self.head(self.norm(x))


class Race:
    """The contestants, each with a model of its own, and where the one that steps is."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, torch.device(options.device)
        torch.manual_seed(0)
        dtype = torch.bfloat16 if self.on_gpu else torch.float32
        with self.device:
            sizes = options.width, options.layers, options.vocabulary, options.batch, options.length
            self.model = Decoder(*sizes).to(dtype).eval()
            self.token = torch.zeros(options.batch, 1, dtype=torch.long)
            self.at = torch.zeros(1, dtype=torch.long)
        self.expected: list[torch.Tensor] = []
        self.rows: list[tuple[str, float, float]] = []
        self.failed: list[str] = []

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def run(self, name: str, make: Callable[[], Any], graph: bool = False) -> None:
        """Check and time what ``make`` gives; an error is a row of its own."""
        try:
            with torch.no_grad():
                begin = time.perf_counter()
                module = make()
                for _ in range(12):  # ranks compare their first calls
                    module(self.token, self.at)
                self.wait()
                ready = time.perf_counter() - begin
                step = self.captured(module) if graph else lambda: module(self.token, self.at)
                self.check(step)
                self.rows.append((name, self.timed(step), ready))
        except Exception as error:  # the others go on
            self.failed.append(f"{name}: {type(error).__name__}: {str(error)[:400]}")

    def captured(self, module: Any) -> Step:
        made, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                module(self.token, self.at)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(made, capture_error_mode="thread_local"):
            found = module(self.token, self.at)

        def step() -> torch.Tensor:
            made.replay()
            return found

        return step

    def check(self, step: Step) -> None:
        found = []
        for number in range(CHECKED):
            self.at.fill_(number)
            self.token.fill_(7 * number + 1)
            found.append(step().float().clone())
        self.expected = self.expected or found
        for own, other in zip(found, self.expected, strict=True):
            error = float((own - other).abs().max() / other.abs().max())
            if not error < (3e-2 if self.on_gpu else 1e-4):
                raise AssertionError(f"the logits are not those of eager: off by {error:.2g}")

    def timed(self, step: Step) -> float:
        """Seconds of a step."""
        times: list[float] = []
        end = time.perf_counter() + self.options.seconds
        while len(times) < 20 or time.perf_counter() < end:
            self.at.fill_(START + len(times) % (self.options.length - START))
            self.wait()
            begin = time.perf_counter()
            step()
            self.wait()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    def print(self) -> None:
        numbers = [x for x in (*self.model.parameters(), *self.model.buffers()) if x is not self.model.tokens.weight]
        size = sum(x.nbytes for x in numbers)
        name = torch.cuda.get_device_name() if self.on_gpu else "CPU, one thread"
        table = Table(title=f"{name}, torch {torch.__version__}: {size / 1e9:.3g} GB are read in a step")
        for column in ("", "µs a step", "of eager", "GB/s", "first calls, s"):
            table.add_column(column, justify="right" if column else "left")
        eager = self.rows[0][1] if self.rows else float("nan")
        for row, seconds, ready in self.rows:
            cells = f"{1e6 * seconds:.0f}", f"{seconds / eager:.2f}", f"{size / seconds / 1e9:.0f}", f"{ready:.1f}"
            table.add_row(row, *cells)
        console = Console(width=120)
        console.print(table)
        for line in self.failed:
            console.print(f"failed: {line}", markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = ("width", 4096), ("layers", 8), ("vocabulary", 32000), ("batch", 1), ("length", 2048)
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each contestant's steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.width % head_of(options.width):
        parser.error("--width is a multiple of 32, from 2048 on of 128")
    torch.set_num_threads(1)
    race = Race(options)

    def sharded() -> Any:
        mesh = (
            {"tp": 1} if not dist.is_initialized() else init_device_mesh(options.device, (1,), mesh_dim_names=("tp",))
        )
        return autoshard.compile(copy.deepcopy(race.model), mesh, training=False)

    def eager() -> Any:
        return copy.deepcopy(race.model)

    @functools.cache
    def compiled(make: Callable[[], Any]) -> Any:  # once: it takes long
        return torch.compile(make())

    race.run("eager", eager)
    race.run("autoshard, one process", sharded)
    race.run("eager, torch.compile", lambda: compiled(eager))
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if race.on_gpu else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/met", rank=0, world_size=1)
        name = f"autoshard, {backend}"
        race.run(name, sharded)
        race.run(f"{name}, torch.compile", lambda: compiled(sharded))
        if race.on_gpu:
            race.run("eager, graph", eager, graph=True)
            race.run(f"{name}, graph", sharded, graph=True)
            race.run("eager, torch.compile, graph", lambda: compiled(eager), graph=True)
            race.run(f"{name}, torch.compile, graph", lambda: compiled(sharded), graph=True)
        race.print()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

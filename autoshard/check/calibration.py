"""Measure this machine: matrix products, memory, launches, collectives, and how much runs beside them, as a Hardware.

Under torch.distributed the ranks measure together, so that what they share (cores, memory, cards) is shared as in training, and
every rank gets the same numbers. In one process, processes with gloo are started for it.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from autoshard.errors import MeshError
from autoshard.hardware import Hardware, Link, Rate, free_memory
from autoshard.mesh import Mesh, MeshLike
from autoshard.runtime.move import Move
from autoshard.runtime.process_group import TorchCommunicator

SHORT, LONG, MOST = 0.002, 0.05, 1000
"""seconds that a repetition takes at least where every rank has a core, and where ranks share cores; the most calls in it"""

USED = {"cpu": torch.float32, "cuda": torch.bfloat16}
"""the dtype that kernels are measured in, if not in several"""

NARROW = (4, 16, 64)
"""lengths of the shortest dim of products"""
KEYS = {"cpu": (32, 128, 512), "cuda": (512, 2048, 8192)}
"""lengths of attention"""
CPU_TILE = 512
"""keys that PyTorch's attention on CPUs leaves out together (kvSplitSize in ATen's native/cpu/FlashAttentionKernel.cpp)"""
CACHED = (1 << 12, 1 << 15, 1 << 17, 1 << 19, 1 << 21)
"""elements of tensors that caches may hold"""
KEPT = 1 << 26
"""bytes of results that a forward keeps before anything is given back"""


def _move(kind: str, ranks: int, size: int) -> tuple[Move, tuple[int, ...]]:
    """The move of ``size`` elements, and the shape of what a rank brings."""
    axes = ("ranks",)
    if kind == "all_reduce":
        return Move("P", "I", axes), (size,)
    if kind == "all_gather":
        return Move("S", "R", axes, 0, size), (size // ranks,)
    if kind == "reduce_scatter":
        return Move("P", "S", axes, 0, size), (size,)
    return Move("S", "S", axes, 0, ranks, 1, size // ranks), (1, size // ranks)


def calibrate(mesh: MeshLike | None = None, quick: bool = True) -> Hardware:
    """What this machine does, measured: to plan for it, or to :meth:`~autoshard.hardware.Hardware.save`.

    Args:
        mesh: its number of ranks says how many processes are started where torch.distributed is not initialised
            (default 2, at most one per GPU, or per core where there is none). Under torch.distributed every process
            measures, and has to call this.
        quick: a few seconds; else more sizes, dtypes and repetitions.

    Rates of collectives are those of groups of all ranks (and of half of them, if not ``quick``); for a cluster run it with
    torchrun once on one node and once across nodes, and put the links together. Raises :class:`MeshError` where the
    processes fail.
    """
    if dist.is_available() and dist.is_initialized():
        return _measured(quick)
    devices = torch.cuda.device_count() or max(2, os.cpu_count() or 2)
    ranks = min(2 if mesh is None else Mesh.of(mesh).size, devices)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "autoshard.check.calibration", "--folder", folder, "--world", str(ranks)]
        command += [] if quick else ["--thorough"]
        threads = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // ranks))}
        environment = {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
        workers = [subprocess.Popen([*command, "--rank", str(r)], env=environment) for r in range(ranks)]
        failed = [w for w in workers if w.wait()]
        if failed:
            raise MeshError(
                f"{len(failed)} of {ranks} processes that measure this machine failed; see their output above"
            )
        return Hardware.load(Path(folder) / "hardware.json")


def _worker() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--thorough", action="store_true")
    for name in ("--rank", "--world"):
        parser.add_argument(name, type=int)
    options = parser.parse_args()
    at = f"file://{options.folder / 'store'}"
    if cuda := torch.cuda.is_available():
        torch.cuda.set_device(options.rank)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, init_method=at, rank=options.rank, world_size=options.world)
    found = _measured(not options.thorough)
    if options.rank == 0:
        found.save(options.folder / "hardware.json")
    dist.barrier()
    dist.destroy_process_group()


def _measured(quick: bool) -> Hardware:
    """Every rank measures; what they found is put together as the slowest rank's."""
    world = dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    clock = _Clock(device, 8 if quick else 16)
    dtypes = [torch.float32, torch.bfloat16] if quick else [torch.float32, torch.float64, torch.bfloat16]
    speeds = [(dtype, _agreed(_product_speed(clock, dtype, quick), min)) for dtype in dtypes]
    bandwidth = _agreed(_bandwidth(clock), min)
    latency = _agreed(_launch(clock), max)
    caches = () if device.type == "cuda" else _caches(clock)
    peak = dict(speeds)[USED[device.type]]
    attention = [(n, *_attention_speed(clock, n, peak)) for n in KEYS[device.type]]
    rates = [
        rate for n in sorted({world} if quick else {world, max(2, world // 2)}) for rate in _rates(clock, n, quick)
    ]
    whole = next((r for r in rates if r.kind == "all_gather" and r.ranks == world), None)
    link = Link(whole.latency if whole else 0.0, whole.bandwidth if whole else 1e12, tuple(rates))
    memory = (
        torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else (free_memory() or 16e9) / _on_this_machine()
    )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return Hardware(
        name=f"{name}, measured",
        flops=max(speed * (1 if dtype.itemsize <= 2 else dtype.itemsize / 2) for dtype, speed in speeds),
        memory_bandwidth=bandwidth,
        memory_bytes=_agreed(memory, min),
        node=link,
        network=link,
        devices_per_node=1 << 30,
        efficiency=1.0,
        kernel_latency=latency,
        overlap=_agreed(_overlap(clock), min) if world > 1 else 0.0,
        memory_efficiency=1.0,
        dtypes=tuple((str(dtype).removeprefix("torch."), speed) for dtype, speed in speeds),
        products=tuple((n, _agreed(_narrow_speed(clock, n), min) / peak) for n in NARROW),
        convolutions=_agreed(_convolution_speed(clock), min) / peak,
        attention=tuple(attention),
        attention_tile=0 if device.type == "cuda" else CPU_TILE,
        caches=caches,
        functions=() if device.type == "cuda" else tuple(_agreed(x, max) for x in _function_seconds(clock)),
        updates=_agreed(_update_speed(clock), min),
    )


def _on_this_machine() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def _agreed(value: float, pick: Callable[[Sequence[float]], float]) -> float:
    """The slowest rank's, or the smallest: the same on every rank."""
    found: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(found, float(value))
    return pick(found)


class _Clock:
    """The least of several repetitions, after one to warm up: what other work on the machine adds is not the machine's.

    Where ranks share cores a repetition goes on for so long that all of them have their turns in it: what is measured
    then is what a rank has of a core, as in training.
    """

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats
        shared = device.type == "cpu" and _on_this_machine() * torch.get_num_threads() > (os.cpu_count() or 1)
        self.long = LONG if shared else SHORT

    def seconds(self, call: Callable[[], object], together: bool = False) -> float:
        """Of one call. ``together``: all ranks begin at once, and call equally often."""
        self._took(call, 1)
        often = max(1, min(MOST, round(self.long / self._took(call, 1))))
        if together:
            often = round(_agreed(often, max))
        found = []
        for _ in range(self.repeats):
            if together:
                dist.barrier()
            found.append(self._took(call, often))
        return min(found)

    def _took(self, call: Callable[[], object], often: int) -> float:
        self._wait()
        begin = time.perf_counter()
        for _ in range(often):
            call()
        self._wait()
        return (time.perf_counter() - begin) / often

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _kept_seconds(clock: _Clock, call: Callable[[], torch.Tensor]) -> float:
    """Of one call, whose result is kept beside those of others until all are given back: in a step results go to memory
    that no cache holds, and that the system may have to map first."""
    count = max(1, min(MOST, KEPT // call().nbytes))

    def forward() -> None:
        kept = [call() for _ in range(count)]
        kept.clear()

    return clock.seconds(forward, together=True) / count


def _product_speed(clock: _Clock, dtype: torch.dtype, quick: bool) -> float:
    """FLOP/s of the best of a few products."""
    sizes = (4096, 8192) if clock.device.type == "cuda" else (256, 512) if quick else (256, 512, 1024)
    speeds = []
    for n in sizes:
        a, b = (torch.randn(n, n, device=clock.device).to(dtype) for _ in range(2))
        speeds.append(2.0 * n**3 / clock.seconds(partial(torch.matmul, a, b), together=True))
    return max(speeds)


def _narrow_speed(clock: _Clock, n: int) -> float:
    """FLOP/s of the three products of a linear layer for ``n`` rows."""
    width = 4096 if clock.device.type == "cuda" else 512
    x, weight = (torch.randn(k, width, device=clock.device, dtype=USED[clock.device.type]) for k in (n, width))

    def products() -> None:
        y = x @ weight.t()
        y @ weight
        y.t() @ x

    return 3 * 2.0 * n * width**2 / clock.seconds(products, together=True)


def _convolution_speed(clock: _Clock) -> float:
    """FLOP/s of a convolution, forward and backward."""
    channels, side, batch = (256, 32, 32) if clock.device.type == "cuda" else (48, 32, 1)
    dtype = USED[clock.device.type]
    x = torch.randn(batch, channels, side, side, device=clock.device, dtype=dtype, requires_grad=True)
    layer = torch.nn.Conv2d(channels, channels, 3, padding=1).to(clock.device, dtype)

    def step() -> None:
        torch.autograd.backward(layer(x).sum())

    return 3 * 2.0 * batch * side**2 * 9 * channels**2 / clock.seconds(step, together=True)


def _bandwidth(clock: _Clock) -> float:
    """Bytes per second that an addition reads and writes, of tensors that fit in no cache."""
    n = 1 << (28 if clock.device.type == "cuda" else 23)
    a, b = (torch.ones(n, device=clock.device) for _ in range(2))
    return 3 * 4 * n / _kept_seconds(clock, partial(torch.add, a, b))


def _caches(clock: _Clock) -> tuple[tuple[float, float], ...]:
    """(bytes, seconds) of products by element of a few sizes, of the same operands again and again."""
    found: list[tuple[float, float]] = []
    for n in (1, *CACHED):
        a, b = (torch.ones(n, device=clock.device) for _ in range(2))
        taken = _agreed(_kept_seconds(clock, partial(torch.mul, a, b)), max)
        found.append((3.0 * 4 * n, max(taken, found[-1][1] if found else 0.0)))
    (_, launch), *rows = found
    return tuple((size, taken - launch) for size, taken in rows)


def _attention_speed(clock: _Clock, keys: int, peak: float) -> tuple[float, float]:
    """What fused attention reaches of ``peak`` FLOP/s, forward and backward, in the dtype that the device is used with."""
    heads, width = (32, 128) if clock.device.type == "cuda" else (8, 64)
    shape, dtype = (1, heads, keys, width), USED[clock.device.type]
    q, k, v = (torch.randn(shape, device=clock.device, dtype=dtype).requires_grad_() for _ in range(3))
    flops = 2 * 2.0 * heads * keys**2 * width
    attend = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v)
    out = attend()
    back = partial(torch.autograd.grad, out, (q, k, v), torch.ones_like(out), retain_graph=True)
    forward, backward = clock.seconds(attend, together=True), clock.seconds(back, together=True)
    return _agreed(flops / forward, min) / peak, _agreed(2.5 * flops / backward, min) / peak


def _function_seconds(clock: _Clock) -> tuple[float, float]:
    """Seconds per element of a softmax that caches hold, forward and backward."""
    x = torch.rand(512, 256, device=clock.device, requires_grad=True)
    out = x.softmax(1)
    back = partial(torch.autograd.grad, out, x, torch.ones_like(out), retain_graph=True)
    forward, backward = (_kept_seconds(clock, call) for call in (partial(x.detach().softmax, 1), lambda: back()[0]))
    return forward / x.numel(), backward / x.numel()


def _update_speed(clock: _Clock) -> float:
    """Bytes per second that fused AdamW reads and writes: of values, gradients and two moments."""
    n = 1 << (28 if clock.device.type == "cuda" else 22)
    p = torch.nn.Parameter(torch.ones(n, device=clock.device))
    p.grad = torch.ones_like(p)
    return 7 * 4 * n / clock.seconds(torch.optim.AdamW([p], fused=True).step, together=True)


def _launch(clock: _Clock) -> float:
    """Seconds of the smallest operation, forward and backward each."""
    x, count = torch.ones(8, device=clock.device, requires_grad=True), 200

    def run() -> None:
        y = x
        for _ in range(count):
            y = y * x
        y.sum().backward()

    return clock.seconds(run, together=True) / (2 * count)


def _rates(clock: _Clock, ranks: int, quick: bool) -> Iterator[Rate]:
    """α and β of every kind among ``ranks`` ranks; groups of that many measure at once. Messages are between two."""
    world = dist.get_world_size()
    if ranks < 2 or world % ranks:
        return
    first = dist.get_rank() // ranks * ranks
    comm = TorchCommunicator({"ranks": ranks}, range(first, first + ranks))
    sizes = (1 << 12, 1 << 17, 1 << 20) if quick else (1 << 10, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        found: list[tuple[float, float]] = []
        for size in sizes:
            move, shape = _move(kind, ranks, size)
            x = torch.ones(shape, device=clock.device)
            taken = clock.seconds(partial(comm.execute, move, x, "forward"), together=True)
            found.append((move.ring_bytes(x, ranks), _agreed(taken, max)))
        yield _line(kind, ranks, found)
    if ranks == world:
        yield _line("permute", 2, [(4.0 * size, _agreed(_message(clock, size), max)) for size in sizes])


def _message(clock: _Clock, size: int) -> float:
    """Seconds of a message of ``size`` elements to the neighbour, while as much comes from it."""
    neighbour = dist.get_rank() ^ 1
    if neighbour >= dist.get_world_size():  # an odd one: the others measure
        return clock.seconds(lambda: None, together=True)
    sent, received = (torch.ones(size, device=clock.device) for _ in range(2))
    both = [dist.P2POp(dist.isend, sent, neighbour), dist.P2POp(dist.irecv, received, neighbour)]

    def exchange() -> None:
        for work in dist.batch_isend_irecv(both):
            work.wait()

    return clock.seconds(exchange, together=True)


def _line(kind: str, ranks: int, found: Sequence[tuple[float, float]]) -> Rate:
    """α and β of (bytes, seconds) that err least, relatively: a line through the ends alone says little of what is between."""
    bytes_, seconds = torch.tensor(found, dtype=torch.float64).unbind(1)
    matrix = torch.stack([1 / seconds, bytes_ / seconds], 1)
    latency, per_byte = (
        torch.linalg.lstsq(matrix, torch.ones(len(found), 1, dtype=torch.float64)).solution.flatten().tolist()
    )
    if per_byte <= 0:  # all take about as long
        per_byte = 1e-15
    return Rate(kind, ranks, max(1e-9, min(latency, found[0][1])), 1.0 / per_byte)


def _overlap(clock: _Clock) -> float:
    """How fast products run while an all-reduce runs beside them: T = C + (1 − η)·M, with about twice as much C as M."""
    x = torch.ones(1 << (26 if clock.device.type == "cuda" else 20), device=clock.device)
    n = 4096 if clock.device.type == "cuda" else 256
    a = torch.randn(n, n, device=clock.device, dtype=USED[clock.device.type])
    moved = clock.seconds(lambda: dist.all_reduce(x), together=True)
    one = clock.seconds(lambda: a @ a)
    count = max(4, int(2 * moved / one))

    def compute() -> None:
        for _ in range(count):
            a @ a

    def both() -> None:
        work = dist.all_reduce(x, async_op=True)
        compute()
        work.wait()

    alone, together = clock.seconds(compute, together=True), clock.seconds(both, together=True)
    return min(1.0, max(0.0, 1.0 - (together - alone) / moved))


if __name__ == "__main__":
    _worker()

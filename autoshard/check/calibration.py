"""``autoshard.calibrate``: speed of this machine's kernels, memory, collectives and overlap.
Under torch.distributed all ranks measure together and share cores, memory and network cards as in
training; all get the same numbers. In one process, worker processes (gloo or NCCL) are started."""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor

from autoshard.check.clock import KERNEL_DTYPES, MOST_CALLS, Clock, agreed, lower_quartile, on_this_machine
from autoshard.check.collective_timing import CollectiveTimes, RankSkew, TimedStep, measured_overlap, stage_host_seconds
from autoshard.errors import MeshError
from autoshard.hardware import PREFETCHED_BUCKETS, Hardware, Link, free_memory
from autoshard.mesh import Mesh, MeshLike
from autoshard.runtime.operations.halo import channels_last

log = logging.getLogger("autoshard")

PRODUCT_LENGTHS = (4, 16, 64, 256)
"""lengths of the shortest dim of matrix products"""
CONVOLUTION_CHANNELS = {"cpu": (64, (3, 8, 12, 16, 24, 32, 48)), "cuda": (256, (3, 16, 32, 64, 128))}
"""many channels of a convolution, and few: both multiples of the vector width and not"""
ATTENTION_LENGTHS = {"cpu": (32, 128, 512), "cuda": (512, 2048, 8192)}
"""sequence lengths of attention"""
CPU_TILE = 512
"""keys per block of PyTorch's CPU attention (kvSplitSize, native/cpu/FlashAttentionKernel.cpp)"""
CACHE_ELEMENTS = (1 << 12, 1 << 15, 1 << 17, 1 << 19, 1 << 21, 1 << 22)
"""elements of tensors that fit into caches or malloc's pool; glibc maps those above 32 MiB anew"""
VISITS = 3
"""passes over all entries: other load on the machine lasts a few seconds, so passes differ in it"""
REPEATS = 4
"""repetitions of an entry in a visit; their mean counts, for messages their median"""
SMALL_OPERATIONS = 5
"""small operations after a matrix product, as in a step"""
MOST_DISTURBED = 0.05
"""share of disturbed measurements above which calibrate() warns"""
KEPT_BYTES = {"cpu": 1 << 25, "cuda": 1 << 26}
"""bytes of results kept alive, so that new results do not fit into caches"""


def calibrate(mesh: MeshLike | None = None, quick: bool = True) -> Hardware:
    """Measure this machine as a :class:`~autoshard.hardware.Hardware`; its ``save`` writes a file.

    Args:
        mesh: its size is the number of worker processes to start (default 2; at most one per GPU,
            or per core without GPUs). Under torch.distributed every process has to call this.
        quick: one minute, two where ranks share cores; else more sizes and dtypes, 1 to 4 minutes.

    All entries are measured in three passes and medians count, so one bad second changes nothing.
    Measurements that steal time disturbed are repeated; if that does not help, a warning and
    :attr:`~autoshard.hardware.Hardware.disturbed` report it. Collectives are measured among all
    ranks (also among half of them, if not ``quick``). For a cluster run it with torchrun on one
    node and across nodes, and combine the links. Raises :class:`MeshError` if a process fails.
    """
    if dist.is_available() and dist.is_initialized():
        return _warned_if_disturbed(_calibrated(quick), dist.get_rank() == 0)
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
            raise MeshError(f"{len(failed)} of {ranks} processes that measure this machine failed: see output above")
        return _warned_if_disturbed(Hardware.load(Path(folder) / "hardware.json"))


def _warned_if_disturbed(hardware: Hardware, here: bool = True) -> Hardware:
    """``hardware``, with a warning if it was disturbed and ``here`` is set (rank 0)."""
    if here and hardware.disturbed > MOST_DISTURBED:
        log.warning(
            "%.0f %% of the measurements of calibrate() were disturbed: the host of this virtual "
            "machine gave its cores to other guests (steal time in /proc/stat). Plans for these "
            "numbers may not be the fastest. Calibrate again when the machine is quiet.",
            100 * hardware.disturbed,
        )
    return hardware


def _calibration_worker() -> None:
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
    found = _calibrated(not options.thorough)
    if options.rank == 0:
        found.save(options.folder / "hardware.json")
    dist.barrier()
    dist.destroy_process_group()
    if not cuda:  # gloo's threads sometimes abort the interpreter's own way out ("terminate called …")
        os._exit(0)


@torch.enable_grad()
def _calibrated(quick: bool) -> Hardware:
    """Measure on all ranks: each entry is the slowest rank's, and the median over visits."""
    world = dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    clock, cuda = Clock(device, REPEATS), device.type == "cuda"
    dtypes = [torch.float32, torch.bfloat16] if quick else [torch.float32, torch.float64, torch.bfloat16]
    large = 8192 if cuda else 512 if quick else 1024
    step, sizes = TimedStep(clock), sorted({world} if quick else {world, max(2, world // 2)})
    sent = [CollectiveTimes(step, n, quick) for n in sizes if n > 1 and world % n == 0]
    waiting = RankSkew(clock) if world > 1 else None
    visits = [_visit(clock, dtypes, large, sent, waiting, quick) for _ in range(VISITS)]
    found = pytree.tree_map(lambda *of: statistics.median(of), *visits)
    known = [
        rate for messages, seconds in zip(sent, found["messages"], strict=True) for rate in messages.rates(seconds)
    ]
    whole = next((r for r in known if r.kind == "all_gather" and r.ranks == world), None)
    link = Link(whole.latency if whole else 0.0, whole.bandwidth if whole else 1e12, tuple(known))
    memory = torch.cuda.mem_get_info(device)[1] if cuda else (free_memory() or 16e9) / on_this_machine()
    name = torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine()
    speeds = dict(zip(dtypes, found["speeds"], strict=True))
    action, carried = found["staged"]
    disturbed = found["disturbed"]
    return Hardware(
        name=f"{name}, measured" + (f" while disturbed ({disturbed:.0%})" if disturbed > MOST_DISTURBED else ""),
        flops=max(speed * (1 if dtype.itemsize <= 2 else dtype.itemsize / 2) for dtype, speed in speeds.items()),
        memory_bandwidth=found["bandwidth"],
        memory_bytes=agreed(memory, min),
        node=link,
        network=link,
        devices_per_node=1 << 30,
        efficiency=1.0,
        kernel_latency=found["launch"],
        overlap=found["overlap"],
        memory_efficiency=1.0,
        dtypes=tuple((str(dtype).removeprefix("torch."), speed) for dtype, speed in speeds.items()),
        products=(*zip(PRODUCT_LENGTHS, found["products"], strict=True), (large, 1.0)),
        convolutions=found["convolutions"],
        channels=tuple(zip(CONVOLUTION_CHANNELS[device.type][1], found["channels"], strict=True)),
        attention=tuple(
            (n, *shares) for n, shares in zip(ATTENTION_LENGTHS[device.type], found["attention"], strict=True)
        ),
        attention_tile=0 if cuda else CPU_TILE,
        caches=found["caches"],
        functions=found["functions"],
        ahead=PREFETCHED_BUCKETS if cuda else 1,
        updates=found["updates"],
        sharing=found["sharing"],
        waiting=tuple(found["waiting"]),
        actions=action,
        carried=carried,
        cpu=not cuda,
        disturbed=disturbed,
    )


def _visit(
    clock: Clock,
    dtypes: Sequence[torch.dtype],
    large: int,
    sent: Sequence[CollectiveTimes],
    waiting: RankSkew | None,
    quick: bool,
) -> dict[str, Any]:
    """One pass over all entries, as a tree of numbers that all ranks agree on; shares are relative
    to the peak of the same visit, since speeds change over time."""
    cpu, world = clock.device.type == "cpu", dist.get_world_size()
    speeds = [agreed(_product_speed(clock, dtype, large), min) for dtype in dtypes]
    peak = speeds[dtypes.index(KERNEL_DTYPES[clock.device.type])]
    bandwidth, launch = agreed(_memory_bandwidth(clock), min), agreed(_launch_seconds(clock), max)
    caches = _cache_seconds(clock) if cpu else ()
    convolutions = agreed(_convolution_speed(clock), min)
    return {
        "speeds": speeds,
        "bandwidth": bandwidth,
        "launch": launch,
        "caches": caches,
        "convolutions": convolutions / peak,
        "attention": [_attention_speed(clock, n, peak) for n in ATTENTION_LENGTHS[clock.device.type]],
        "messages": [messages.seconds() for messages in sent],
        "waiting": [] if waiting is None else waiting.seconds(),
        "staged": stage_host_seconds(clock) if cpu and world > 1 and not quick else (0.0, 0.0),
        "overlap": agreed(measured_overlap(clock), min) if world > 1 else 0.0,
        "products": [agreed(_narrow_speed(clock, n), min) / peak for n in PRODUCT_LENGTHS],
        "channels": _channel_shares(clock, convolutions),
        "functions": tuple(agreed(x, max) for x in _function_seconds(clock)) if cpu else (),
        "updates": agreed(_update_speed(clock), min),
        "sharing": _core_sharing(clock) if clock.shared else (),
        "disturbed": clock.watch.share(),
    }


def _seconds_keeping_results(clock: Clock, call: Callable[[], Tensor]) -> float:
    """Seconds of a call whose latest results are kept: outputs miss the caches, as in a step."""
    one = call().nbytes
    kept = deque[Tensor](maxlen=max(1, min(MOST_CALLS, KEPT_BYTES[clock.device.type] // one)))
    while len(kept) < (kept.maxlen or 0):
        kept.append(call())
    return clock.compute_seconds(lambda: kept.append(call()))


def _product_speed(clock: Clock, dtype: torch.dtype, n: int) -> float:
    """FLOP/s of a matrix product of ``n`` × ``n`` matrices."""
    a, b = (torch.randn(n, n, device=clock.device).to(dtype) for _ in range(2))
    return 2.0 * n**3 / _seconds_keeping_results(clock, partial(torch.matmul, a, b))


def _narrow_speed(clock: Clock, n: int) -> float:
    """FLOP/s of a linear layer's three products for ``n`` rows; layers take turns, as reading
    uncached weights bounds them."""
    width, dtype = 4096 if clock.device.type == "cuda" else 512, KERNEL_DTYPES[clock.device.type]
    x = torch.randn(n, width, device=clock.device, dtype=dtype)
    one = torch.randn(width, width, device=clock.device, dtype=dtype)
    weights = itertools.cycle([one, *(one.clone() for _ in range(KEPT_BYTES[clock.device.type] // one.nbytes))])

    def products() -> Tensor:
        weight = next(weights)
        y = x @ weight.t()
        y @ weight
        return y.t() @ x

    return 3 * 2.0 * n * width**2 / _seconds_keeping_results(clock, products)


def _convolution_speed(clock: Clock, few: int | None = None) -> float:
    """FLOP/s of 3 × 3 convolutions with channels last, forward and backward; ``few``: channels
    of the input of one, and of the output of another."""
    side, batch, channels = 32, (32 if clock.device.type == "cuda" else 4), CONVOLUTION_CHANNELS[clock.device.type][0]
    dtype = KERNEL_DTYPES[clock.device.type]
    seconds = 0.0
    pairs = [(channels, channels)] if few is None else [(few, channels), (channels, few)]
    for given, made in pairs:
        x = channels_last(torch.randn(batch, given, side, side, device=clock.device, dtype=dtype)).requires_grad_()
        layer = torch.nn.Conv2d(given, made, 3, padding=1).to(clock.device, dtype)
        gradient = torch.ones_like(layer(x))
        seconds += clock.compute_seconds(partial(_forward_and_backward, layer, x, gradient))
    return sum(3 * 2.0 * batch * side**2 * 9 * given * made for given, made in pairs) / seconds


def _forward_and_backward(layer: torch.nn.Module, x: Tensor, gradient: Tensor) -> None:
    torch.autograd.backward(layer(x), gradient)


def _channel_shares(clock: Clock, whole: float) -> list[float]:
    """Speed of convolutions of few channels, as shares of ``whole``, the FLOP/s of many."""
    return [
        min(1.0, agreed(_convolution_speed(clock, n), min) / whole) for n in CONVOLUTION_CHANNELS[clock.device.type][1]
    ]


def _memory_bandwidth(clock: Clock) -> float:
    """Memory bandwidth (bytes/s read and written) of an addition of large tensors."""
    n = 1 << (28 if clock.device.type == "cuda" else 23)
    a, b = (torch.ones(n, device=clock.device) for _ in range(2))
    return 3 * 4 * n / _seconds_keeping_results(clock, partial(torch.add, a, b))


def _cache_seconds(clock: Clock) -> tuple[tuple[float, float], ...]:
    """(bytes, seconds beyond a launch) of elementwise products by size, with operands in caches."""
    found: list[tuple[float, float]] = []
    for n in (1, *CACHE_ELEMENTS):
        a, b = (torch.ones(n, device=clock.device) for _ in range(2))
        taken = agreed(_seconds_keeping_results(clock, partial(torch.mul, a, b)), max)
        found.append((3.0 * 4 * n, max(taken, found[-1][1] if found else 0.0)))
    (_, launch), *rows = found
    return tuple((size, taken - launch) for size, taken in rows)


def _attention_speed(clock: Clock, keys: int, peak: float) -> tuple[float, float]:
    """(forward, backward) shares of ``peak`` FLOP/s that fused attention reaches."""
    heads, width = (32, 128) if clock.device.type == "cuda" else (8, 64)
    shape, dtype = (1, heads, keys, width), KERNEL_DTYPES[clock.device.type]
    q, k, v = (torch.randn(shape, device=clock.device, dtype=dtype).requires_grad_() for _ in range(3))
    flops = 2 * 2.0 * heads * keys**2 * width
    attend = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v)
    out = attend()
    back = partial(torch.autograd.grad, out, (q, k, v), torch.ones_like(out), retain_graph=True)
    forward, backward = _seconds_keeping_results(clock, attend), _seconds_keeping_results(clock, lambda: back()[0])
    return agreed(flops / forward, min) / peak, agreed(2.5 * flops / backward, min) / peak


def _function_seconds(clock: Clock) -> tuple[float, float]:
    """Seconds per element of a softmax that caches hold, forward and backward."""
    x = torch.rand(512, 256, device=clock.device, requires_grad=True)
    out = x.softmax(1)
    back = partial(torch.autograd.grad, out, x, torch.ones_like(out), retain_graph=True)
    forward, backward = (
        _seconds_keeping_results(clock, call) for call in (partial(x.detach().softmax, 1), lambda: back()[0])
    )
    return forward / x.numel(), backward / x.numel()


def _update_speed(clock: Clock) -> float:
    """Bytes/s that fused AdamW reads and writes: parameter, gradient, two moments in memory."""
    n = 1 << (28 if clock.device.type == "cuda" else 24)
    p = torch.nn.Parameter(torch.ones(n, device=clock.device))
    p.grad = torch.ones_like(p)
    return 7 * 4 * n / clock.compute_seconds(torch.optim.AdamW([p], fused=True).step)


def _core_sharing(clock: Clock) -> tuple[tuple[int, float], ...]:
    """(ranks at work, relative seconds of equal products): waiting ranks free their core."""
    a, b = (torch.randn(512, 512) for _ in range(2))
    counts = [*(n for n in (1, 2, 4, 8, 16, 32) if n < on_this_machine()), on_this_machine()]
    return tuple(zip(counts, clock.relative(partial(torch.matmul, a, b), counts), strict=True))


def _launch_seconds(clock: Clock) -> float:
    """Launch latency (seconds): the smallest operation, forward or backward. On CPUs a product
    before it evicts the launching code from caches: triple the latency."""
    x = torch.ones(8, device=clock.device, requires_grad=True)

    def run(count: int) -> None:
        y = x
        for _ in range(count - 1):
            y = y * x
        y.sum().backward()

    if clock.device.type == "cuda":
        return clock.compute_seconds(partial(run, 200)) / (2 * 200)
    a = torch.randn(512, 512)

    def once() -> float:
        torch.matmul(a, a)
        begin = clock.now()
        run(SMALL_OPERATIONS)
        return clock.now() - begin

    return clock.watch.undisturbed(lambda: lower_quartile([once() for _ in range(8 * clock.repeats)])) / (
        2 * SMALL_OPERATIONS
    )


if __name__ == "__main__":
    _calibration_worker()

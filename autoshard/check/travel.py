"""What collectives take by size, between how many ranks, and how much of it hides behind compute: parts of calibration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from autoshard.check.clock import SHORT, USED, Clock, agreed
from autoshard.hardware import Rate
from autoshard.runtime.transport.move import Move
from autoshard.runtime.transport.process_group import TorchCommunicator, all_gather_single

SEVERAL = 8
"""collectives that are timed together, each after compute"""


def move_of(kind: str, ranks: int, size: int) -> tuple[Move, tuple[int, ...]]:
    """The move of ``size`` elements, and the shape of what a rank brings."""
    axes = ("ranks",)
    if kind == "all_reduce":
        return Move("P", "I", axes), (size,)
    if kind == "all_gather":
        return Move("S", "R", axes, 0, size), (size // ranks,)
    if kind == "reduce_scatter":
        return Move("P", "S", axes, 0, size), (size,)
    return Move("S", "S", axes, 0, ranks, 1, size // ranks), (1, size // ranks)


class Step:
    """Some compute with something after it, again and again: as a step has it, and not one message after another.

    Ranks then do not arrive together, and the threads that carry messages have to wake up. What ranks wait differs much, and
    a step has the sum. The compute is timed once.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock, self.operation = clock, _product(clock)
        self.count = max(1, round(SHORT / clock.seconds(self.operation)))
        self.alone = clock.seconds(self._of(lambda: None), together=True)

    def seconds(self, call: Callable[[], object]) -> float:
        """Of one ``call`` of those after compute, at least of one after another."""
        one = self.clock.seconds(call, together=True)
        return max(one, (self.clock.seconds(self._of(call), together=True) - self.alone) / SEVERAL)

    def _of(self, call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(SEVERAL):
                for _ in range(self.count):
                    self.operation()
                call()

        return run


def rates(step: Step, ranks: int, quick: bool) -> Iterator[Rate]:
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
            move, shape = move_of(kind, ranks, size)
            x = torch.ones(shape, device=step.clock.device)
            group = comm.process_group(move.axes)
            # the copy before it has a price of its own
            bare = partial(comm.run, group, dist.all_reduce, torch.zeros_like(x))
            taken = step.seconds(bare if kind == "all_reduce" else partial(comm.execute, move, x, "forward"))
            found.append((move.ring_bytes(x, ranks), agreed(taken, max)))
        yield _line(kind, ranks, found)
    if ranks == world:
        yield _line("permute", 2, [(4.0 * size, agreed(_message(step, size), max)) for size in sizes])


def _message(step: Step, size: int) -> float:
    """Seconds of a message of ``size`` elements to the neighbour, while as much comes from it."""
    neighbour = dist.get_rank() ^ 1
    if neighbour >= dist.get_world_size():  # an odd one: the others measure
        return step.seconds(lambda: None)
    sent, received = (torch.ones(size, device=step.clock.device) for _ in range(2))
    both = [dist.P2POp(dist.isend, sent, neighbour), dist.P2POp(dist.irecv, received, neighbour)]

    def exchange() -> None:
        for work in dist.batch_isend_irecv(both):
            work.wait()

    return step.seconds(exchange)


def _product(clock: Clock) -> Callable[[], torch.Tensor]:
    """Some compute, of which there may be more."""
    n = 4096 if clock.device.type == "cuda" else 256
    a = torch.randn(n, n, device=clock.device, dtype=USED[clock.device.type])
    return lambda: torch.relu(a @ a)


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


def overlap(clock: Clock) -> float:
    """How fast compute runs while a bucket travels beside it: T = C + (1 − η)·M, with about twice as much C as M.

    Of reductions and of gathers, those that hide less. Copies into buckets and out of them have a price of their own.
    """
    operation = _product(clock)
    one = clock.seconds(operation)
    return min(_hidden(clock, operation, one, gathers) for gathers in (False, True))


def _hidden(clock: Clock, operation: Callable[[], torch.Tensor], one: float, gathers: bool) -> float:
    """η of an all-reduce, or an all-gather, of a bucket beside operations of which each takes ``one`` second alone."""
    size = 1 << (26 if clock.device.type == "cuda" else 20)
    world = dist.get_world_size() if gathers else 1
    flat = torch.zeros(-(-size // world), device=clock.device)
    whole = flat.new_empty(world * flat.numel())

    def begin(x: torch.Tensor) -> Any:
        return all_gather_single(whole, x, async_op=True) if gathers else dist.all_reduce(x, async_op=True)

    moved = clock.seconds(lambda: begin(flat).wait(), together=True)
    count = max(4, int(2 * moved / one))

    def compute() -> list[torch.Tensor]:
        return [operation() for _ in range(count)]

    def both() -> None:
        work = begin(flat)
        compute()
        work.wait()

    alone, together = clock.seconds(compute, together=True), clock.seconds(both, together=True)
    return min(1.0, max(0.0, 1.0 - (together - alone) / moved))

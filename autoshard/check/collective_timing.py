"""Microbenchmarks for calibration: collectives by size, overlap, host time of a pipeline."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoshard.check.clock import KERNEL_DTYPES, Clock, agreed, lower_quartile, slowest_ranks
from autoshard.hardware import SMALL_ALL_REDUCE, Rate
from autoshard.runtime.programs.pipeline import Message, Pipeline, StageForm, StageRanks
from autoshard.runtime.transport.communicator import bind
from autoshard.runtime.transport.move import DIRECT_SUM_BYTES, Move, sums_directly
from autoshard.runtime.transport.peers import FailureNotes
from autoshard.runtime.transport.process_group import TorchCommunicator, all_gather_single

CALLS_PER_ROUND, SECONDS_BETWEEN = 8, 0.002
"""collectives per timed round, and seconds of compute before each"""
LONGER_BETWEEN = (0.008, 0.02)
"""longer seconds of compute before a collective, after which ranks arrive less together"""
OUTLIER_RATIO, REMEASURED_ROUNDS = 2.0, 2
"""ratio to the neighbours' line that makes an outlier; rounds of measuring outliers again"""
SHORTEST_SECONDS = 1e-6
"""least seconds of a collective, where noise exceeds what it adds"""


def move_for_kind(kind: str, ranks: int, size: int) -> tuple[Move, tuple[int, ...]]:
    """The move of a collective of ``size`` elements, and the local shape before it."""
    axes = ("ranks",)
    if kind in ("all_reduce", SMALL_ALL_REDUCE):
        return Move("P", "I", axes), (size,)
    if kind == "all_gather":
        return Move("S", "R", axes, 0, size), (size // ranks,)
    if kind == "reduce_scatter":
        return Move("P", "S", axes, 0, size), (size,)
    return Move("S", "S", axes, 0, ranks, 1, size // ranks), (1, size // ranks)


class TimedStep:
    """Times calls that follow compute, as in a training step: ranks arrive at different times and
    communication threads must wake up. Waits vary over seconds, so compared calls alternate. The
    compute is a layer with its gradients, which uses memory as a step does."""

    def __init__(self, clock: Clock, between: float = SECONDS_BETWEEN) -> None:
        self.clock, self.operation = clock, _layer_step(clock)
        self.count = max(1, round(agreed(between / clock.seconds(self.operation), max)))  # ranks have equal work

    def seconds(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        """Seconds that one of each of ``calls`` adds to the compute of a round, median of rounds. A
        round is its slowest rank's, as faster ones wait."""
        rounds = slowest_ranks(self.clock.interleaved_seconds([self._of(call) for call in (lambda: None, *calls)]))
        added = ([after - alone for after in taken] for alone, *taken in rounds)
        return [
            max(SHORTEST_SECONDS, statistics.median(column) / CALLS_PER_ROUND) for column in zip(*added, strict=True)
        ]

    def _of(self, call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(CALLS_PER_ROUND):
                for _ in range(self.count):
                    self.operation()
                call()

        return run


class RankSkew:
    """Rank skew: extra seconds of waiting after more compute than latencies are measured with."""

    def __init__(self, clock: Clock) -> None:
        self.known, *self.steps = (TimedStep(clock, between) for between in (SECONDS_BETWEEN, *LONGER_BETWEEN))
        world = dist.get_world_size()
        self.comm = TorchCommunicator({"ranks": world}, range(world))
        self.numbers = torch.zeros(1, device=clock.device)

    def seconds(self) -> list[tuple[float, float]]:
        """(seconds of compute, seconds of waiting), both ascending."""
        group = self.comm.process_group(("ranks",))

        def added(step: TimedStep) -> float:
            return step.seconds([lambda: self.comm.all_reduce(group, self.numbers).wait()])[0]

        known = added(self.known)
        more = itertools.accumulate((max(0.0, added(step) - known) for step in self.steps), max)
        return [(SECONDS_BETWEEN, 0.0), *zip(LONGER_BETWEEN, more, strict=True)]


class CollectiveTimes:
    """Collectives of every kind and several sizes among ``ranks`` ranks, in all groups at once;
    point-to-point messages ("permute") if ``ranks`` is the world size."""

    def __init__(self, step: TimedStep, ranks: int, quick: bool) -> None:
        world = dist.get_world_size()
        first = dist.get_rank() // ranks * ranks
        self.step, self.comm = step, TorchCommunicator({"ranks": ranks}, range(first, first + ranks))
        sizes = (1 << 12, 1 << 17, 1 << 20) if quick else (1 << 10, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
        kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", *(("permute",) if ranks == world else ()))
        few = ((SMALL_ALL_REDUCE, 1), (SMALL_ALL_REDUCE, DIRECT_SUM_BYTES // (4 * ranks)))
        every = itertools.product(kinds, sizes)
        self.sent = [*few, *((kind, size) for kind, size in every if kind != "all_reduce" or not self._direct(size))]

    def _direct(self, size: int) -> bool:
        """Whether an all-reduce of ``size`` elements uses the direct algorithm for few numbers."""
        ranks = self.comm.world_size
        return ranks > 2 and sums_directly(4 * size, ranks) and self.comm.process_group(("ranks",)).gloo

    def seconds(self) -> list[float]:
        """Seconds of each collective; outliers among neighbours in size are measured again."""
        found = self._measured(range(len(self.sent)))
        for _ in range(REMEASURED_ROUNDS):
            odd = outlying_messages(self.sent, found)
            for i, seconds in zip(odd, self._measured(odd), strict=True):
                found[i] = seconds
        return found

    def _measured(self, which: Sequence[int]) -> list[float]:
        return self.step.seconds([self._call(*self.sent[i]) for i in which]) if which else []

    def _call(self, kind: str, size: int) -> Callable[[], object]:
        if kind == "permute":
            return _neighbour_exchange(self.step, size)
        comm, (move, shape) = self.comm, move_for_kind(kind, self.comm.world_size, size)
        x = torch.ones(shape, device=self.step.clock.device)
        if kind in ("all_reduce", SMALL_ALL_REDUCE):  # its copy is priced separately
            group, sums = comm.process_group(move.axes), torch.zeros_like(x)
            return lambda: comm.all_reduce(group, sums).wait()
        return partial(comm.execute, move, x, "forward")

    def rates(self, seconds: Sequence[float]) -> list[Rate]:
        """Latency and bandwidth (α, β) per kind, fitted to ``seconds``."""
        found: dict[tuple[str, int], list[tuple[float, float]]] = {}
        ranks = self.comm.world_size
        for (kind, size), taken in zip(self.sent, seconds, strict=True):
            if kind == "permute":
                found.setdefault((kind, 2), []).append((4.0 * size, taken))
            else:
                move, shape = move_for_kind(kind, ranks, size)
                bytes_ = move.ring_bytes(torch.empty(shape, device="meta"), ranks)
                found.setdefault((kind, ranks), []).append((bytes_, taken))
        few = _fitted_rate(SMALL_ALL_REDUCE, ranks, found.pop((SMALL_ALL_REDUCE, ranks)))
        rates = [_fitted_rate(*of, points) for of, points in found.items()]
        summed = next(r for r in rates if r.kind == "all_reduce")
        return [few._replace(latency=min(few.latency, summed.latency)), *rates]


def outlying_messages(sent: Sequence[tuple[str, int]], seconds: Sequence[float]) -> list[int]:
    """Positions of outliers in ``sent``, and of their neighbours, which may be the wrong ones.
    An outlier takes more than :data:`OUTLIER_RATIO` times the next longer message, or is as far off the
    line between its neighbours."""
    odd = set[int]()
    for _, of in itertools.groupby(range(len(sent)), key=lambda i: sent[i][0]):
        same = list(of)
        for i, j in itertools.pairwise(same):
            if seconds[i] > OUTLIER_RATIO * seconds[j]:
                odd |= {i, j}
        for i, j, k in zip(same, same[1:], same[2:], strict=False):
            part = (sent[j][1] - sent[i][1]) / (sent[k][1] - sent[i][1])
            between = seconds[i] + part * (seconds[k] - seconds[i])
            if not between / OUTLIER_RATIO <= seconds[j] <= between * OUTLIER_RATIO:
                odd |= {i, j, k}
    return sorted(odd)


def _neighbour_exchange(step: TimedStep, size: int) -> Callable[[], None]:
    """An exchange of ``size`` elements with the neighbour rank, in both directions at once."""
    neighbour = dist.get_rank() ^ 1
    if neighbour >= dist.get_world_size():  # the last of an odd number has no partner
        return lambda: None
    sent, received = (torch.ones(size, device=step.clock.device) for _ in range(2))
    both = [dist.P2POp(dist.isend, sent, neighbour), dist.P2POp(dist.irecv, received, neighbour)]

    def exchange() -> None:
        for work in dist.batch_isend_irecv(both):
            work.wait()

    return exchange


def _layer_step(clock: Clock) -> Callable[[], None]:
    """Forward and backward of a small layer, as a call that can be repeated."""
    rows, width = (2048, 4096) if clock.device.type == "cuda" else (128, 256)
    dtype = KERNEL_DTYPES[clock.device.type]
    layer = torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, width), torch.nn.ReLU())
    layer.to(clock.device, dtype)
    x = torch.randn(rows, width, device=clock.device, dtype=dtype, requires_grad=True)
    gradient = torch.ones_like(x)

    def both() -> None:
        torch.autograd.grad(layer(x), [x, *layer.parameters()], gradient)

    return both


def _fitted_rate(kind: str, ranks: int, found: Sequence[tuple[float, float]]) -> Rate:
    """α and β with the least relative errors over all (bytes, seconds), not only at the ends."""
    bytes_, seconds = torch.tensor(found, dtype=torch.float64).unbind(1)
    matrix = torch.stack([1 / seconds, bytes_ / seconds], 1)
    latency, per_byte = (
        torch.linalg.lstsq(matrix, torch.ones(len(found), 1, dtype=torch.float64)).solution.flatten().tolist()
    )
    if per_byte <= 0:  # all take about as long
        per_byte = 1e-15
    return Rate(kind, ranks, max(1e-9, min(latency, found[0][1])), 1.0 / per_byte)


def measured_overlap(clock: Clock) -> float:
    """Overlap η of a bucket's communication M with compute C: T = C + (1 − η)·M, where C ≈ 2·M. The
    smaller of all-reduce's and all-gather's; copies are priced separately."""
    operation = _layer_step(clock)
    one = clock.seconds(operation)
    return min(_hidden_share(clock, operation, one, gathers) for gathers in (False, True))


def _hidden_share(clock: Clock, operation: Callable[[], object], one: float, gathers: bool) -> float:
    """η of an all-reduce or all-gather that overlaps operations of ``one`` second each."""
    size = 1 << (26 if clock.device.type == "cuda" else 20)
    world = dist.get_world_size() if gathers else 1
    flat = torch.zeros(-(-size // world), device=clock.device)
    whole = flat.new_empty(world * flat.numel())

    def begin(x: Tensor) -> Any:
        return all_gather_single(whole, x, async_op=True) if gathers else dist.all_reduce(x, async_op=True)

    def move() -> None:
        begin(flat).wait()

    moved = clock.seconds(move, together=True)
    count = max(4, int(agreed(2 * moved / one, max)))  # ranks have equal work

    def compute() -> None:
        for _ in range(count):
            operation()

    def both() -> None:
        work = begin(flat)
        compute()
        work.wait()

    rounds = slowest_ranks(
        clock.interleaved_seconds([partial(_called_several_times, call) for call in (move, compute, both)])
    )
    return min(1.0, max(0.0, 1.0 - statistics.median((both - alone) / moved for moved, alone, both in rounds)))


def _called_several_times(call: Callable[[], object]) -> None:
    for _ in range(CALLS_PER_ROUND):
        call()


SCHEDULE, COUNT = "gpipe", 8
"""measured schedule, and its micro-batches"""
SIZES = (1, 1 << 18)
"""elements of its messages"""
WARM_UP = 2


def stage_host_seconds(clock: Clock) -> tuple[float, float]:
    """Processor seconds (per action with its messages, per byte at each end of a message). The
    actions of a schedule compute a product, which evicts the host's code from caches; its time
    is subtracted. All ranks' threads are summed, as chance decides which does a message's
    work."""
    world = dist.get_world_size()
    small, large = (agreed(_processor_seconds(clock, size), sum) for size in SIZES)
    bytes_ = 4.0 * (SIZES[1] - SIZES[0]) * 2 * (world - 1) * COUNT
    return small / (2 * world * COUNT), max(0.0, large - small) / (2 * bytes_)


def _processor_seconds(clock: Clock, size: int) -> float:
    """Processor seconds of this rank in a step with messages of ``size`` elements, less compute."""
    rank, world = dist.get_rank(), dist.get_world_size()
    stages, comm, notes = _ProductStages(size), TorchCommunicator({"alone": 1}, [rank]), FailureNotes()
    messages = [*([(Message((size,), torch.float32, True),)] * (world - 1)), (Message((), torch.float32, True),)]
    form = StageForm(SCHEDULE, COUNT, tuple(messages), 0, False)
    pipeline = Pipeline(form, StageRanks(dist.group.WORLD, notes), clock.device, stages.run)

    def step() -> float:
        stages.leaf.grad, stages.compute_seconds = None, 0.0
        dist.barrier()
        begin = time.process_time()
        with bind(comm):
            pipeline.step(notes, [stages.leaf], None)
        if pipeline.failed is not None:
            raise pipeline.failed
        return time.process_time() - begin - stages.compute_seconds

    for _ in range(WARM_UP):
        step()
    return lower_quartile([clock.watch.undisturbed(step) for _ in range(clock.repeats)])


class _ProductStages:
    """Stages that compute a product; ``compute_seconds``: its processor seconds, both ways."""

    def __init__(self, size: int) -> None:
        self.size, self.compute_seconds = size, 0.0
        self.leaf = torch.zeros((), requires_grad=True)
        self.factor = torch.randn(512, 512)

    def run(self, number: int, index: int, received: Sequence[Tensor]) -> Sequence[Tensor]:
        last = number == dist.get_world_size() - 1
        return [_ProductFunction.apply(received[0] if received else self.leaf, self, () if last else (self.size,))]  # type: ignore[no-untyped-call]

    def compute(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        begin = time.thread_time()
        torch.matmul(self.factor, self.factor)
        made = like.new_ones(shape)
        self.compute_seconds += time.thread_time() - begin
        return made


class _ProductFunction(torch.autograd.Function):
    """A tensor of ``shape`` from an input of another shape, at the cost of a product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stages: _ProductStages, shape: Sequence[int]) -> Tensor:
        ctx.stages, ctx.shape = stages, x.shape
        return stages.compute(x, shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.stages.compute(gradient, ctx.shape), None, None

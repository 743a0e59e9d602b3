"""Host overhead of pipeline stages for calibration: per schedule action, and per message byte."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from autoshard.check.clock import Clock, agreed, lower_quartile
from autoshard.runtime.programs.along import Along
from autoshard.runtime.programs.pipeline import Form, Message, Pipeline
from autoshard.runtime.transport.communicator import bind
from autoshard.runtime.transport.peers import Notes
from autoshard.runtime.transport.process_group import TorchCommunicator

SCHEDULE, COUNT = "gpipe", 8
"""measured schedule, and its micro-batches"""
SIZES = (1, 1 << 18)
"""elements of its messages"""
WARM_UP = 2


def staged_host(clock: Clock) -> tuple[float, float]:
    """Processor seconds (per action with its messages, per byte at each end of a message).

    All ranks run a schedule whose actions compute a matrix product, which evicts the host's code
    and data from the caches; its processor time is subtracted. Ranks and all their threads are
    summed, because chance decides which of two ranks does the work of a message.
    """
    world = dist.get_world_size()
    small, large = (agreed(_processor_seconds(clock, size), sum) for size in SIZES)
    bytes_ = 4.0 * (SIZES[1] - SIZES[0]) * 2 * (world - 1) * COUNT
    return small / (2 * world * COUNT), max(0.0, large - small) / (2 * bytes_)


def _processor_seconds(clock: Clock, size: int) -> float:
    """Processor seconds of this rank in a step with messages of ``size`` elements, less compute."""
    rank, world = dist.get_rank(), dist.get_world_size()
    stages, comm, notes = _Stages(size), TorchCommunicator({"alone": 1}, [rank]), Notes()
    messages = [*([(Message((size,), torch.float32, True),)] * (world - 1)), (Message((), torch.float32, True),)]
    form = Form(SCHEDULE, COUNT, tuple(messages), 0, False)
    pipeline = Pipeline(form, Along(dist.group.WORLD, notes), clock.device, stages.run)

    def step() -> float:
        stages.leaf.grad, stages.computing = None, 0.0
        dist.barrier()
        begin = time.process_time()
        with bind(comm):
            pipeline.step(notes, [stages.leaf], None)
        if pipeline.failed is not None:
            raise pipeline.failed
        return time.process_time() - begin - stages.computing

    for _ in range(WARM_UP):
        step()
    return lower_quartile([clock.watch.undisturbed(step) for _ in range(clock.repeats)])


class _Stages:
    """Stages that compute a product, forward and backward; ``computing``: its processor seconds."""

    def __init__(self, size: int) -> None:
        self.size, self.computing = size, 0.0
        self.leaf = torch.zeros((), requires_grad=True)
        self.factor = torch.randn(512, 512)

    def run(self, number: int, index: int, received: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        last = number == dist.get_world_size() - 1
        return [_Computed.apply(received[0] if received else self.leaf, self, () if last else (self.size,))]  # type: ignore[no-untyped-call]

    def compute(self, like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        begin = time.thread_time()
        torch.matmul(self.factor, self.factor)
        made = like.new_ones(shape)
        self.computing += time.thread_time() - begin
        return made


class _Computed(torch.autograd.Function):
    """A tensor of ``shape`` from an input of another shape, at the cost of a product."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stages: _Stages, shape: Sequence[int]) -> torch.Tensor:
        ctx.stages, ctx.shape = stages, x.shape
        return stages.compute(x, shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.stages.compute(gradient, ctx.shape), None, None

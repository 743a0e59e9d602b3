"""Per-rank coroutines for computation that overlaps with messages: a *journey* yields a message or
a collective, gets a function that waits for its arrival, and returns its results. In one process
all ranks' journeys go hop by hop. All ranks make as many hops, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from autoshard.runtime.transport.move import Move

Tensors = tuple[Tensor, ...]
Arrival = Callable[[], Tensors]
"""waits for the received tensors"""


class Hop(NamedTuple):
    """One message of a rank to another of its group, while one arrives from a third."""

    move: Move
    """name and axes, for logs and profiles"""
    to: int
    """the receiver's number in the group"""
    source: int
    """the sender's number in the group"""
    tensors: Tensors
    """sent tensors, of one dtype"""
    shapes: tuple[tuple[int, ...], ...]
    """of the received tensors"""
    bytes: float
    """sent per rank; uneven chunks count as the longest"""
    into: Tensor | None = None
    """contiguous destination of the one received tensor; None: new memory"""


class Collective(NamedTuple):
    """A collective that all ranks of a group begin; one tensor arrives."""

    move: Move
    x: Tensor


Sending = Hop | Collective
RankCoroutine = Generator[Sending, Arrival, Tensors]


def run_coroutines(
    journeys: Sequence[RankCoroutine], exchange: Callable[[Sequence[Sending]], Sequence[Arrival]]
) -> list[Tensors]:
    """Run the journeys of all ranks in this process; ``exchange`` begins one hop of each."""
    results: list[Any] = [None] * len(journeys)
    arrivals: Sequence[Any] = [None] * len(journeys)
    while True:
        hops = list[Sending]()
        for i, journey in enumerate(journeys):
            try:
                hops.append(journey.send(arrivals[i]))
            except StopIteration as end:
                results[i] = end.value
        if not hops:
            return results
        arrivals = exchange(hops)

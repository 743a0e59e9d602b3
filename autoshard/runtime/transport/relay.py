"""Computations in which every rank sends while it computes, written for one rank: a *journey*, a generator of hops.

A journey yields what it sends and where it goes, or what it brings to a collective, gets a function that waits for what
comes in its place, and returns its results. In one process the journeys of all ranks go side by side, hop by hop; under
torch.distributed a rank has one. All ranks make as many hops, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import torch

from autoshard.runtime.transport.move import Move

Tensors = tuple[torch.Tensor, ...]
Arrival = Callable[[], Tensors]
"""waits for what came"""


class Hop(NamedTuple):
    """One message of a rank to another of its group, while one comes from a third."""

    move: Move
    """its name and axes, for logs and profiles"""
    to: int
    """the receiver's number in the group"""
    source: int
    """the number of the rank that something comes from"""
    tensors: Tensors
    """what is sent, of one dtype"""
    shapes: tuple[tuple[int, ...], ...]
    """of what comes"""
    bytes: float
    """on the wire per rank, where chunks that differ in length all count as the longest"""
    into: torch.Tensor | None = None
    """where what comes is put, one tensor that lies in a row; None: into new memory"""


class Collective(NamedTuple):
    """A collective that all ranks of a group begin: one tensor comes of it."""

    move: Move
    x: torch.Tensor


Begun = Hop | Collective
Journey = Generator[Begun, Arrival, Tensors]


def travel(journeys: Sequence[Journey], exchange: Callable[[Sequence[Begun]], Sequence[Arrival]]) -> list[Tensors]:
    """Run the journeys of all ranks of this process to their ends; ``exchange`` begins one hop of each."""
    results: list[Any] = [None] * len(journeys)
    arrivals: Sequence[Any] = [None] * len(journeys)
    while True:
        hops = list[Begun]()
        for i, journey in enumerate(journeys):
            try:
                hops.append(journey.send(arrivals[i]))
            except StopIteration as end:
                results[i] = end.value
        if not hops:
            return results
        arrivals = exchange(hops)

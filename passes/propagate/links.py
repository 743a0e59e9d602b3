"""Edges of the cost network before they have tables: who reads a value, in which layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from autoshard.passes.ir.assignment import Placements, is_whole
from autoshard.passes.ir.graph import Node
from autoshard.passes.propagate.keep import Side
from autoshard.passes.propagate.op_space import OpSpace
from autoshard.passes.propagate.prices.joined import Ways
from autoshard.passes.propagate.prices.step_time import Parts


class Reading(NamedTuple):
    """One operand of an operation."""

    position: int
    name: str
    placed: Sequence[Placements]
    """layout per choice"""
    mask: np.ndarray | None
    """choices under which it is paid; None: all"""
    spared: np.ndarray | None
    """seconds per choice of collectives that a replicated operand makes unnecessary"""
    ways: Ways | None = None
    """groups of conversions that share a message"""


def readings(node: Node, space: OpSpace) -> Iterator[Reading]:
    """Operands of ``node``; a value that is read several times pays once per layout."""
    earlier: dict[str, list[Sequence[Placements]]] = {}
    for position, (name, placed) in enumerate(zip(node.inputs, space.inputs, strict=True)):
        before = earlier.setdefault(name, [])
        new = np.array([all(p != other[i] for other in before) for i, p in enumerate(placed)]) if before else None
        if new is None or new.any():
            mask = None if new is None or new.all() else new
            ways = space.ways if space.ways is not None and name in space.ways.values else None
            yield Reading(position, name, placed, mask, space.spared.get(position), ways)
        before.append(placed)


def paid(parts: Parts, mask: np.ndarray | None) -> Parts:
    """``parts`` with 0 in the columns that ``mask`` excludes."""
    return parts if mask is None else Parts(*(np.where(mask, x, 0.0) if x.ndim else x for x in parts))


def unspared(spared: np.ndarray, sources: Sequence[Placements]) -> np.ndarray:
    """Seconds per source (row) and choice (column); 0 if the source is replicated."""
    return np.where([[is_whole(p)] for p in sources], 0.0, spared)


class Link(NamedTuple):
    """An edge: from the definition of a value, or its shared layout, to a reader."""

    source: str
    """variable"""
    given: Side
    reader: str
    """variable"""
    asked: Side
    value: str
    mask: np.ndarray | None = None
    """the reader's choices under which it is paid; None: all"""
    spared: np.ndarray | None = None
    """see :class:`Reading`"""
    ways: Ways | None = None

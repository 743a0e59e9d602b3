"""Gathered parameters (ZeRO): buckets in prefetch, and those that stay unsharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from typing import NamedTuple

from autoshard.passes.ir.program import Program, Statement
from autoshard.passes.lower.bucket import prefetched


class UnderWay(NamedTuple):
    """Bytes in prefetch while a bucket is used, in the forward and in the backward."""

    forward: float
    backward: float


def under_way(program: Program, again: Set[str], size: Callable[[Statement], float]) -> dict[str, UnderWay]:
    """First result of each gathered bucket → bytes in prefetch then, in the last micro-batch.

    ``again``: local names that the backward gathers again; ``size``: unsharded bytes of a bucket.
    """
    depth = prefetched(program)
    shares = program.graph.passes > 1
    buckets = [s for s in program.statements if s.call.fn == "gather_parameters"]
    coming = [0.0 if shares and s.call.kwargs.get("zero") else size(s) for s in buckets]
    back = [size(s) if not again.isdisjoint(s.outputs) else None for s in buckets] if again else []
    return {
        s.outputs[0]: UnderWay(sum(coming[i + 1 : i + 1 + depth]), _last(back[:i], depth))
        for i, s in enumerate(buckets)
    }


def _last(sizes: Sequence[float | None], depth: int) -> float:
    known = [n for n in sizes if n is not None]
    return sum(known[-depth:]) if depth else 0.0


def kept_gathered(program: Program) -> Iterator[tuple[str, str, int]]:
    """(parameter, local name of its unsharded copy, ZeRO stage) of those that stay gathered."""
    for s in program.statements:
        if s.call.kwargs.get("zero"):
            yield from ((program.values[o], o, s.call.kwargs["zero"]) for o in s.outputs)

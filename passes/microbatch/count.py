"""How many micro-batches: the number with which the step is cheapest, of those with which it fits."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, TypeVar

from autoshard.errors import PlanError
from autoshard.passes.ir.graph import Graph
from autoshard.passes.microbatch.body import MicroBatches, micro_batched

log = logging.getLogger("autoshard.plan")

Found = TypeVar("Found")
PRIMES = (2, 3, 5, 7, 11, 13)
"""of which one has to divide the batch"""


def in_parts(graph: Graph, count: Any) -> tuple[Graph, MicroBatches | None]:
    """The graph of one of ``count`` micro-batches; itself where there is one, or no backward.

    Raises :class:`PlanError` as :func:`micro_batched`.
    """
    return (graph, None) if count == 1 or not graph.training else micro_batched(graph, count)


def cheapest_in_parts(
    graph: Graph, plan: Callable[[Graph], Found], seconds: Callable[[Found], float]
) -> tuple[Found, Graph, MicroBatches | None]:
    """What ``plan`` makes of the graph of one micro-batch, for the number of them whose step takes the fewest ``seconds``.

    Tried are the divisors of the batch, from 1 upwards, until there is a plan and one more part makes the step no
    cheaper: more parts take less memory, and more time otherwise. Raises :class:`PlanError` where none has a plan: with
    what was said of the most parts.
    """
    best: tuple[Found, Graph, MicroBatches | None] | None = None
    why: PlanError | None = None
    for count in _counts(graph):
        part, micro = in_parts(graph, count)
        try:
            found = plan(part)
        except PlanError as error:
            why = error
            log.info("%d micro-batches: no plan", count)
            continue
        log.info("%d micro-batches: %.4g s", count, seconds(found))
        if best is not None and seconds(found) >= seconds(best[0]):
            break
        best = found, part, micro
    if best is not None:
        return best
    assert why is not None
    raise why


def _counts(graph: Graph) -> list[int]:
    """Divisors of the batch; 1 alone where the model does not fall into micro-batches."""
    if not graph.training or graph.symbols.read:
        return [1]
    lengths = [n for i in graph.inputs if i.kind == "input" for n in graph.types[i.name].shape]
    for prime in (p for p in PRIMES if any(n % p == 0 and n for n in lengths)):
        try:
            _, micro = micro_batched(graph, prime)
        except PlanError as error:
            log.info("not in %d micro-batches: %s", prime, error)
            continue
        batch = math.gcd(*(graph.types[name].shape[d] for name, d in micro.inputs.values() if d is not None))
        return [n for n in range(1, batch + 1) if batch % n == 0]
    return [1]

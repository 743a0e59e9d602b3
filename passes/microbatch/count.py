"""Choose the number of micro-batches: the cheapest step that fits into memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from autoshard.errors import PlanError
from autoshard.layout import Placement
from autoshard.passes.ir.graph import Graph
from autoshard.passes.microbatch.micro_batch import MicroBatches, micro_batched

log = logging.getLogger("autoshard.plan")

PlannedStep = TypeVar("PlannedStep")
AUTO = 0
"""micro_batches="auto"."""
PRIMES = (2, 3, 5, 7, 11, 13)
"""one of them must divide the batch"""


def parse_micro_batches(asked: Any) -> int:
    """Parse ``micro_batches``: a number, or "auto" as AUTO. Raises :class:`PlanError` otherwise."""
    if asked == "auto":
        return AUTO
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
        raise PlanError(f'micro_batches is a number of at least 1, or "auto", got {asked!r}')
    return asked


def choose_micro_batches(
    graph: Graph,
    asked: int,
    make: Callable[[Graph, MicroBatches | None], PlannedStep],
    seconds: Callable[[PlannedStep], float],
    always: bool = False,
    cuts: Mapping[str, Placement] | None = None,
) -> PlannedStep:
    """``make`` for the graph of one of ``asked`` micro-batches; AUTO: choose their number.

    AUTO tries divisors of the batch upwards, until a plan exists and the next is no faster by
    ``seconds``: more micro-batches take less memory but more time. ``always``: also for one
    micro-batch, and for calls without a backward where possible. ``cuts``: as ``asked`` of
    :func:`micro_batched`. Raises :class:`PlanError` as ``make`` and :func:`micro_batched` do; if no
    number works, the error of the largest.
    """
    if asked != AUTO:
        return make(*_one_micro_batch(graph, asked, always, cuts))
    best: PlannedStep | None = None
    why: PlanError | None = None
    for count in _candidate_counts(graph, always, cuts):
        part = _one_micro_batch(graph, count, always, cuts)
        try:
            found = make(*part)
        except PlanError as error:
            why = error
            log.info("%d micro-batches: no plan", count)
            continue
        log.info("%d micro-batches: %.4g s", count, seconds(found))
        if best is not None and seconds(found) >= seconds(best):
            break
        best = found
    if best is None:
        assert why is not None
        raise why
    return best


def _one_micro_batch(
    graph: Graph, count: int, always: bool, cuts: Mapping[str, Placement] | None
) -> tuple[Graph, MicroBatches | None]:
    several = count > 1 or always if graph.training else count > 1 and always
    if not several:
        return graph, None
    try:
        return micro_batched(graph, count, cuts)
    except PlanError as error:
        if graph.training:
            raise
        log.info("without a backward, the whole batch at once: %s", error)
        return graph, None


def _candidate_counts(graph: Graph, always: bool, cuts: Mapping[str, Placement] | None) -> list[int]:
    """Divisors of the batch; [1] if the model does not divide into micro-batches."""
    if not (graph.training or always) or graph.symbols.read:
        return [1]
    lengths = [n for i in graph.inputs if i.kind == "input" for n in graph.types[i.name].shape]
    for prime in (p for p in PRIMES if any(n % p == 0 and n for n in lengths)):
        try:
            _, micro = micro_batched(graph, prime, cuts)
        except PlanError as error:
            log.info("not in %d micro-batches: %s", prime, error)
            continue
        batch = math.gcd(*(graph.types[name].shape[d] for name, d in micro.inputs.values() if d is not None))
        return [n for n in range(1, batch + 1) if batch % n == 0]
    return [1]

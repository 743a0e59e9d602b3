"""Search within memory: search, simulate, and search again with a corrected limit.

The cost network counts parameters, optimizer states and saved activations as linear sums over
choices. Temporaries, gathered parameters and gradients in transit are known only from a simulation.
So the limit of the sums is the budget less the rest in the last simulated plan.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from autoshard.errors import HintError, PlanError
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Assignment
from autoshard.passes.ir.memory import Memory
from autoshard.passes.ir.program import Program
from autoshard.passes.ir.sizes import noting
from autoshard.passes.ir.units import show_bytes
from autoshard.passes.lower.lowered import lowered
from autoshard.passes.memory.simulate import simulate
from autoshard.passes.propagate.planner import LITTLE, Planner, proven

log = logging.getLogger("autoshard.plan")

SHARE = 0.9
"""default budget, as a share of the hardware's memory"""
LEAST_ROUNDS = 10
"""most searches for the least memory while no plan fits; half as many where choices are narrowed"""
WORTH = (0.0, 1 / 16, 1 / 4, 1.0, 0.0, 1 / 16, 1 / 4, 1.0, 4.0, 16.0)
"""the worth of a second in bytes, in turn, as a multiple of the last plan's bytes per second. Quick
plans work on little, and small models that move little hold little"""
QUICKER_ROUNDS = 8
"""searches for a quicker plan after the least-memory one fits"""
MOMENT = 1e-12
"""seconds: below every step that takes any time"""
STEP = 16.0
"""factor on the worth of a second, until one plan fits and one does not"""
RATE = 4.0
"""exponential weight of a peak's moments in the next search, over moments that hold nothing"""
ROUNDS = 4
"""most searches under a limit"""
MORE_ROUNDS = 10
"""the same while no plan fits"""
CLOSE = 0.02
"""share of the budget below which two limits are the same"""
GAP = 0.01
"""gap between cost and bound, relative to the cost, from which on the peak moment is searched"""
WIDE = 0.05
"""the same gap from which on all moments are searched"""
SPARED = 0.015
"""share of the budget withheld from the first limit, whose plan may differ much from the last"""


def fitting(
    planner: Planner, memory_budget: float | None, others: Iterable[Callable[[], Planner]] = ()
) -> tuple[Program, Memory]:
    """The cheapest program found whose simulated peak is within ``memory_budget``, and its memory.

    ``memory_budget``: bytes per rank, by default 90 % of the hardware's. ``others``: searches among
    fewer choices, such as named strategies, tried if the gap to the bound is large. Raises
    :class:`PlanError` if no program fits, with the least peak found and what helps;
    :class:`HintError` from constraints.
    """
    mesh, optimizer, flying = planner.mesh, planner.optimizer, planner.flying
    budget = SHARE * mesh.hardware.memory_bytes if memory_budget is None else memory_budget
    cheapest = planner.cheapest(rough=True)
    program, memory = tried(cheapest, optimizer, flying)
    rough = (_bounded(program, 0.0), memory) if memory.peak <= budget else None
    # a rough plan that does not fit is refined under a limit, among the same choices
    if rough is not None and (found := planner.searched_on(cheapest)) is not cheapest:
        if found.solution.choice == cheapest.solution.choice:  # the same program, with another bound
            program = replace(program, assignment=replace(program.assignment, solution=found.solution))
        else:
            program, memory = tried(found, optimizer, flying)
    if memory.peak <= budget:
        return replace(program, assignment=proven(program.assignment)), memory
    best = _Best(budget, (_bounded(program, 0.0), memory), rough)
    del cheapest, program  # releases the search that found it
    best.of(_searched(planner, best, *best.closest))
    if best.fits is None:
        raise PlanError(_does_not_fit(best.closest[1], budget, mesh))
    bound = planner.bound(budget)
    # activations of earlier micro-batches are there at any moment; the rough plan had no limit
    if best.gap(bound) > GAP and not flying and best.fits is not rough:
        best.of(_at_its_moment(planner, budget, *best.fits))
        weights = (RATE * _then(planner, best.fits[1]), np.zeros(len(planner.graph.nodes) + 1))
        for excess in weights:  # weighted by a fitting plan, then uniformly
            if best.gap(bound) > WIDE:
                planner.freely()
                best.of(_quicker(planner, budget, excess, 0.0, best.seconds))
    if best.gap(bound) > WIDE and planner.effort.branches:
        best.of(_of_fewer(others, best))
    return _bounded(best.fits[0], bound), best.fits[1]


@dataclass
class _Best:
    """The program closest to the budget, and the quickest one within it."""

    budget: float
    closest: tuple[Program, Memory]
    fits: tuple[Program, Memory] | None

    @property
    def seconds(self) -> float:
        return math.inf if self.fits is None else _seconds(self.fits[0])

    def gap(self, bound: float) -> float:
        """Between the quickest program and a bound, relative to its seconds."""
        return 1 - bound / self.seconds

    def of(self, found: Iterable[tuple[Program, Memory]]) -> None:
        """Take these candidates, too."""
        for program, memory in found:
            self.closest = min(self.closest, (program, memory), key=lambda each: each[1].peak)
            if memory.peak <= self.budget and _seconds(program) < self.seconds:
                self.fits = program, memory


def _bounded(program: Program, bound: float) -> Program:
    """``program`` with a lower bound on the cost of all choices within the budget."""
    found = program.assignment.solution.bounded(bound)
    return replace(program, assignment=replace(program.assignment, solution=found))


Found = Generator[tuple[Program, Memory], None, "Ended"]


class Ended(NamedTuple):
    """How a sequence of searches ended."""

    fits: bool = False
    """whether a plan was within the budget"""
    rests: bool = False
    """whether another search would find nothing new (converged)"""


def _searched(planner: Planner, best: _Best, program: Program, memory: Memory) -> Iterator[tuple[Program, Memory]]:
    """Plans under limits that approach the budget less the bytes outside the linear sums."""
    budget = best.budget
    limit = (1 - SPARED) * budget - (memory.peak - planner.held(program.assignment))
    ended = yield from _closer(planner, budget, limit)
    search = partial(_closer, limit=limit, most=ROUNDS, best=best) if ended.fits else _least
    if not ended.fits:
        ended = yield from _least(planner, budget, LEAST_ROUNDS)
    fits = ended.fits
    with contextlib.suppress(PlanError):  # hints may differ between axes
        if planner.mesh.ndim > 1 and not ended.rests:
            planner.evenly()
            fits |= (yield from search(planner, budget)).fits
    if planner.decides and not fits:
        with contextlib.suppress(PlanError):  # or no block can be recomputed as one
            planner.by_blocks()
            yield from _least(planner, budget)


def _least(planner: Planner, budget: float, most: int = LEAST_ROUNDS // 2) -> Found:
    """Plans of least memory; once one is within the budget, quicker ones.

    A search minimizes weighted means over moments, not the peak: weights grow with bytes held.
    Source: Freund and Schapire, Adaptive game playing using multiplicative weights (1999).
    """
    excess, rate = np.zeros(len(planner.graph.nodes) + 1), 0.0
    for number in range(most):
        assignment, held = planner.least(excess, max(LITTLE, WORTH[number % len(WORTH)] * rate))
        program, memory = tried(assignment, planner.optimizer, planner.flying)
        log.info("the least held in a mean of moments: peak %.4g B", memory.peak)
        yield program, memory
        if memory.peak <= budget:
            limit = yield from _quicker(planner, budget, excess, budget - (memory.peak - held), _seconds(program))
            yield from _closer(planner, budget, limit, ROUNDS)
            return Ended(fits=True, rests=True)
        excess, rate = excess + RATE * _then(planner, memory), memory.peak / max(_seconds(program), MOMENT)
    return Ended()


def _quicker(
    planner: Planner, budget: float, excess: np.ndarray, limit: float, seconds: float
) -> Generator[tuple[Program, Memory], None, float]:
    """Plans quicker than a fitting one that takes ``seconds``, by bisection on the price of a
    second. ``limit``: what that plan's choices may hold. Returns the limit that the last fitting
    plan leaves."""
    low, high, price = 0.0, math.inf, budget / max(seconds, MOMENT)
    for _ in range(QUICKER_ROUNDS):
        assignment, held = planner.least(excess, price)
        program, memory = tried(assignment, planner.optimizer, planner.flying)
        log.info("peak %.4g B, budget %.4g B where a second is worth %.4g B", memory.peak, budget, price)
        yield program, memory
        if memory.peak <= budget:
            low, limit = price, budget - (memory.peak - held)
        else:
            high, excess = price, excess + RATE * _then(planner, memory)
        price = STEP * low if math.isinf(high) else high / STEP if low == 0 else math.sqrt(low * high)
    return limit


def _then(planner: Planner, memory: Memory) -> np.ndarray:
    """Bytes held at each operation and at the optimizer's step, relative to the peak, less 1."""
    place = {node.name: i for i, node in enumerate(planner.graph.nodes)}
    held = np.zeros(len(place) + 1)
    for name, phase, size in memory.curve:
        at = -1 if phase == "step" else place.get(name, -1)
        held[at] = max(held[at], size)
    return held / memory.peak - 1


def _closer(planner: Planner, budget: float, limit: float, most: int = MORE_ROUNDS, best: _Best | None = None) -> Found:
    """Plans under limits updated from each simulation, ``most`` while none fits.

    ``best``: stop at a plan that is slower than it and does not fit. The iteration need not
    converge, since the uncounted bytes differ between plans. So each limit stays between one that
    fits or is infeasible, and the bytes of a plan that does not fit.
    """
    low, high, fits = 0.0, math.inf, False
    for number in range(most):
        if fits and number >= ROUNDS:
            break
        proposed = math.inf
        try:
            assignment, held = planner.within(limit, budget)
        except PlanError:
            low = limit
        else:
            program, memory = tried(assignment, planner.optimizer, planner.flying)
            yield program, memory
            proposed = budget - (memory.peak - held)
            log.info("peak %.4g B, budget %.4g B: choices may hold %.4g B", memory.peak, budget, proposed)
            if memory.peak > budget:
                high = min(high, held)
                if best is not None and _seconds(program) >= best.seconds:
                    return Ended(fits)
            elif proposed < limit + CLOSE * budget:
                return Ended(fits=True, rests=True)
            else:
                low, fits = limit, True
        limit = proposed if low < proposed < high else (low + high) / 2
        if math.isinf(limit) or high - low <= CLOSE * budget:
            break
    return Ended(fits)


def _of_fewer(others: Iterable[Callable[[], Planner]], best: _Best) -> Iterator[tuple[Program, Memory]]:
    """Results among fewer choices, where the unconstrained optimum beats the best so far."""
    for make in others:
        with contextlib.suppress(PlanError, HintError):  # does not fit, or contradicts these hints
            planner = make()
            if planner.cheapest(rough=True).solution.cost < best.seconds:
                yield fitting(planner, best.budget)


def _at_its_moment(
    planner: Planner, budget: float, program: Program, memory: Memory
) -> Iterator[tuple[Program, Memory]]:
    """Plans with separate limits for the moment of the peak and for the end of the forward.

    An operation with large temporaries, such as attention with dropout, may need its room before
    the head and the loss hold anything, or after.
    """
    moment = max(memory.curve, key=lambda point: point[2])[0]
    place = {node.name: i for i, node in enumerate(planner.graph.nodes)}
    for _ in range(ROUNDS if moment in place else 0):
        then, end = planner.held_at(program.assignment, moment)
        if end - then < CLOSE * budget:
            return
        points = [(place[name] > place[moment], size) for name, _, size in memory.curve if name in place]
        until, after = (max((size for late, size in points if late is side), default=0.0) for side in (False, True))
        planner.at(moment)
        try:
            found, _ = planner.within(budget - (after - end), budget, budget - (until - then))
        except PlanError:
            return
        if found.solution.choice == program.assignment.solution.choice:
            return
        program, memory = tried(found, planner.optimizer)
        log.info("peak %.4g B where what is held at %s has a limit of its own", memory.peak, moment)
        yield program, memory


def _seconds(program: Program) -> float:
    return program.assignment.solution.cost


def tried(assignment: Assignment, optimizer: str, flying: int = 0) -> tuple[Program, Memory]:
    """Lower an assignment and simulate its memory; ``flying``: micro-batches in flight."""
    program = lowered(assignment)
    with noting():  # memory at the example's lengths: these decisions bind no program
        memory = simulate(program, optimizer)
    return program, memory.in_flight(flying) if flying else memory


def _does_not_fit(memory: Memory, budget: float, mesh: Mesh) -> str:
    largest = max(memory.at_peak, key=lambda part: memory.at_peak[part])
    helps = {
        "activations": "recompute, a smaller batch per rank, micro-batches, or more ranks on an axis that cuts the batch or "
        "the sequence",
        "temporaries": "a smaller batch per rank, or more ranks on an axis that cuts the largest operation",
    }.get(largest, "more ranks on an axis that may cut parameters, or an optimizer that keeps less")
    return (
        f"no plan within {show_bytes(budget, 4)} per rank was found on {mesh}: the least peak found is "
        f"{show_bytes(memory.peak, 4)}, at {memory.moment} ({memory.dominant()}). What helps: {helps}."
    )

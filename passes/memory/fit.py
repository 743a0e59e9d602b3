"""The cheapest program whose peak is within the memory budget: search, simulate, and search again with what was learnt.

The search knows parameters, what optimizers keep of them, and activations that are kept, as sums over its choices. The
rest (temporaries, gathered parameters, gradients on their way) it learns from the simulation of the plan it found: the
limit of its sums is the budget less that rest.
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
"""of the hardware's memory: the budget where none is given"""
LEAST_ROUNDS = 10
"""searches for what holds least, at most, where no other plan fits; half as many where choices are narrowed"""
WORTH = (0.0, 1 / 16, 1 / 4, 1.0, 0.0, 1 / 16, 1 / 4, 1.0, 4.0, 16.0)
"""of the bytes per second of the plan before: what a second is worth in these, in turn. Quick plans work on little, and those
that move little hold little of small models"""
QUICKER_ROUNDS = 8
"""searches for one that takes less time, where one that holds least fits"""
MOMENT = 1e-12
"""seconds: less than any step takes that takes time"""
STEP = 16.0
"""by which a second is worth more in the next of them, or less, until one fits and one does not"""
RATE = 4.0
"""by which the moments of a peak count more in the next one of them, as a power of e, than those where nothing is held"""
ROUNDS = 4
"""searches under a limit, at most"""
MORE_ROUNDS = 10
"""the same while no plan was found that fits"""
CLOSE = 0.02
"""limits that differ by less, as a part of the budget, are one"""
GAP = 0.01
"""between the cost and its bound, as a part of the cost, from which on the moment of the peak is looked at"""
WIDE = 0.05
"""the same, from which on all moments are"""
SPARED = 0.015
"""of the budget, under the first limit: what is not known differs much from the plan that it is taken from"""


def fitting(
    planner: Planner, memory_budget: float | None, others: Iterable[Callable[[], Planner]] = ()
) -> tuple[Program, Memory]:
    """The cheapest program found whose peak is within ``memory_budget`` bytes per rank, and its memory.

    ``memory_budget``: default 90 % of the hardware's memory; ``others``: searches among fewer choices, such as experts', for
    where what is found is far above its bound. Raises :class:`PlanError` where none is found: with the
    least peak that was, what it consists of, and what helps; :class:`HintError` from constraints.
    """
    mesh, optimizer, flying = planner.mesh, planner.optimizer, planner.flying
    budget = SHARE * mesh.hardware.memory_bytes if memory_budget is None else memory_budget
    cheapest = planner.cheapest(rough=True)
    program, memory = tried(cheapest, optimizer, flying)
    rough = (_bounded(program, 0.0), memory) if memory.peak <= budget else None
    # what does not fit is searched for under a limit, among the same choices
    if rough is not None and (found := planner.searched_on(cheapest)) is not cheapest:
        if found.solution.choice == cheapest.solution.choice:  # the same program, with another bound
            program = replace(program, assignment=replace(program.assignment, solution=found.solution))
        else:
            program, memory = tried(found, optimizer, flying)
    if memory.peak <= budget:
        return replace(program, assignment=proven(program.assignment)), memory
    best = _Best(budget, (_bounded(program, 0.0), memory), rough)
    del cheapest, program  # and what it was found in
    best.of(_searched(planner, best, *best.closest))
    if best.fits is None:
        raise PlanError(_does_not_fit(best.closest[1], budget, mesh))
    bound = planner.bound(budget)
    # what earlier micro-batches keep is there at any moment; the rough plan was not found under a limit
    if best.gap(bound) > GAP and not flying and best.fits is not rough:
        best.of(_at_its_moment(planner, budget, *best.fits))
        weights = (RATE * _then(planner, best.fits[1]), np.zeros(len(planner.graph.nodes) + 1))
        for excess in weights:  # moments of a plan that fits, and all moments alike
            if best.gap(bound) > WIDE:
                planner.freely()
                best.of(_quicker(planner, budget, excess, 0.0, best.seconds))
    if best.gap(bound) > WIDE and planner.effort.branches:
        best.of(_of_fewer(others, best))
    return _bounded(best.fits[0], bound), best.fits[1]


@dataclass
class _Best:
    """Of the programs that were tried, the one that comes closest to the budget, and the quickest within it."""

    budget: float
    closest: tuple[Program, Memory]
    fits: tuple[Program, Memory] | None

    @property
    def seconds(self) -> float:
        return math.inf if self.fits is None else _seconds(self.fits[0])

    def gap(self, bound: float) -> float:
        """Between the quickest and a bound, as a part of its seconds."""
        return 1 - bound / self.seconds

    def of(self, found: Iterable[tuple[Program, Memory]]) -> None:
        """Take these, too."""
        for program, memory in found:
            self.closest = min(self.closest, (program, memory), key=lambda each: each[1].peak)
            if memory.peak <= self.budget and _seconds(program) < self.seconds:
                self.fits = program, memory


def _bounded(program: Program, bound: float) -> Program:
    """With a bound of what all cost whose choices hold no more than the budget."""
    found = program.assignment.solution.bounded(bound)
    return replace(program, assignment=replace(program.assignment, solution=found))


Found = Generator[tuple[Program, Memory], None, "Ended"]


class Ended(NamedTuple):
    """How a sequence of searches ended."""

    fits: bool = False
    """whether a plan was within the budget"""
    rests: bool = False
    """whether another search would find no more"""


def _searched(planner: Planner, best: _Best, program: Program, memory: Memory) -> Iterator[tuple[Program, Memory]]:
    """Plans under limits that come closer and closer to the budget less what the search does not know of."""
    budget = best.budget
    limit = (1 - SPARED) * budget - (memory.peak - planner.held(program.assignment))
    ended = yield from _closer(planner, budget, limit)
    search = partial(_closer, limit=limit, most=ROUNDS, best=best) if ended.fits else _least
    if not ended.fits:
        ended = yield from _least(planner, budget, LEAST_ROUNDS)
    fits = ended.fits
    with contextlib.suppress(PlanError):  # hints may ask for different things along the axes
        if planner.mesh.ndim > 1 and not ended.rests:
            planner.evenly()
            fits |= (yield from search(planner, budget)).fits
    if planner.decides and not fits:
        with contextlib.suppress(PlanError):  # or for what leaves no block that can be made again as one
            planner.by_blocks()
            yield from _least(planner, budget)


def _least(planner: Planner, budget: float, most: int = LEAST_ROUNDS // 2) -> Found:
    """Plans that hold least; where one is within the budget, then those that take less time.

    A mean over the moments of the step can be searched for, the peak cannot: moments count the more, the more the plans
    before held then. Source: Freund and Schapire, Adaptive game playing using multiplicative weights (1999).
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
    """Plans that take less time than one that fits, of ``seconds`` and held least by ``excess``: seconds are worth more.
    Returns the limit of what choices hold that the last one leaves which fits; ``limit``: that of the first.
    """
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
    """What was held at the moment of each operation and at the optimizer's step, above the peak, as a part of that."""
    place = {node.name: i for i, node in enumerate(planner.graph.nodes)}
    held = np.zeros(len(place) + 1)
    for name, phase, size in memory.curve:
        at = -1 if phase == "step" else place.get(name, -1)
        held[at] = max(held[at], size)
    return held / memory.peak - 1


def _closer(planner: Planner, budget: float, limit: float, most: int = MORE_ROUNDS, best: _Best | None = None) -> Found:
    """Plans whose choices hold at most ``limit``, and then what the simulation of the last leaves of the budget; ``most``:
    searches, while none is within it; ``best``: beside which a plan that takes longer, and does not fit, leads to no better.

    That need not come to rest: what is not known of the choices differs from plan to plan. So limits stay between one whose
    plan fits, or that allows none, and what is held by a plan that does not.
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
    """What searches among fewer choices find, of those whose quickest is quicker than the best."""
    for make in others:
        with contextlib.suppress(PlanError, HintError):  # not within the budget, or not beside these hints
            planner = make()
            if planner.cheapest(rough=True).solution.cost < best.seconds:
                yield fitting(planner, best.budget)


def _at_its_moment(
    planner: Planner, budget: float, program: Program, memory: Memory
) -> Iterator[tuple[Program, Memory]]:
    """Plans where what is held at the moment of this peak, and at the end of the forward, has each its own limit.

    An operation that works on much, such as attention with dropout, may need room when the head and the loss hold nothing
    yet, or no longer.
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
    """The program of an assignment, and its memory; ``flying``: of a stage, the micro-batches in flight."""
    program = lowered(assignment)
    with noting():  # memory is that of the example's lengths: what they decide binds no program
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

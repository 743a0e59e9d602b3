"""Search within memory: search, simulate, and search again with a corrected limit.

The cost network counts parameters, optimizer states and saved activations as linear sums over
choices. Temporaries, gathered parameters and gradients in transit are known only from a simulation.
So the limit of the sums is the budget less the rest in the last simulated plan.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from autoshard.errors import HintError, PlanError
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Assignment
from autoshard.passes.ir.memory import Memory
from autoshard.passes.ir.program import Program
from autoshard.passes.ir.sizes import record_conditions
from autoshard.passes.ir.text import show_bytes
from autoshard.passes.lower.lowering import lower_assignment
from autoshard.passes.memory.simulate import simulate_memory
from autoshard.passes.propagate.named_strategies import NamedStrategy
from autoshard.passes.propagate.planner import TIE_BYTES_PER_SECOND, Planner, with_proven_bound

log = logging.getLogger("autoshard.plan")

DEFAULT_BUDGET_SHARE = 0.9
"""default budget, as a share of the hardware's memory"""
LEAST_ROUNDS = 10
"""most searches for the least memory while no plan fits; half as many where choices are narrowed"""
SECOND_PRICES = (0.0, 1 / 16, 1 / 4, 1.0, 0.0, 1 / 16, 1 / 4, 1.0, 4.0, 16.0)
"""the worth of a second in bytes, in turn, as a multiple of the last plan's bytes per second. Quick
plans work on little, and small models that move little hold little"""
QUICKER_ROUNDS = 8
"""searches for a quicker plan after the least-memory one fits"""
MIN_STEP_SECONDS = 1e-12
"""seconds: below every step that takes any time"""
PRICE_STEP = 16.0
"""factor on the worth of a second, until one plan fits and one does not"""
MOMENT_WEIGHT_RATE = 4.0
"""exponential weight of a peak's moments in the next search, over moments that hold nothing"""
LIMIT_ROUNDS = 4
"""most searches under a limit"""
UNFIT_LIMIT_ROUNDS = 10
"""the same while no plan fits"""
CLOSE_LIMITS = 0.02
"""share of the budget below which two limits are the same"""
MOMENT_GAP = 0.01
"""gap between cost and bound, relative to the cost, from which on the peak moment is searched"""
WIDE_GAP = 0.05
"""the same gap from which on all moments are searched"""
FIRST_LIMIT_MARGIN = 0.015
"""share of the budget withheld from the first limit, whose plan may differ much from the last"""


def search_within_memory(
    planner: Planner, memory_budget: float | None, baselines: Iterable[NamedStrategy] = ()
) -> tuple[Program, Memory]:
    """The cheapest program found whose simulated peak is within ``memory_budget``, and its memory.

    ``memory_budget``: bytes per rank, by default 90 % of the hardware's. ``baselines``:
    named strategies, tried if the gap to the bound is large. Raises
    :class:`PlanError` if no program fits, with the least peak found and what helps;
    :class:`HintError` from constraints.
    """
    mesh, optimizer, micro_batches_held = planner.mesh, planner.optimizer, planner.micro_batches_held
    budget = DEFAULT_BUDGET_SHARE * mesh.hardware.memory_bytes if memory_budget is None else memory_budget
    cheapest = planner.cheapest(rough=True)
    program, memory = lower_and_simulate(cheapest, optimizer, micro_batches_held)
    rough = (_with_bound(program, 0.0), memory) if memory.peak <= budget else None
    # a rough plan that does not fit is refined under a limit, among the same choices
    if rough is not None and (found := planner.refined(cheapest)) is not cheapest:
        if found.solution.choice == cheapest.solution.choice:  # the same program, with another bound
            program = replace(program, assignment=replace(program.assignment, solution=found.solution))
        else:
            program, memory = lower_and_simulate(found, optimizer, micro_batches_held)
    if memory.peak <= budget:
        return replace(program, assignment=with_proven_bound(program.assignment)), memory
    best = _BestPrograms(budget, (_with_bound(program, 0.0), memory), rough)
    del cheapest, program  # releases the search that found it
    best.of(_search_under_limits(planner, best, *best.closest))
    if best.fits is None:
        raise PlanError(_budget_error(best.closest[1], budget, mesh))
    bound = planner.bound(budget)
    # activations of earlier micro-batches are there at any moment; the rough plan had no limit
    if best.gap(bound) > MOMENT_GAP and not micro_batches_held and best.fits is not rough:
        best.of(_plans_at_peak_moment(planner, budget, *best.fits))
        weights = (MOMENT_WEIGHT_RATE * _relative_excess(planner, best.fits[1]), np.zeros(len(planner.graph.nodes) + 1))
        for excess in weights:  # weighted by a fitting plan, then uniformly
            if best.gap(bound) > WIDE_GAP:
                planner.lift_restrictions()
                best.of(_quicker_plans(planner, budget, excess, 0.0, best.seconds))
    if best.gap(bound) > WIDE_GAP and planner.effort.branches:
        best.of(_plans_of_strategies(planner, baselines, best))
    return _with_bound(best.fits[0], bound), best.fits[1]


@dataclass
class _BestPrograms:
    """The program closest to the budget, and the quickest one within it."""

    budget: float
    closest: tuple[Program, Memory]
    fits: tuple[Program, Memory] | None

    @property
    def seconds(self) -> float:
        return math.inf if self.fits is None else _program_seconds(self.fits[0])

    def gap(self, bound: float) -> float:
        """Between the quickest program and a bound, relative to its seconds."""
        return 1 - bound / self.seconds

    def of(self, found: Iterable[tuple[Program, Memory]]) -> None:
        """Take these candidates, too."""
        for program, memory in found:
            self.closest = min(self.closest, (program, memory), key=lambda each: each[1].peak)
            if memory.peak <= self.budget and _program_seconds(program) < self.seconds:
                self.fits = program, memory


def _with_bound(program: Program, bound: float) -> Program:
    """``program`` with a lower bound on the cost of all choices within the budget."""
    found = program.assignment.solution.bounded(bound)
    return replace(program, assignment=replace(program.assignment, solution=found))


SearchSteps = Generator[tuple[Program, Memory], None, "SearchEnd"]


class SearchEnd(NamedTuple):
    """How a sequence of searches ended."""

    fits: bool = False
    """whether a plan was within the budget"""
    rests: bool = False
    """whether another search would find nothing new (converged)"""


def _search_under_limits(
    planner: Planner, best: _BestPrograms, program: Program, memory: Memory
) -> Iterator[tuple[Program, Memory]]:
    """Plans under limits that approach the budget less the bytes outside the linear sums."""
    budget = best.budget
    limit = (1 - FIRST_LIMIT_MARGIN) * budget - (memory.peak - planner.held(program.assignment))
    ended = yield from _plans_under_limits(planner, budget, limit)
    search = (
        partial(_plans_under_limits, limit=limit, most=LIMIT_ROUNDS, best=best) if ended.fits else _least_memory_plans
    )
    if not ended.fits:
        ended = yield from _least_memory_plans(planner, budget, LEAST_ROUNDS)
    fits = ended.fits
    with contextlib.suppress(PlanError):  # hints may differ between axes
        if planner.mesh.ndim > 1 and not ended.rests:
            planner.restrict_evenly()
            fits |= (yield from search(planner, budget)).fits
    if planner.searches_recompute and not fits:
        with contextlib.suppress(PlanError):  # or no block can be recomputed as one
            planner.recompute_by_block()
            yield from _least_memory_plans(planner, budget)


def _least_memory_plans(planner: Planner, budget: float, most: int = LEAST_ROUNDS // 2) -> SearchSteps:
    """Plans of least memory; once one is within the budget, quicker ones.

    A search minimizes weighted means over moments, not the peak: weights grow with bytes held.
    Source: Freund and Schapire, Adaptive game playing using multiplicative weights (1999).
    """
    excess, rate = np.zeros(len(planner.graph.nodes) + 1), 0.0
    for number in range(most):
        assignment, held = planner.least(
            excess, max(TIE_BYTES_PER_SECOND, SECOND_PRICES[number % len(SECOND_PRICES)] * rate)
        )
        program, memory = lower_and_simulate(assignment, planner.optimizer, planner.micro_batches_held)
        log.info("the least held in a mean of moments: peak %.4g B", memory.peak)
        yield program, memory
        if memory.peak <= budget:
            limit = yield from _quicker_plans(
                planner, budget, excess, budget - (memory.peak - held), _program_seconds(program)
            )
            yield from _plans_under_limits(planner, budget, limit, LIMIT_ROUNDS)
            return SearchEnd(fits=True, rests=True)
        excess, rate = (
            excess + MOMENT_WEIGHT_RATE * _relative_excess(planner, memory),
            memory.peak / max(_program_seconds(program), MIN_STEP_SECONDS),
        )
    return SearchEnd()


def _quicker_plans(
    planner: Planner, budget: float, excess: np.ndarray, limit: float, seconds: float
) -> Generator[tuple[Program, Memory], None, float]:
    """Plans quicker than a fitting one that takes ``seconds``, by bisection on the price of a
    second. ``limit``: what that plan's choices may hold. Returns the limit that the last fitting
    plan leaves."""
    low, high, price = 0.0, math.inf, budget / max(seconds, MIN_STEP_SECONDS)
    for _ in range(QUICKER_ROUNDS):
        assignment, held = planner.least(excess, price)
        program, memory = lower_and_simulate(assignment, planner.optimizer, planner.micro_batches_held)
        log.info("peak %.4g B, budget %.4g B where a second is worth %.4g B", memory.peak, budget, price)
        yield program, memory
        if memory.peak <= budget:
            low, limit = price, budget - (memory.peak - held)
        else:
            high, excess = price, excess + MOMENT_WEIGHT_RATE * _relative_excess(planner, memory)
        price = PRICE_STEP * low if math.isinf(high) else high / PRICE_STEP if low == 0 else math.sqrt(low * high)
    return limit


def _relative_excess(planner: Planner, memory: Memory) -> np.ndarray:
    """Bytes held at each operation and at the optimizer's step, relative to the peak, less 1."""
    place = {node.name: i for i, node in enumerate(planner.graph.nodes)}
    held = np.zeros(len(place) + 1)
    for name, phase, size in memory.curve:
        at = -1 if phase == "step" else place.get(name, -1)
        held[at] = max(held[at], size)
    return held / memory.peak - 1


def _plans_under_limits(
    planner: Planner, budget: float, limit: float, most: int = UNFIT_LIMIT_ROUNDS, best: _BestPrograms | None = None
) -> SearchSteps:
    """Plans under limits updated from each simulation, ``most`` while none fits.

    ``best``: stop at a plan that is slower than it and does not fit. The iteration need not
    converge, since the uncounted bytes differ between plans. So each limit stays between one that
    fits or is infeasible, and the bytes of a plan that does not fit.
    """
    low, high, fits = 0.0, math.inf, False
    for number in range(most):
        if fits and number >= LIMIT_ROUNDS:
            break
        proposed = math.inf
        try:
            assignment, held = planner.within(limit, budget)
        except PlanError:
            low = limit
        else:
            program, memory = lower_and_simulate(assignment, planner.optimizer, planner.micro_batches_held)
            yield program, memory
            proposed = budget - (memory.peak - held)
            log.info("peak %.4g B, budget %.4g B: choices may hold %.4g B", memory.peak, budget, proposed)
            if memory.peak > budget:
                high = min(high, held)
                if best is not None and _program_seconds(program) >= best.seconds:
                    return SearchEnd(fits)
            elif proposed < limit + CLOSE_LIMITS * budget:
                return SearchEnd(fits=True, rests=True)
            else:
                low, fits = limit, True
        limit = proposed if low < proposed < high else (low + high) / 2
        if math.isinf(limit) or high - low <= CLOSE_LIMITS * budget:
            break
    return SearchEnd(fits)


def _plans_of_strategies(
    planner: Planner, baselines: Iterable[NamedStrategy], best: _BestPrograms
) -> Iterator[tuple[Program, Memory]]:
    """Results among fewer choices, where the unconstrained optimum beats the best so far."""
    for strategy in baselines:
        with contextlib.suppress(PlanError, HintError):  # does not fit, or contradicts these hints
            fewer = planner.under(strategy)
            if fewer.cheapest(rough=True).solution.cost < best.seconds:
                yield search_within_memory(fewer, best.budget)


def _plans_at_peak_moment(
    planner: Planner, budget: float, program: Program, memory: Memory
) -> Iterator[tuple[Program, Memory]]:
    """Plans with separate limits for the moment of the peak and for the end of the forward.

    An operation with large temporaries, such as attention with dropout, may need its room before
    the head and the loss hold anything, or after.
    """
    moment = max(memory.curve, key=lambda point: point[2])[0]
    place = {node.name: i for i, node in enumerate(planner.graph.nodes)}
    for _ in range(LIMIT_ROUNDS if moment in place else 0):
        then, end = planner.bytes_at(program.assignment, moment)
        if end - then < CLOSE_LIMITS * budget:
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
        program, memory = lower_and_simulate(found, planner.optimizer)
        log.info("peak %.4g B where what is held at %s has a limit of its own", memory.peak, moment)
        yield program, memory


def _program_seconds(program: Program) -> float:
    return program.assignment.solution.cost


def lower_and_simulate(assignment: Assignment, optimizer: str, micro_batches_held: int = 0) -> tuple[Program, Memory]:
    """Lower an assignment and simulate its memory; ``micro_batches_held``: micro-batches in flight."""
    program = lower_assignment(assignment)
    with record_conditions():  # memory at the example's lengths: these decisions bind no program
        memory = simulate_memory(program, optimizer)
    return program, memory.in_flight(micro_batches_held) if micro_batches_held else memory


def _budget_error(memory: Memory, budget: float, mesh: Mesh) -> str:
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

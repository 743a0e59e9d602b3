"""Search within memory by cutting planes (Kelley 1960): search, simulate, cut off the peak's
moment, repeat. The simulation knows every storage, the search linear rows: bytes live at a
moment, exact but for temporaries. A plan above the budget adds its row, with the limit that is
exact for this plan."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from autoshard.errors import BudgetError, HintError, PlanError
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Assignment
from autoshard.passes.ir.memory import Memory
from autoshard.passes.ir.program import Program
from autoshard.passes.ir.sizes import record_conditions
from autoshard.passes.ir.text import show_bytes
from autoshard.passes.lower.lowering import lower_assignment
from autoshard.passes.memory.simulate import simulate_memory
from autoshard.passes.propagate.named_strategies import NamedStrategy
from autoshard.passes.propagate.planner import FORWARD_END, TIE_BYTES_PER_SECOND, Planner, with_proven_bound
from autoshard.passes.search.limits import OUTER_LIMITS
from autoshard.progress import is_time_up

log = logging.getLogger("autoshard.plan")

SECOND_PRICES = (0.0, 1 / 16, 1 / 4, 1.0, 0.0, 1 / 16, 1 / 4, 1.0, 4.0, 16.0)
"""the worth of a second in bytes, in turn, as a multiple of the last plan's bytes per second. Quick
plans work on little, and small models that move little hold little"""
MIN_STEP_SECONDS = 1e-12
"""seconds: below every step that takes any time"""


def search_within_memory(
    planner: Planner, budget: float, baselines: Iterable[NamedStrategy] = (), quick: bool = False
) -> tuple[Program, Memory]:
    """The cheapest program found whose simulated peak is within ``budget``, and its memory.
    ``budget``: bytes per rank. ``baselines``: named strategies, tried if the gap is large.
    ``quick``: a good program without a bound. Raises
    :class:`BudgetError` with the least peak found and what helps; :class:`HintError`."""
    mesh, optimizer, micro_batches_held = planner.mesh, planner.optimizer, planner.micro_batches_held
    cheapest = planner.cheapest(rough=True)
    program, memory = lower_and_simulate(cheapest, optimizer, micro_batches_held)
    rough = (_with_bound(program, 0.0), memory) if memory.peak <= budget else None
    if rough is not None and (quick or is_time_up()):
        return rough
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
    held = micro_batches_held > 0  # activations of earlier micro-batches are there at any moment
    for at_end in dict.fromkeys((held,) if quick else (held, True)):
        if best.is_enough():
            break
        if at_end == held or best.fits is None or best.gap(planner.bound(budget)) > OUTER_LIMITS.narrow_gap:
            planner.forget_cuts()
            best.of(_plans_within_cuts(planner, budget, at_end))
    if best.fits is None:
        best.of(_least_memory_plans(planner, budget, held, 1 if quick else OUTER_LIMITS.least_rounds))
    if best.fits is None:
        raise BudgetError(_budget_error(best.closest[1], budget, mesh), best.closest[1].peak)
    if quick or best.is_enough():
        return _with_bound(best.fits[0], 0.0), replace(best.fits[1], limited=True)
    if best.gap(planner.bound(budget)) > OUTER_LIMITS.wide_gap:
        excess = OUTER_LIMITS.moment_weight_rate * _relative_excess(planner, best.fits[1])
        best.of(_quicker_plans(planner, budget, excess, best.seconds))
    bound = planner.bound(budget)  # of all that was simulated
    if best.gap(bound) > OUTER_LIMITS.wide_gap and planner.effort.branches:
        best.of(_plans_of_strategies(planner, baselines, best))
    return _with_bound(best.fits[0], bound), replace(best.fits[1], limited=True)


@dataclass
class _BestPrograms:
    """The program closest to the budget, and the quickest one within it."""

    budget: float
    closest: tuple[Program, Memory]
    fits: tuple[Program, Memory] | None

    @property
    def seconds(self) -> float:
        return math.inf if self.fits is None else self.fits[0].assignment.solution.cost

    def gap(self, bound: float) -> float:
        """Between the quickest program and a bound, relative to its seconds."""
        return 1 - bound / self.seconds

    def is_enough(self) -> bool:
        """Whether the time is up and a program fits."""
        return self.fits is not None and is_time_up()

    def of(self, found: Iterable[tuple[Program, Memory]]) -> None:
        """Take these candidates, too, until the time is up."""
        for program, memory in itertools.takewhile(lambda _: not self.is_enough(), found):
            self.closest = min(self.closest, (program, memory), key=lambda each: each[1].peak)
            if memory.peak <= self.budget and program.assignment.solution.cost < self.seconds:
                self.fits = program, memory


def _with_bound(program: Program, bound: float) -> Program:
    """``program`` with a lower bound on the cost of all choices within the budget."""
    found = program.assignment.solution.bounded(bound)
    return replace(program, assignment=replace(program.assignment, solution=found))


Simulated = Iterator[tuple[Program, Memory]]
"""programs, with their simulated memory"""


def _plans_within_cuts(planner: Planner, budget: float, at_end: bool) -> Simulated:
    """Plans of the network with the rows of all peaks so far, until the limits stay. ``at_end``:
    only the row of the end of the forward, without workspace and what is recomputed."""
    fits = False
    for number in range(OUTER_LIMITS.cut_rounds):
        if fits and number >= OUTER_LIMITS.fit_rounds:
            return
        try:
            assignment = planner.within(budget, OUTER_LIMITS.slack)
        except PlanError:
            if not planner.loosen(budget):
                return
            continue
        program, memory = _simulated(planner, assignment)
        log.info("peak %.4g B, budget %.4g B, at %s", memory.peak, budget, memory.moment)
        yield program, memory
        fits |= memory.peak <= budget
        if not planner.cut(_live(memory, at_end), budget, assignment):
            return


def _least_memory_plans(planner: Planner, budget: float, at_end: bool, rounds: int) -> Simulated:
    """Plans of least memory; once one is within the budget, quicker ones within its rows. Searches
    minimize means over moments, weighted by bytes held (Freund and Schapire 1999, multiplicative
    weights)."""
    excess, rate = np.zeros(len(planner.graph.nodes) + 1), 0.0
    for number in range(rounds):
        assignment = planner.least(excess, max(TIE_BYTES_PER_SECOND, SECOND_PRICES[number % len(SECOND_PRICES)] * rate))
        program, memory = _simulated(planner, assignment)
        log.info("least mean memory over moments: peak %.4g B", memory.peak)
        yield program, memory
        if memory.peak <= budget:
            planner.forget_cuts()
            planner.cut(_live(memory, at_end), budget, assignment)
            yield from _plans_within_cuts(planner, budget, at_end)
            return
        excess, rate = (
            excess + OUTER_LIMITS.moment_weight_rate * _relative_excess(planner, memory),
            memory.peak / max(program.assignment.solution.cost, MIN_STEP_SECONDS),
        )


def _simulated(planner: Planner, assignment: Assignment) -> tuple[Program, Memory]:
    """Program and memory of a limited search's result; the planner's bound learns of it."""
    program, memory = lower_and_simulate(assignment, planner.optimizer, planner.micro_batches_held)
    planner.learn(assignment, memory.peak)
    return program, memory


def _live(memory: Memory, at_end: bool) -> dict[str, float]:
    """Bytes by moment, or the peak as if it were at the end of the forward."""
    return {FORWARD_END: memory.peak} if at_end else memory.live()


def _quicker_plans(planner: Planner, budget: float, excess: np.ndarray, seconds: float) -> Simulated:
    """Plans quicker than one that fits in ``seconds``: bisection on the price of a second."""
    low, high, price = 0.0, math.inf, budget / max(seconds, MIN_STEP_SECONDS)
    for _ in range(OUTER_LIMITS.quicker_rounds):
        assignment = planner.least(excess, price)
        program, memory = _simulated(planner, assignment)
        log.info("peak %.4g B, budget %.4g B, with a second priced at %.4g B", memory.peak, budget, price)
        yield program, memory
        if memory.peak <= budget:
            low = price
        else:
            high, excess = price, excess + OUTER_LIMITS.moment_weight_rate * _relative_excess(planner, memory)
        if math.isinf(high) or low == 0:
            price = OUTER_LIMITS.price_step * low if low else high / OUTER_LIMITS.price_step
        else:
            price = math.sqrt(low * high)


def _relative_excess(planner: Planner, memory: Memory) -> np.ndarray:
    """Bytes held at each operation and at the optimizer's step, relative to the peak, less 1."""
    live = memory.live()
    names = (*(node.name for node in planner.graph.nodes), "")
    held = np.array([live.get(name, 0.0) for name in names])
    return held / memory.peak - 1


def _plans_of_strategies(
    planner: Planner, baselines: Iterable[NamedStrategy], best: _BestPrograms
) -> Iterator[tuple[Program, Memory]]:
    """Results among fewer choices, where the unconstrained optimum beats the best so far."""
    for strategy in baselines:
        with contextlib.suppress(PlanError, HintError):  # does not fit, or contradicts these hints
            fewer = planner.under(strategy)
            if fewer.cheapest(rough=True).solution.cost < best.seconds:
                yield search_within_memory(fewer, best.budget)


def lower_and_simulate(assignment: Assignment, optimizer: str, micro_batches_held: int = 0) -> tuple[Program, Memory]:
    """Lower and simulate an assignment; ``micro_batches_held``: micro-batches in flight."""
    program = lower_assignment(assignment)
    with record_conditions():  # memory at the example's lengths: these decisions bind no program
        memory = simulate_memory(program, optimizer)
    return program, memory.in_flight(micro_batches_held) if micro_batches_held else memory


def _budget_error(memory: Memory, budget: float, mesh: Mesh) -> str:
    largest = max(memory.at_peak, key=lambda part: memory.at_peak[part])
    helps = {
        "activations": "recompute, offload='activations', a smaller batch per rank, micro-batches, or more ranks on an "
        "axis that shards the batch or the sequence",
        "temporaries": "a smaller batch per rank, or more ranks on an axis that shards the largest operation",
    }.get(
        largest, "more ranks on an axis that may shard parameters, an optimizer with less state, or offload='optimizer'"
    )
    return (
        f"no plan within {show_bytes(budget, 4)} per rank was found on {mesh}. The least peak found is "
        f"{show_bytes(memory.peak, 4)}, at {memory.moment} ({memory.dominant()}). What helps: {helps}."
    )

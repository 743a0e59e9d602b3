"""Blocks whose saved tensors go to host memory: as few as the budget requires, and what the copies cost.

The first blocks of a model are taken, since the backward needs theirs last. A block's copies to the
host run beside the forward of the next block, and those back beside its backward. The search within
memory is run for looser limits, too, and blocks take the rest: so each step is the cheapest of more
recomputation and of more copies.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from autoshard.errors import BudgetError
from autoshard.passes.ir.assignment import Assignment
from autoshard.passes.ir.memory import Memory
from autoshard.passes.ir.program import Program
from autoshard.passes.ir.text import block_path, show_bytes
from autoshard.passes.lower.blocks import block_runs
from autoshard.passes.memory.fit import lower_and_simulate, search_within_memory
from autoshard.passes.propagate.named_strategies import NamedStrategy
from autoshard.passes.propagate.objective import Objective, objective
from autoshard.passes.propagate.planner import Planner
from autoshard.passes.search.candidates import Candidates

SimulatedProgram = tuple[Program, Memory]
"""a program, and its memory"""


class CopySeconds(NamedTuple):
    """Seconds of a step's copies of activations."""

    total: float
    exposed: float
    """those that the step waits for"""


def copy_seconds(blocks: Mapping[str, float], assignment: Assignment, searched: Objective) -> CopySeconds:
    """Seconds to copy saved tensors to the host and back. ``blocks``: bytes per block."""
    ahead, back = defaultdict[str, float](float), defaultdict[str, float](float)
    for node in assignment.graph.nodes:
        seconds, again = searched.spaces[node].compute(), searched.again.get(node.name)
        ahead[block_path(node.fqn)] += seconds.forward
        back[block_path(node.fqn)] += seconds.backward + (float(again.compute + again.other) if again else 0.0)
    order, found = [block for block in ahead if block], CopySeconds(0.0, 0.0)
    for block, size in blocks.items():
        each, after = assignment.mesh.hardware.host_seconds(size), order[order.index(block) + 1 :][:1]
        beside = sum(ahead[x] for x in after), sum(back[x] for x in after if x in blocks)
        exposed = sum(max(0.0, each - hides) for hides in beside)
        found = CopySeconds(found.total + 2 * each, found.exposed + exposed)
    passes = assignment.graph.passes
    return CopySeconds(passes * found.total, passes * found.exposed)


def search_with_offload(
    planner: Planner, budget: float, baselines: Iterable[NamedStrategy] = (), quick: bool = False
) -> SimulatedProgram:
    """As :func:`search_within_memory`, where saved tensors of blocks may be in host memory."""
    found = Candidates[SimulatedProgram](lambda each: _seconds_with_offload(each, planner.optimizer))
    with found.attempt("activations on the device"):
        found.add(search_within_memory(planner, budget, baselines, quick))
    if not planner.graph.training or (found.best is not None and not found.best[1].limited):
        return found.cheapest()
    least = found.errors[0].peak if found.errors and isinstance(found.errors[0], BudgetError) else budget
    free, most = search_within_memory(planner, math.inf, quick=True)
    for limit in (math.inf, math.sqrt(most.peak * least), *[least * LEAST_SLACK] * (least > budget)):
        with found.attempt(f"activations on the host, within {limit:.4g} B"):
            program = free if limit == math.inf else search_within_memory(planner, limit, quick=True)[0]
            found.add(_offloaded(program, budget, planner))
    if found.best is None:
        peaks = {e.peak: e for e in found.errors if isinstance(e, BudgetError)}
        raise peaks[min(peaks)] if peaks else found.errors[0]
    program, memory = found.best
    solution = program.assignment.solution.bounded(0.0)  # a bound without offload is none
    return replace(program, assignment=replace(program.assignment, solution=solution)), memory


LEAST_SLACK = 1.001
"""a plan of the least peak found is looked for within this multiple of it"""


def _seconds_with_offload(found: SimulatedProgram, optimizer: str) -> float:
    program, memory = found
    seconds = program.assignment.solution.cost
    if not memory.offloaded:
        return seconds
    return (
        seconds + copy_seconds(memory.offloaded, program.assignment, objective(program.assignment, optimizer)).exposed
    )


def _offloaded(program: Program, budget: float, planner: Planner) -> SimulatedProgram:
    """``program`` with the fewest first blocks on the host with which it fits. BudgetError: not with all."""
    blocks = tuple(dict.fromkeys(path for path, _ in block_runs(program) if path))

    def having(count: int) -> SimulatedProgram:
        solution = program.assignment.solution.bounded(0.0)
        assignment = replace(program.assignment, offloaded=blocks[:count], solution=solution)
        made, held = lower_and_simulate(assignment, planner.optimizer)
        return made, replace(held, limited=True)

    fits, fails = len(blocks), 0
    best = having(fits) if blocks else None
    if best is None or best[1].peak > budget:
        peak = math.inf if best is None else best[1].peak
        raise BudgetError(
            f"no plan within {show_bytes(budget, 4)} per rank was found, also with activations in host memory. The "
            f"least peak found is {show_bytes(peak, 4)}, with those of all {len(blocks)} blocks there",
            peak,
        )
    while fits - fails > 1:
        middle = (fits + fails) // 2
        tried = having(middle)
        if tried[1].peak <= budget:
            fits, best = middle, tried
        else:
            fails = middle
    return best

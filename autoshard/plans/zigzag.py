"""Zigzag (load-balanced) order of the sequence for causal ring attention, if it is cheaper."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from autoshard.errors import PlanError
from autoshard.passes.ir.graph import Graph
from autoshard.passes.ir.program import Program
from autoshard.passes.propagate.zigzag import to_zigzag_order, zigzag_ranks
from autoshard.plans.plan import Plan

PlanGraph = Callable[[Graph], tuple[Program, Plan]]


def plan_cheaper_order(graph: Graph, given: Plan | None, make: PlanGraph) -> tuple[Graph, Program, Plan]:
    """The planned graph, and what ``make`` gives for it.

    If ring attention is causal, the graph is planned again with a zigzag sequence, and the cheaper
    plan wins. A ``given`` plan keeps its own order.
    """
    if given is not None:
        graph = _zigzag_graph(graph, given.folded) or graph
        program, plan = make(graph)
        return graph, program, replace(plan, folded=given.folded)
    program, plan = make(graph)
    ranks = zigzag_ranks(program.assignment)
    if (folded := _zigzag_graph(graph, ranks)) is not None:
        with suppress(PlanError):  # it does not fit, or contradicts the options
            other, its_plan = make(folded)
            if is_cheaper(its_plan, plan):
                return folded, other, replace(its_plan, folded=ranks)
    return graph, program, plan


def _zigzag_graph(graph: Graph, ranks: int) -> Graph | None:
    return to_zigzag_order(graph, ranks) if ranks else None


def is_cheaper(plan: Plan, than: Plan) -> bool:
    """Whether the predicted step of ``plan`` is shorter."""
    return plan.cost.total_s < than.cost.total_s

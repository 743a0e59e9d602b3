"""Mesh search: the best mesh that a number of devices can form."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from autoshard.compiler import planned
from autoshard.errors import MeshError, PlanError
from autoshard.hardware import Hardware
from autoshard.mesh import Mesh
from autoshard.passes.ir.graph import Graph
from autoshard.passes.ir.program import Program
from autoshard.passes.ir.sizes import noting
from autoshard.passes.ir.units import show_seconds
from autoshard.passes.lower.lowering import narrowed
from autoshard.passes.memory import tried
from autoshard.passes.microbatch import in_parts
from autoshard.passes.propagate.experts.roles import named_by_role
from autoshard.passes.propagate.hints import in_time
from autoshard.passes.propagate.op_space import OpSpaces
from autoshard.plans.describe import describe
from autoshard.plans.orders import in_cheaper_order
from autoshard.plans.plan import Plan
from autoshard.plans.wishes import Wishes
from autoshard.report.record import Candidate, Cost
from autoshard.runtime.autocast import without_autocast

log = logging.getLogger("autoshard.plan")

TIE = 1e-6
"""relative difference of plans below which the mesh with fewer axes is taken"""


@without_autocast()  # its casts are in the graph
def planned_for(graph: Graph, devices: int, hardware: Hardware, wishes: Wishes, title: str) -> Plan:
    """The cheapest plan of ``graph`` on a mesh of ``devices``, with runners-up in ``candidates``.

    Every mesh of one and two axes is tried, and the best is divided once more (:func:`divided`);
    meshes whose compute alone exceeds the best plan are skipped. Axes are named by use: dp, fsdp,
    cp, tp, ep. Raises :class:`MeshError` for an invalid number, :class:`PlanError` without a plan.
    """
    return Search(graph, hardware, wishes, title).over(devices)


@dataclass
class Search:
    """State of the search over meshes of one number of devices."""

    graph: Graph
    hardware: Hardware
    wishes: Wishes
    title: str
    plans: dict[tuple[int, ...], Plan] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    best: Plan | None = None
    program: Program | None = None
    """program of the best plan, on a mesh with axes named axis0, axis1, …"""

    def over(self, devices: int) -> Plan:
        """See :func:`planned_for`."""
        if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
            raise MeshError(f"devices={devices!r}: a number of devices is an int of at least 1")
        if isinstance(self.wishes.like, Mapping):
            raise PlanError("like by axis or by module needs a mesh: give mesh=, or a plan's name for all axes")
        for shape in shapes(devices):
            self.attempt(shape)
        if self.best is not None:
            self.attempt(divided(self.best.mesh.shape, self.hardware.devices_per_node))
        return self.result()

    def attempt(self, shape: tuple[int, ...]) -> None:
        """Plan on a mesh of this shape, unless it was tried or its lower bound exceeds the best."""
        if shape in self.plans:
            return
        mesh, shown = Mesh({f"axis{i}": n for i, n in enumerate(shape)}, self.hardware), " × ".join(map(str, shape))
        floor = self._floor(mesh)
        if self.best is not None and floor >= self.seconds(self.best):
            self.notes.append(f"a mesh of {shown} was not searched: its work alone takes {show_seconds(floor)}")
            return
        try:
            graph, program, plan = self._planned(mesh)
        except PlanError as error:
            self.notes.append(f"a mesh of {shown} has no plan: {error}")
            return
        named = Mesh(named_by_role(graph, program.assignment), self.hardware)
        self.plans[shape] = plan = replace(plan, mesh=named)  # its texts keep the old names
        log.info("mesh %s: %s", plan.mesh, show_seconds(self.seconds(plan)))
        if self.best is None or self.seconds(plan) < self.seconds(self.best) * (1 - TIE):
            self.best, self.program = plan, program

    def seconds(self, plan: Plan) -> float:
        """The objective, in seconds."""
        return plan.cost.total_s

    def _floor(self, mesh: Mesh) -> float:
        return least_seconds(self.graph, mesh)

    def _planned(self, mesh: Mesh) -> tuple[Graph, Program, Plan]:
        """(graph, program, plan) on ``mesh``, of one micro-batch if there are several."""
        wishes = self.wishes
        return in_parts(
            self.graph,
            wishes.parts,
            lambda part, _: in_cheaper_order(part, wishes.plan, lambda g: planned(g, mesh, wishes, self.title)),
            lambda found: found[2].cost.total_s,
            cuts=in_time(wishes.hints, self.graph),
        )

    def _named(self, plan: Plan) -> Plan:
        """``plan`` described again with the names of its mesh's axes."""
        assert self.program is not None
        with noting() as decided:
            moved = self.program.assignment.on(plan.mesh)
            program, memory = tried(moved, self.wishes.optimizer, self.wishes.flying)
        found = describe(narrowed(program, decided), self.title, self.wishes.optimizer, memory)
        return replace(found, like=plan.like, mixed_precision=plan.mixed_precision, folded=plan.folded)

    def result(self) -> Plan:
        """The best plan, on the mesh with named axes, with its runners-up."""
        if self.best is None:
            raise PlanError(
                f"no mesh of these {self.hardware.name} has a plan: {'; '.join(note.rstrip('.') for note in self.notes)}"
            )
        best = self.best
        plan = self._named(best)
        others = sorted((p for p in self.plans.values() if p is not best), key=self.seconds)
        runners_up = tuple(Candidate(p.mesh, p.cost, p.memory, _lost(p.cost, best.cost)) for p in others)
        like = [note for note in best.notes if note.startswith("like=")]
        return replace(plan, candidates=runners_up, notes=(*like, *plan.notes, *self.notes))


def shapes(devices: int) -> Iterator[tuple[int, ...]]:
    """Mesh shapes of one and two axes (outer to inner) for ``devices``.

    The order of axes matters inside a node too: unsharding the inner axis of a dim costs less.
    """
    yield (devices,)
    yield from ((outer, devices // outer) for outer in range(2, devices) if devices % outer == 0)


def divided(shape: tuple[int, ...], per_node: int) -> tuple[int, ...]:
    """``shape`` with one more axis: the axis that spans nodes is split there, else the largest.

    >>> divided((4, 16), 8), divided((8, 8), 8), divided((2, 2), 8), divided((64,), 8)
    ((4, 2, 8), (4, 2, 8), (2, 2), (8, 8))
    """
    inner = 1
    for i in reversed(range(len(shape))):
        within = per_node // inner
        if within > 1 and inner * within == per_node < inner * shape[i] and shape[i] % within == 0:
            return *shape[:i], shape[i] // within, within, *shape[i + 1 :]
        inner *= shape[i]
    i = max(range(len(shape)), key=lambda i: shape[i])
    least = next((n for n in range(2, math.isqrt(shape[i]) + 1) if shape[i] % n == 0), 0)
    return (*shape[:i], shape[i] // least, least, *shape[i + 1 :]) if least else shape


def least_seconds(graph: Graph, mesh: Mesh) -> float:
    """Lower bound (seconds) of plans on ``mesh``: cheapest operations, free redistribution."""
    spaces = OpSpaces(graph, mesh)
    return float(sum(spaces[node].seconds.min() for node in graph.nodes))


def _lost(cost: Cost, won: Cost) -> str:
    """How much slower a runner-up is than ``won``, and why, as text."""
    more = cost.total_s - won.total_s
    if more <= TIE * won.total_s:
        return "as fast"
    parts = (("compute", cost.compute_s - won.compute_s), ("communication", cost.exposed_s - won.exposed_s))
    what, by = max(parts, key=lambda part: part[1])
    return f"{show_seconds(more)} slower: {show_seconds(by)} more {what}"

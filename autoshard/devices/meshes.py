"""Search over meshes of a number of devices, for a training step or for serving requests."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from autoshard.compiler import compile_graph, search_graph
from autoshard.errors import MeshError, PlanError
from autoshard.hardware import Hardware
from autoshard.layout import Grouped, Layout, Owned, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Assignment
from autoshard.passes.ir.graph import Graph
from autoshard.passes.ir.program import Program
from autoshard.passes.ir.sizes import record_conditions
from autoshard.passes.ir.text import show_seconds
from autoshard.passes.lower.lowering import with_length_conditions
from autoshard.passes.memory import lower_and_simulate
from autoshard.passes.propagate.named_strategies.strategies import axes_by_role
from autoshard.passes.propagate.op_space import OpSpaces, is_feasible
from autoshard.passes.search.candidates import Candidates
from autoshard.passes.search.limits import OUTER_LIMITS
from autoshard.plans.baselines import baselines_of
from autoshard.plans.describe import describe_program
from autoshard.plans.options import CompileOptions
from autoshard.plans.plan import Plan
from autoshard.progress import is_time_up, shown_progress
from autoshard.report.record import Candidate, Cost
from autoshard.runtime.transport.torch_state import without_autocast
from autoshard.serving import JointPlan, ServedCall, search_jointly, serving_plan

log = logging.getLogger("autoshard.plan")


@without_autocast()  # its casts are in the graph
def planned_for(graph: Graph, devices: int, hardware: Hardware, opts: CompileOptions) -> Plan:
    """The cheapest plan of ``graph`` on a mesh of ``devices``, with runners-up in ``candidates``.
    All meshes of one and two axes are tried unless their compute alone exceeds the best plan,
    which is divided once more (:func:`divided_mesh_shape`). Axes are named by use: dp, fsdp, cp,
    tp, ep. Raises :class:`MeshError`, or :class:`PlanError` without a plan."""
    return MeshSearch(graph, hardware, opts).over(devices)


def check_devices(devices: int) -> None:
    """Raise :class:`MeshError` for an invalid number of devices."""
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise MeshError(f"devices={devices!r}: a number of devices is an int of at least 1")


class MeshPlan(NamedTuple):
    """A plan on a mesh of this shape, with axes named by their use."""

    shape: tuple[int, ...]
    plan: Plan
    program: Program
    """on a mesh with axes named axis0, axis1, …"""


@dataclass
class MeshSearch:
    """State of the search over meshes of one number of devices."""

    graph: Graph
    hardware: Hardware
    opts: CompileOptions

    def __post_init__(self) -> None:
        self.meshes = Candidates[MeshPlan](lambda found: self.seconds(found.plan), tie=OUTER_LIMITS.tie_share)

    def over(self, devices: int) -> Plan:
        """See :func:`planned_for`."""
        check_devices(devices)
        if isinstance(self.opts.like, Mapping):
            raise PlanError("like by axis or by module needs a mesh: give mesh=, or one strategy by name for all axes")
        with shown_progress(f"meshes of {devices}"):
            shapes = list(mesh_shapes(devices))
            for number, shape in enumerate(shapes):
                if self.meshes.best is not None and is_time_up():
                    self.meshes.notes.append(
                        f"{len(shapes) - number} meshes were not searched: the time limit was reached"
                    )
                    return self.result()
                self.attempt(shape)
            if self.meshes.best is not None:
                self.attempt(divided_mesh_shape(self.meshes.best.shape, self.hardware.devices_per_node))
            return self.result()

    def attempt(self, shape: tuple[int, ...]) -> None:
        """Plan on a mesh of ``shape``, unless it has a plan or its lower bound exceeds the best."""
        if any(found.shape == shape for found in self.meshes.found):
            return
        mesh, name = Mesh({f"axis{i}": n for i, n in enumerate(shape)}, self.hardware), " × ".join(map(str, shape))
        floor = self._floor(mesh)
        if self.meshes.is_pruned(floor):
            alone = show_seconds(floor)
            self.meshes.notes.append(f"a mesh of {name} was not searched: its compute alone takes {alone}")
            return
        with self.meshes.attempt(f"a mesh of {name}"), shown_progress(f"mesh {name}"):
            graph, program, plan = self._planned(mesh)
            named = Mesh(axes_by_role(graph, program.assignment), self.hardware)
            plan = replace(plan, mesh=named)  # its texts keep the old names
            log.info("mesh %s: %s", named, show_seconds(self.seconds(plan)))
            self.meshes.add(MeshPlan(shape, plan, program))

    def seconds(self, plan: Plan) -> float:
        """The objective, in seconds."""
        return plan.cost.total_s

    def _floor(self, mesh: Mesh) -> float:
        return least_mesh_seconds(self.graph, mesh)

    def _planned(self, mesh: Mesh) -> tuple[Graph, Program, Plan]:
        """(graph, program, plan) on ``mesh``, of one micro-batch if there are several."""
        found = compile_graph(self.graph, mesh, self.opts, dumped=False)
        return found.graph, found.program, found.plan

    def _named(self, best: MeshPlan) -> Plan:
        """The plan with the names of its mesh's axes. Axes that are one group are joined, unless a
        collective over both takes longer than one over each."""
        own = best.program.assignment
        joined = with_joined_axes(own)
        if joined.mesh.ndim < own.mesh.ndim:
            found = self._described(best.plan, joined, Mesh(axes_by_role(joined.graph, joined), self.hardware))
            if found.cost.total_s <= best.plan.cost.total_s * (1 + OUTER_LIMITS.tie_share):
                return found
        return self._described(best.plan, own, best.plan.mesh)

    def _described(self, plan: Plan, assignment: Assignment, mesh: Mesh) -> Plan:
        with record_conditions() as decided:
            program, memory = lower_and_simulate(assignment.on(mesh), self.opts.optimizer)
        found = describe_program(with_length_conditions(program, decided), self.opts.title, self.opts.optimizer, memory)
        found = replace(found, like=plan.like, mixed_precision=plan.mixed_precision, folded=plan.folded)
        found = replace(found, loss_chunks=plan.loss_chunks)
        baselines = baselines_of(search_graph, self.graph, mesh, replace(self.opts, loss_chunks=plan.loss_chunks))
        return replace(found, baselines=baselines, memory_budget=plan.memory_budget, asked=plan.asked)

    def result(self) -> Plan:
        """The best plan, on the mesh with named axes, with its runners-up."""
        best, notes = self.meshes.best, self.meshes.notes
        if best is None:
            raise PlanError(
                f"no mesh of these {self.hardware.name} has a plan: {'; '.join(note.rstrip('.') for note in notes)}"
            )
        plan = self._named(best)
        others = sorted((p.plan for p in self.meshes.found if p is not best), key=self.seconds)
        runners_up = tuple(Candidate(p.mesh, p.cost, p.memory, _slower_by_text(p.cost, best.plan.cost)) for p in others)
        like = [note for note in best.plan.notes if note.startswith("like=")]
        return replace(plan, candidates=runners_up, notes=(*like, *plan.notes, *notes))


def mesh_shapes(devices: int) -> Iterator[tuple[int, ...]]:
    """Mesh shapes of one and two axes (outer to inner) for ``devices``. The order matters inside a
    node too: unsharding the inner axis of a dim costs less."""
    yield (devices,)
    yield from ((outer, devices // outer) for outer in range(2, devices) if devices % outer == 0)


def divided_mesh_shape(shape: tuple[int, ...], per_node: int) -> tuple[int, ...]:
    """``shape`` with one more axis: the axis that spans nodes is split there, else the largest.
    >>> [divided_mesh_shape(shape, 8) for shape in ((4, 16), (8, 8), (2, 2), (64,))]
    [(4, 2, 8), (4, 2, 8), (2, 2), (8, 8)]"""
    inner = 1
    for i in reversed(range(len(shape))):
        within = per_node // inner
        if within > 1 and inner * within == per_node < inner * shape[i] and shape[i] % within == 0:
            return *shape[:i], shape[i] // within, within, *shape[i + 1 :]
        inner *= shape[i]
    i = max(range(len(shape)), key=lambda i: shape[i])
    least = next((n for n in range(2, math.isqrt(shape[i]) + 1) if shape[i] % n == 0), 0)
    return (*shape[:i], shape[i] // least, least, *shape[i + 1 :]) if least else shape


def with_joined_axes(assignment: Assignment) -> Assignment:
    """``assignment`` with neighbouring mesh axes that are one group everywhere as one axis: 8 × 8
    as 64."""
    mesh, every = assignment.mesh, (*assignment.layouts.values(), *assignment.shared.values())
    every = (*every, *(x for x in assignment.outputs if x is not None))
    for i in range(mesh.ndim - 1):
        outer, inner = mesh.axes[i : i + 2]
        sizes = {a: n * (mesh.size_of(inner) if a == outer else 1) for a, n in mesh.sizes.items()}
        joined = Mesh({a: n for a, n in sizes.items() if a != inner}, mesh.hardware)
        alike = all(choice[i] == choice[i + 1] for choice in assignment.choices.values())
        if not alike or not all(_is_one_group(layout, outer, inner) for layout in every):
            continue
        choices = {name: (*c[:i], *c[i + 1 :]) for name, c in assignment.choices.items()}
        if not all(is_feasible(choice, joined) for choice in choices.values()):
            continue

        def moved(layout: Layout, to: Mesh = joined) -> Layout:
            return Layout(to, {a: layout[a] for a in to.axes}, [a for a in layout.order if a in to.axes])

        return with_joined_axes(
            replace(
                assignment,
                mesh=joined,
                choices=choices,
                layouts={name: moved(x) for name, x in assignment.layouts.items()},
                shared={name: moved(x) for name, x in assignment.shared.items()},
                outputs=tuple(None if x is None else moved(x) for x in assignment.outputs),
            )
        )
    return assignment


def _is_one_group(layout: Layout, outer: str, inner: str) -> bool:
    """Whether two neighbouring axes do the same to a value, one directly inside the other."""
    placed = layout[outer]
    if placed != layout[inner] or isinstance(placed, Owned | Grouped):
        return False
    return not isinstance(placed, Shard) or (outer, inner) in itertools.pairwise(layout.axes_of(placed.dim))


def least_mesh_seconds(graph: Graph, mesh: Mesh) -> float:
    """Lower bound (seconds) of plans on ``mesh``: cheapest operations, free redistribution."""
    spaces = OpSpaces(graph, mesh)
    return float(sum(spaces[node].seconds.min() for node in graph.nodes))


def _slower_by_text(cost: Cost, won: Cost) -> str:
    """How much slower a runner-up is than ``won``, and why, as text."""
    more = cost.total_s - won.total_s
    if more <= OUTER_LIMITS.tie_share * won.total_s:
        return "as fast"
    parts = (("compute", cost.compute_s - won.compute_s), ("communication", cost.exposed_s - won.exposed_s))
    what, by = max(parts, key=lambda part: part[1])
    return f"{show_seconds(more)} slower: {show_seconds(by)} more {what}"


def served_for(calls: Sequence[ServedCall], devices: int, hardware: Hardware, opts: CompileOptions) -> Plan:
    """The plan of :func:`~autoshard.serving.serving_plan` on the best mesh of ``devices``.
    Meshes, candidates and errors are those of :func:`~autoshard.devices.meshes.planned_for`."""
    return _ServingSearch(max(calls, key=lambda c: c.times).graph, hardware, opts, calls=calls).over(devices)


@dataclass
class _ServingSearch(MeshSearch):
    calls: Sequence[ServedCall] = ()
    found: dict[tuple[int, ...], JointPlan] = field(default_factory=dict)

    def seconds(self, plan: Plan) -> float:
        assert plan.serving is not None
        return plan.serving.total_s

    def _floor(self, mesh: Mesh) -> float:
        return sum(call.times * least_mesh_seconds(call.graph, mesh) for call in self.calls)

    def _planned(self, mesh: Mesh) -> tuple[Graph, Program, Plan]:
        self.found[mesh.shape] = found = search_jointly(self.calls, mesh, self.opts)
        plan = serving_plan(self.calls, found, self.opts)
        assert plan.serving is not None
        of_tokens = next(n for n, call in enumerate(found.calls) if call.name == plan.serving.decode.name)
        return found.calls[of_tokens].graph, found.programs[of_tokens], plan

    def _named(self, best: MeshPlan) -> Plan:
        """The plan of all calls, with the names of the mesh's axes."""
        moved = self.found[best.shape].on(best.plan.mesh, self.opts)
        return serving_plan(self.calls, moved, self.opts)

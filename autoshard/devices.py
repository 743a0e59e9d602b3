"""The mesh as part of the plan: a number of devices, and the best of the meshes they can form."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from autoshard.compiler import planned
from autoshard.errors import MeshError, PlanError
from autoshard.hardware import Hardware
from autoshard.mesh import Mesh
from autoshard.passes.ir.graph import Graph
from autoshard.passes.propagate.experts.roles import named_by_role
from autoshard.passes.propagate.op_space import OpSpaces
from autoshard.plans.plan import Plan
from autoshard.plans.record import Candidate, Cost
from autoshard.plans.report import show_seconds
from autoshard.wishes import Wishes

log = logging.getLogger("autoshard.plan")

MOST_AXES = 3
TIE = 1e-6
"""of two meshes whose plans are this close, as a share, the one with fewer axes is taken"""


def planned_for(graph: Graph, devices: int, hardware: Hardware, wishes: Wishes, title: str) -> Plan:
    """The cheapest plan of ``graph`` on any mesh of ``devices``, with what else was tried in ``candidates``.

    One capture serves all. Meshes of few axes come first; one whose ideal division of the work already takes longer
    than the best plan so far is not searched. The axes are named by what they are used for: dp, fsdp, cp, tp, ep.
    Raises :class:`MeshError` for a number that is none, :class:`PlanError` where no mesh has a plan.
    """
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise MeshError(f"devices={devices!r}: a number of devices is an int of at least 1")
    if isinstance(wishes.like, Mapping):
        raise PlanError("like by axis or by module needs a mesh: give mesh=, or a plan's name for all axes")
    best: tuple[Mesh, Cost] | None = None
    tried: list[tuple[Mesh, Cost]] = []
    notes: list[str] = []
    for shape in shapes(devices, hardware.devices_per_node):
        mesh = Mesh({f"axis{i}": n for i, n in enumerate(shape)}, hardware)
        floor = least_seconds(graph, mesh)
        if best is not None and floor >= best[1].total_s:
            notes.append(f"{_shown(mesh)} was not searched: with all communication free it takes {show_seconds(floor)}")
            continue
        try:
            program, plan = planned(graph, mesh, wishes, title)
        except PlanError as error:
            notes.append(f"{_shown(mesh)} has no plan: {error}")
            continue
        found = Mesh(named_by_role(graph, program.assignment), hardware), plan.cost
        tried.append(found)
        log.info("mesh %s: %s", found[0], show_seconds(plan.cost.total_s))
        if best is None or plan.cost.total_s < best[1].total_s * (1 - TIE):
            best = found
    if best is None:
        raise PlanError(f"no mesh of {devices} {hardware.name} has a plan: {'; '.join(notes)}")
    _, plan = planned(graph, best[0], wishes, title)
    return replace(plan, candidates=tuple(_judged(tried, best)), notes=(*plan.notes, *notes))


def _shown(mesh: Mesh) -> str:
    return f"a mesh of {' × '.join(map(str, mesh.shape))}"


def shapes(devices: int, per_node: int) -> Iterator[tuple[int, ...]]:
    """Sizes of axes, outer to inner, whose product is ``devices``: one axis, two, then three.

    Three only where a node's devices are some of the axes: others are coarser forms of these. Axes on one kind of link
    can change places, so that their order counts once.
    """
    inside = math.gcd(devices, per_node)
    outside = devices // inside
    yield (devices,)
    seen = {(devices,)}
    pairs = ((n, devices // n) for n in range(2, devices) if devices % n == 0)
    for count, shape in itertools.chain(
        ((2, pair) for pair in pairs),
        ((3, (*a, *b)) for a in _split(outside) for b in _split(inside) if len(a) + len(b) == MOST_AXES),
    ):
        one_link = math.prod(shape) <= per_node
        key = tuple(sorted(shape)) if one_link else shape
        if key not in seen and len(shape) == count:
            seen.add(key)
            yield key


def _split(n: int, least: int = 2) -> Iterator[tuple[int, ...]]:
    """Every way to write ``n`` as a product of ascending factors of at least 2; of 1 the empty one."""
    if n == 1:
        yield ()
        return
    for first in range(least, math.isqrt(n) + 1):
        if n % first == 0:
            yield from ((first, *rest) for rest in _split(n // first, first) if rest)
    yield (n,)


def least_seconds(graph: Graph, mesh: Mesh) -> float:
    """Seconds that no plan on ``mesh`` can be below: every operation at its cheapest, all conversions for nothing."""
    spaces = OpSpaces(graph, mesh)
    return float(sum(spaces[node].seconds.min() for node in graph.nodes))


def _judged(tried: list[tuple[Mesh, Cost]], best: tuple[Mesh, Cost]) -> Iterator[Candidate]:
    """The runners-up by their cost, with what they lost by."""
    won = best[1]
    for mesh, cost in sorted(tried, key=lambda found: found[1].total_s):
        if mesh is best[0]:
            continue
        more = cost.total_s - won.total_s
        parts = (("compute", cost.compute_s - won.compute_s), ("communication", cost.comm_s - won.comm_s))
        what, by = max(parts, key=lambda part: part[1])
        slower = f"{show_seconds(more)} slower: {show_seconds(by)} more {what}"
        yield Candidate(mesh, cost, slower if more > TIE * won.total_s else "as fast, but of more axes")

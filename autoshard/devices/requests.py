"""Mesh search for serving: the mesh with the fewest seconds for a profile of calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autoshard.devices.meshes import Search, least_seconds
from autoshard.hardware import Hardware
from autoshard.mesh import Mesh
from autoshard.passes.ir.graph import Graph
from autoshard.passes.ir.program import Program
from autoshard.plans.plan import Plan
from autoshard.plans.wishes import Wishes
from autoshard.serving import Call, Found, served, together


def served_for(calls: Sequence[Call], devices: int, hardware: Hardware, wishes: Wishes, title: str) -> Plan:
    """The plan of :func:`~autoshard.serving.served` on the best mesh of ``devices``.

    Meshes, candidates and errors are those of :func:`~autoshard.devices.meshes.planned_for`."""
    return _Serving(max(calls, key=lambda c: c.times).graph, hardware, wishes, title, calls=calls).over(devices)


@dataclass
class _Serving(Search):
    calls: Sequence[Call] = ()
    found: dict[tuple[int, ...], Found] = field(default_factory=dict)

    def seconds(self, plan: Plan) -> float:
        assert plan.serving is not None
        return plan.serving.total_s

    def _floor(self, mesh: Mesh) -> float:
        return sum(call.times * least_seconds(call.graph, mesh) for call in self.calls)

    def _planned(self, mesh: Mesh) -> tuple[Graph, Program, Plan]:
        self.found[mesh.shape] = found = together(self.calls, mesh, self.wishes)
        plan = served(self.calls, found, self.wishes, self.title)
        assert plan.serving is not None
        of_tokens = next(n for n, call in enumerate(found.calls) if call.name == plan.serving.decode.name)
        return found.calls[of_tokens].graph, found.programs[of_tokens], plan

    def _named(self, plan: Plan) -> Plan:
        """The plan of all calls, with the names of the mesh's axes."""
        return served(self.calls, self.found[plan.mesh.shape].on(plan.mesh, self.wishes), self.wishes, self.title)

"""How much memory a plan may use."""

from __future__ import annotations

from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import canonical
from autoshard.passes.ir.graph import Graph
from autoshard.passes.propagate.network import state_bytes

SHARE = 0.8
"""of the hardware's memory, for parameters and optimizer state"""


def binding(memory_budget: float | None, graph: Graph, mesh: Mesh) -> float | None:
    """Bytes per rank for parameters, gradients and optimizer state; None where even whole copies fit."""
    budget = memory_budget if memory_budget is not None else SHARE * mesh.hardware.memory_bytes
    whole = (canonical(Layout(mesh).placements[0], True),) * mesh.ndim
    needed = sum(state_bytes(graph.types[i.name], whole, mesh) for i in graph.inputs if i.kind == "parameter")
    return budget if needed > budget else None

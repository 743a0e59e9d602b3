"""ZeRO stages as states of parameters: how long a gathered parameter stays (arXiv:1910.02054).

0: until the forward has used it; the backward gathers it again (stage 3, FSDP). 2: until the
backward has used it. 1: the same, but its gradient is reduced once per step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from autoshard.mesh import Mesh
from autoshard.passes.ir.graph import Graph


def offered(
    graph: Graph, mesh: Mesh, pinned: Mapping[str, int], asked: Collection[str], limited: bool
) -> dict[str, tuple[int, ...]]:
    """Parameter → ZeRO stages on offer. ``limited``: memory counts; else only the fastest.

    ``pinned``: stages of a named strategy; ``asked``: parameters with a given layout, which are
    gathered again. On an ideal network, where bytes only break ties, nothing is kept.
    """
    quickest = 1 if graph.passes > 1 else 2
    free = (0, *range(2, quickest - 1, -1)) if limited else (quickest,)
    found: dict[str, tuple[int, ...]] = {}
    for name in graph.parameters:
        chooses = graph.training and graph.types[name].grad and name not in asked and mesh.hardware.node.latency
        found[name] = (pinned[name],) if name in pinned else free if chooses else (0,)
    return found


def stages_of(graph: Graph, zero: Mapping[str, int]) -> dict[str, int]:
    """The stage of every parameter; ``zero``: of those kept gathered."""
    return {name: zero.get(name, 0) for name in graph.parameters}

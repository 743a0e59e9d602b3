"""How long a gathered parameter stays: its stage of ZeRO (Rajbhandari et al., arXiv:1910.02054), a state of each parameter.

0: until the forward has used it, and the backward gathers it again (stage 3, FSDP). 2: until the backward has used it. 1, in
a step of several micro-batches: the same, and its gradient is reduced once, where 2 reduces it in every one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from autoshard.mesh import Mesh
from autoshard.passes.ir.graph import Graph


def offered(
    graph: Graph, mesh: Mesh, pinned: Mapping[str, int], asked: Collection[str], limited: bool
) -> dict[str, tuple[int, ...]]:
    """Parameter → the stages that it may have. ``limited``: whether memory counts; else only the quickest.

    ``pinned``: those whose stage an expert's plan says; ``asked``: those whose layout is, and so is gathered again. On an
    ideal network, where bytes only break ties and parameters are cut for what they compute alone, nothing is kept.
    """
    quickest = 1 if graph.passes > 1 else 2
    free = (0, *range(2, quickest - 1, -1)) if limited else (quickest,)
    found: dict[str, tuple[int, ...]] = {}
    for name in graph.parameters:
        chooses = graph.training and graph.types[name].grad and name not in asked and mesh.hardware.node.latency
        found[name] = (pinned[name],) if name in pinned else free if chooses else (0,)
    return found


def stages_of(graph: Graph, zero: Mapping[str, int]) -> dict[str, int]:
    """The stage of every parameter; ``zero``: of those that are kept."""
    return {name: zero.get(name, 0) for name in graph.parameters}

"""Where to cut a graph: between operations, so that the slowest stage is as fast as can be and little crosses."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from autoshard.errors import PlanError
from autoshard.mesh import Mesh
from autoshard.passes.ir.graph import Graph, Ref
from autoshard.passes.propagate.cost import node_flops
from autoshard.passes.propagate.floating import floating
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.facts import is_view


def boundaries(graph: Graph, mesh: Mesh, count: int) -> tuple[int, ...]:
    """Positions in ``graph.nodes`` before which ``count`` stages are cut: the least maximum of a stage's seconds.

    A stage's seconds are its operations' on one rank, and its message's. Of equals the first cut is the earliest.
    Raises :class:`PlanError` where there are fewer operations to cut between.
    """
    if count == 1:
        return ()
    seconds, sent = _seconds(graph, mesh), _sent(graph, mesh)
    free = floating(graph)
    fixed = np.cumsum([0, *(n.name not in free for n in graph.nodes)])
    places = [p for p in range(1, len(graph.nodes)) if graph.nodes[p].name not in free]
    if fixed[-1] < count:
        raise PlanError(f"{count} stages: the model has {fixed[-1]} operations to cut between. Ask for fewer stages.")
    ends = [0, *places, len(graph.nodes)]
    total = np.concatenate([[0.0], np.cumsum(seconds)])[ends]
    own = fixed[ends]
    best = np.where(np.arange(len(ends)) == 0, 0.0, np.inf)
    came: list[np.ndarray] = []
    for _ in range(count):
        spent = total[None, :] - total[:, None] + sent[ends][:, None]
        spent = np.where(own[None, :] > own[:, None], spent, np.inf)
        reached = np.maximum(best[:, None], spent)
        came.append(reached.argmin(0))
        best = reached.min(0)
    at, found = len(ends) - 1, []
    for step in reversed(came[1:]):
        at = int(step[at])
        found.append(ends[at])
    return tuple(reversed(found))


def _seconds(graph: Graph, mesh: Mesh) -> list[float]:
    """Per operation: of its products or of its traffic to memory on one rank, whichever is longer."""
    device, found = mesh.hardware, []
    for node in graph.nodes:
        names = (*node.inputs, *node.outputs)
        if is_view(node.op) or not names:
            found.append(0.0)
            continue
        flops = node_flops(node, graph, rule_for(node.op))
        moved = sum(graph.types[n].nbytes for n in names) * (3 if any(graph.types[o].grad for o in node.outputs) else 1)
        shape, dtype = graph.types[names[-1]].shape, graph.types[names[-1]].dtype
        products = device.product_seconds(flops, shape, dtype) if flops else 0.0
        found.append(max(products, device.memory_seconds(moved)))
    return found


def _sent(graph: Graph, mesh: Mesh) -> np.ndarray:
    """Per position the seconds of the message, forward and backward, of a cut before it."""
    free = floating(graph)
    place = {n.name: i for i, n in enumerate(graph.nodes)}
    crossing = np.zeros(len(graph.nodes) + 2)
    returned = {o.name for o in graph.outputs if isinstance(o, Ref)}
    for name, node in graph.producers.items():
        readers = [place[n.name] for n in graph.uses[name]]
        if node.name not in free and readers and name not in returned:
            size = graph.types[name].nbytes * (2 if graph.types[name].grad else 1)
            crossing[place[node.name] + 1] += size
            crossing[max(readers) + 1] -= size
    link = mesh.link(mesh.axes[:1])
    return np.array([link.seconds(b, "permute") for b in np.cumsum(crossing)])


def following(graph: Graph, homes: Mapping[str, tuple[int, ...]], count: int) -> tuple[int, ...]:
    """The boundaries that leave every parameter in the stages that ``homes`` says: of another graph of the same model.

    Raises :class:`PlanError` where its operations read them in another order.
    """
    fqns = {i.name: i.fqn for i in graph.inputs if i.kind in ("parameter", "buffer")}
    free, found, stage = floating(graph), list[int](), 0
    for place, node in enumerate(graph.nodes):
        known = [homes[fqns[n]] for n in node.inputs if n in fqns and fqns[n] in homes]
        least = min((h[0] for h in known if len(h) == 1), default=stage)
        if node.name in free or least == stage:
            continue
        if least < stage:
            raise PlanError(
                f"stages: {node.op} in {node.fqn or '(root)'} at {node.source} reads a parameter of stage {least} after "
                f"one of stage {stage}, other than in the call that the stages were made for"
            )
        found += [place] * (least - stage)
        stage = least
    if len(found) != count - 1:
        raise PlanError(f"stages: this call reads parameters of {len(found) + 1} of the {count} stages")
    return tuple(found)

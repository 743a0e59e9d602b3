"""Names mesh axes by their use in a plan: dp, fsdp, tp, cp, ep."""

from __future__ import annotations

from collections import Counter

from autoshard.layout import Shard
from autoshard.passes.ir.assignment import Assignment
from autoshard.passes.ir.graph import Graph
from autoshard.passes.ir.known import known_of_graph
from autoshard.passes.propagate.experts.data import batch_of
from autoshard.passes.propagate.experts.families import Families, Family, Product, products
from autoshard.passes.propagate.experts.tensor import tokens


def named_by_role(graph: Graph, assignment: Assignment) -> dict[str, int]:
    """Axis name → size, in the order of the assignment's mesh.

    Named by the factor that most work of products is sharded along: batch (``dp``; ``fsdp`` if most
    parameter bytes are), sequence (``cp``), features (``tp``), weights (``ep``), or ``idle``.
    """
    mesh, (families, found, batch, sequence) = assignment.mesh, _used(graph)
    names: dict[str, int] = {}
    for number, size in enumerate(mesh.shape):
        work: Counter[str] = Counter()
        for p in found:
            strategy = assignment.choices[p.node.name][number]
            if strategy.divides:
                family = families.cut(p.node, strategy)
                features = family in (p.sums, p.makes)
                role = "tp" if features else "dp" if family in batch else "cp" if family in sequence else "ep"
                work[role] += int(p.work)
        role = work.most_common(1)[0][0] if work else "idle"
        if role == "dp" and _in_shards(graph, assignment, number):
            role = "fsdp"
        names[_new(role, names)] = size
    return names


@known_of_graph
def _used(graph: Graph) -> tuple[Families, tuple[Product, ...], frozenset[Family], frozenset[Family]]:
    """(families, products, batch, sequence) of ``graph``, independent of the mesh."""
    families = Families(graph)
    found, batch = products(families), batch_of(families)
    return families, found, batch, tokens(families, found, batch)


def _in_shards(graph: Graph, assignment: Assignment, number: int) -> bool:
    """Whether most parameter bytes are sharded along a mesh axis."""
    cut = whole = 0
    for name in graph.parameters:
        is_cut = isinstance(assignment.layouts[name].placements[number], Shard)
        cut, whole = cut + is_cut * graph.types[name].nbytes, whole + (not is_cut) * graph.types[name].nbytes
    return cut > whole


def _new(name: str, taken: dict[str, int]) -> str:
    return next(n for n in (name, *(f"{name}{i}" for i in range(2, 9))) if n not in taken)

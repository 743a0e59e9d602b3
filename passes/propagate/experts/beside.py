"""Named strategies beside hints: a hint on a parameter wins over the named strategy."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from autoshard.layout import Owned, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.graph import Graph
from autoshard.passes.propagate.experts.experts import AskedTooMuchError, Expert
from autoshard.passes.propagate.hints import OWNER, Constraint, Limit
from autoshard.passes.propagate.op_space import AskedOf
from autoshard.passes.propagate.states import fixed_states, placeable
from autoshard.passes.rules.families.embedding import LOOK_UPS, OF_TABLES
from autoshard.passes.rules.families.stacked import STACKED

Place = tuple[str, int, bool]
"""(parameter, number of the mesh axis, whether the strategy wants an owner rank there)"""


def beside(expert: Expert, hinted: Mapping[str, Constraint], graph: Graph, mesh: Mesh) -> Expert:
    """``expert`` without requests to look-ups in tables that hints place otherwise.

    Raises :class:`AskedTooMuchError` if hints move only some experts off their owners.
    """
    found = tuple(_against(expert, hinted, graph, mesh))
    if not found:
        return expert
    _check_lists(expert, hinted, found, graph, mesh)
    asked: dict[str, AskedOf] = dict(expert.asked)
    for name, axis, _ in found:
        for node in graph.uses[name]:
            if node.op in LOOK_UPS and node.inputs[0] == name and node.name in asked:
                each = enumerate(asked[node.name])
                asked[node.name] = tuple(None if i == axis and a and a.cuts & OF_TABLES else a for i, a in each)
    return replace(expert, asked={n: axes for n, axes in asked.items() if any(axes)})


def _against(expert: Expert, hinted: Mapping[str, Constraint], graph: Graph, mesh: Mesh) -> Iterator[Place]:
    """Places where the strategy shards a parameter and its hint does not allow that."""
    for name, hint in hinted.items():
        limit = expert.limits.get(name)
        for axis, dims in enumerate(limit.dims if isinstance(limit, Limit) else ()):
            if dims and not _allows(hint, name, axis, dims, graph, mesh):
                yield name, axis, OWNER in dims


def _allows(hint: Constraint, name: str, axis: int, dims: frozenset[int], graph: Graph, mesh: Mesh) -> bool:
    """Whether some layout that meets the hint is sharded along one of ``dims`` there."""
    if isinstance(dict(hint.axes).get(mesh.axes[axis]), Owned):  # fixed by an earlier program
        return OWNER in dims
    states = placeable(graph.types[name], mesh) + fixed_states(graph.types[name], mesh)
    placed = (state[axis] for state in states if hint.meets(state, mesh))
    return any(isinstance(p, Shard) and (OWNER if isinstance(p, Owned) else p.dim) in dims for p in placed)


def _check_lists(
    expert: Expert, hinted: Mapping[str, Constraint], found: Collection[Place], graph: Graph, mesh: Mesh
) -> None:
    owned = {(n, axis): None for n, axis, has_owner in found if has_owner}
    names = {i.name: i.fqn for i in graph.inputs}
    for node in graph.nodes if owned else ():
        for name, axis in owned if node.op == STACKED else ():
            left = [n for n in node.inputs if (n, axis) not in owned]
            if name in node.inputs and left:
                raise AskedTooMuchError(
                    f"hint {hinted[name].pattern!r} takes parameter {names[name]!r} from the rank along "
                    f"{mesh.axes[axis]!r} that owns it by like={expert.text}, and {names.get(left[0], left[0])!r} stays with "
                    "its own; but all experts are computed together, and lie alike. Hint all of them, by "
                    f"{_of_all([names[n] for n in node.inputs if n in names])!r}, or none"
                )


def _of_all(names: list[str]) -> str:
    """A pattern that matches names which differ in some parts."""
    parts = zip(*(name.split(".") for name in names), strict=False)
    return ".".join(part[0] if len(set(part)) == 1 else "*" for part in parts)

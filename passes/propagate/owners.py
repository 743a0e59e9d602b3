"""Table-wise placement: assigns tables that have an owner rank to ranks, balanced by load."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoshard.layout import Layout, Owned, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Assignment
from autoshard.passes.ir.graph import TensorType
from autoshard.passes.propagate.hints import Constraint, Limit
from autoshard.passes.rules.families.stacked import OWNERS

Axes = tuple[str, ...]


def place_of(chosen: Any, choices: Sequence[Any]) -> int:
    """Index of a choice in the search, which does not distinguish owner ranks."""
    if chosen not in choices:
        chosen = tuple(Owned() if isinstance(p, Owned) else p for p in chosen)
    return choices.index(chosen)


def with_owners(assignment: Assignment, constraints: Mapping[str, Constraint | Limit]) -> Assignment:
    """``assignment`` with owned tables balanced over ranks, largest first.

    Rank 0 owns most bytes, so that its memory is the peak; not if hints or an earlier compilation
    fix owners.
    """
    fixed = {name for name, c in constraints.items() if isinstance(c, Constraint)}
    layouts, types, mesh = assignment.layouts, assignment.graph.types, assignment.mesh
    found = _in_order(assignment)
    tables = [n for n in assignment.graph.parameters if layouts[n].owner and n not in found]
    for axes in dict.fromkeys(tuple(layouts[n].owner) for n in sorted(tables)):
        names = sorted(n for n in tables if tuple(layouts[n].owner) == axes)
        found |= _dealt({n: types[n] for n in names}, axes, layouts, mesh, fixed)
    if not found:
        return assignment
    return replace(assignment, layouts={**layouts, **found}, shared={**assignment.shared, **_shared(assignment, found)})


def _in_order(assignment: Assignment) -> dict[str, Layout]:
    """Matrices of experts → layouts: each on the rank with this chunk of all experts."""
    found: dict[str, Layout] = {}
    mesh, layouts = assignment.mesh, assignment.layouts
    for node in assignment.graph.nodes:
        axes = [a for a, s in zip(mesh.axes, assignment.choices[node.name], strict=True) if s.label == OWNERS]
        if not axes:
            continue
        whole, parts = Layout(mesh, dict.fromkeys(axes, Shard(0))), node.argument("parts")
        for rank in range(mesh.size):
            start, length = whole.chunk_of(0, len(node.inputs) // parts, rank)
            owner = {a: Owned(owner=mesh.index_along(rank, a)) for a in axes}
            mine = node.inputs[start * parts : (start + length) * parts]
            found.update((n, layouts[n].replace(owner)) for n in mine)
    return found


def _shared(assignment: Assignment, found: Mapping[str, Layout]) -> dict[str, Layout]:
    """Shared layouts with the same owners."""
    pairs = ((n, assignment.shared[n], x) for n, x in found.items() if n in assignment.shared)
    return {n: shared.replace({a: x[a] for a in shared.owner}) for n, shared, x in pairs}


def _dealt(
    tables: Mapping[str, TensorType], axes: Axes, layouts: Mapping[str, Layout], mesh: Mesh, fixed: Collection[str]
) -> dict[str, Layout]:
    """Table → its layout, with an owner along ``axes``."""
    loads = {n: load(t) for n, t in tables.items()}
    ranks = mesh.size_of(axes)
    held = {n: _number(layouts[n], axes, mesh) for n in tables if n in fixed}
    place = balanced(loads, ranks, held)
    sizes = [sum(loads[n][0] for n, r in place.items() if r == rank) for rank in range(ranks)]
    order = range(ranks) if held else sorted(range(ranks), key=lambda r: -sizes[r])
    number = {rank: i for i, rank in enumerate(order)}
    return {n: layouts[n].replace(_along(number[rank], axes, mesh)) for n, rank in place.items()}


def load(table: TensorType) -> tuple[float, float]:
    """(bytes, looked-up elements) of a table on its owner."""
    return float(table.nbytes), float(table.looked_up * table.shape[1])


def balanced(
    loads: Mapping[str, tuple[float, ...]], ranks: int, fixed: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Name → rank, greedy (Graham's rule in several dimensions), keeping ``fixed`` ranks. Largest
    load first, to the rank whose worst kind of load stays smallest."""
    totals = [sum(kind) or 1.0 for kind in zip(*loads.values(), strict=True)]
    shares = {name: [x / total for x, total in zip(load, totals, strict=True)] for name, load in loads.items()}
    held = [[0.0] * len(totals) for _ in range(ranks)]
    place = dict(fixed or {})
    for name, rank in place.items():
        held[rank] = [a + b for a, b in zip(held[rank], shares[name], strict=True)]
    for name in sorted(shares.keys() - place.keys(), key=lambda n: (-max(shares[n]), n)):
        after = [[a + b for a, b in zip(h, shares[name], strict=True)] for h in held]
        rank = min(range(ranks), key=lambda r: (max(after[r]), sum(after[r])))
        place[name], held[rank] = rank, after[rank]
    return place


def _number(layout: Layout, axes: Axes, mesh: Mesh) -> int:
    """The owner's index in the group of the flattened ``axes``."""
    number = 0
    for axis in axes:
        number = number * mesh.size_of(axis) + layout.owner[axis]
    return number


def _along(rank: int, axes: Axes, mesh: Mesh) -> dict[str, Shard]:
    """Coordinates of index ``rank`` of the flattened ``axes``."""
    found: dict[str, Shard] = {}
    for axis in reversed(axes):
        rank, coordinate = divmod(rank, mesh.size_of(axis))
        found[axis] = Owned(owner=coordinate)
    return found

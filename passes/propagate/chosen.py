"""Decodes a solution of the cost network to an assignment, and encodes an assignment as states."""

from __future__ import annotations

from typing import Any

from autoshard.layout import Layout
from autoshard.passes.ir.assignment import Assignment, Strategy, laid_out
from autoshard.passes.ir.graph import Ref
from autoshard.passes.propagate.keep import AGAIN, NEEDED
from autoshard.passes.propagate.network import Network, Variable
from autoshard.passes.propagate.owners import place_of, with_owners
from autoshard.passes.search import Solution


def assigned(network: Network, solution: Solution) -> Assignment:
    """The layouts, strategies and recompute states that ``solution`` chose."""
    chosen: dict[str, Any] = {}
    tags: dict[str, int] = {}
    places: dict[str, int] = {}
    zero: dict[str, int] = {}
    for (name, variable), state in zip(network.variables.items(), solution.choice, strict=True):
        tag, places[name] = divmod(state, len(variable.choices))
        chosen[name], tags[name] = variable.choices[places[name]], variable.tags[tag]
        if variable.stages and variable.stages[tag]:
            zero[name.removeprefix("shared:")] = variable.stages[tag]
    layouts = {i.name: laid_out(network.mesh, chosen[i.name]) for i in network.graph.inputs}
    choices: dict[str, tuple[Strategy, ...]] = {}
    again: dict[str, int] = {}
    made: dict[tuple[int, int, int], Layout] = {}  # equal layers share one op space
    for node in network.graph.nodes:
        at = f"node:{node.name}"
        choices[node.name] = chosen[at]
        space, passive = network.spaces[node], node.name in network.views
        for slot, name in enumerate(node.outputs):
            if (key := (id(space), slot, places[at])) not in made:
                made[key] = laid_out(network.mesh, space.outputs[slot][places[at]])
            layouts[name] = made[key]
        if tags[at] > (NEEDED if passive else 0):
            again[node.name] = 1 if passive else tags[at]
    shared = {
        v.removeprefix("shared:"): laid_out(network.mesh, s) for v, s in chosen.items() if v.startswith("shared:")
    }
    outputs = tuple(
        laid_out(network.mesh, chosen[f"out:{i}"]) if isinstance(out, Ref) else None
        for i, out in enumerate(network.graph.outputs)
    )
    remade = frozenset(v for v in shared if tags[f"shared:{v}"] == AGAIN)
    given = frozenset(network.constraints)
    found = layouts, shared, choices, outputs, solution, given, again, remade, zero
    return with_owners(Assignment(network.graph, network.mesh, *found), network.constraints)


def states_of(network: Network, name: str, variable: Variable, assignment: Assignment) -> list[int]:
    """The states of a variable that encode ``assignment`` without recomputation."""
    kind, _, rest = name.rpartition(":")
    if kind == "way":
        return list(range(variable.size))
    if kind == "node":
        chosen: Any = assignment.choices[rest]
    elif kind == "shared":
        chosen = assignment.shared[rest].placements
    elif kind == "out":
        layout = assignment.outputs[int(rest)]
        chosen = None if layout is None else layout.placements
    else:
        chosen = variable.choices[0] if kind == "mutation" else assignment.layouts[name].placements
    key = "place", id(variable.choices), chosen
    if key not in network.known:
        network.known[key] = place_of(chosen, variable.choices)
    place, count = network.known[key], len(variable.choices)
    most = NEEDED if kind == "shared" or (kind == "node" and rest in network.views) else 0
    if kind == "shared" and NEEDED not in variable.tags:  # its copies are converted again in any case
        most = AGAIN
    stages = variable.stages or (None,) * len(variable.tags)
    wanted = assignment.zero.get(rest, 0) if variable.stages else None
    allowed = (t for t, tag in enumerate(variable.tags) if tag <= most or len(variable.tags) == 1)
    return [t * count + place for t in allowed if stages[t] == wanted]

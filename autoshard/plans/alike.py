"""Plan reuse between graphs equal except for names, such as two stages of equal layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from autoshard.passes.ir.graph import Graph, Ref, map_refs
from autoshard.plans.plan import Plan

T = TypeVar("T")


def renaming(a: Graph, b: Graph) -> dict[str, str] | None:
    """Public names of values and operations of ``a`` → those of ``b``; None if the graphs differ.

    Graphs with constants or buffer writes never match.
    """
    if a.constants or b.constants or a.mutations or b.mutations:
        return None
    if (len(a.nodes), len(a.inputs), len(a.outputs)) != (len(b.nodes), len(b.inputs), len(b.outputs)):
        return None
    names: dict[str, str] = {}

    def define(x: str, y: str) -> bool:
        names[x] = y
        return a.types[x] == b.types[y]

    for x, y in zip(a.inputs, b.inputs, strict=True):
        if x.kind != y.kind or not define(x.name, y.name):
            return None
    nodes: dict[str, str] = {}
    for m, n in zip(a.nodes, b.nodes, strict=True):
        nodes[m.name] = n.name
        moved = map_refs((m.args, dict(m.kwargs)), lambda ref: Ref(names[ref.name]))
        if m.op is not n.op or m.output_slots != n.output_slots or moved != (n.args, dict(n.kwargs)):
            return None
        if not all(define(x, y) for x, y in zip(m.outputs, n.outputs, strict=True)):
            return None
    if map_refs(a.outputs, lambda ref: Ref(names[ref.name])) != b.outputs:
        return None
    public = {i.name: i.fqn for i in a.inputs}, {i.name: i.fqn for i in b.inputs}
    return nodes | {public[0].get(x, x): public[1].get(y, y) for x, y in names.items()}


def renamed(plan: Plan, names: Mapping[str, str]) -> Plan:
    """``plan`` under other names, to be followed and not shown: reasons and notes keep the old
    names."""

    def keys(found: Mapping[str, T]) -> dict[str, T]:
        return {names.get(name, name): x for name, x in found.items()}

    def each(found: Iterable[str]) -> tuple[str, ...]:
        return tuple(names.get(name, name) for name in found)

    choices = {n: replace(c, inputs=each(c.inputs), outputs=each(c.outputs)) for n, c in plan.choices.items()}
    return replace(
        plan,
        layouts=keys(plan.layouts),
        shared=keys(plan.shared),
        choices=keys(choices),
        shapes=keys(plan.shapes),
        kinds=keys(plan.kinds),
        ties={},
        dtypes=keys(plan.dtypes),
        given=each(plan.given),
        differentiable=each(plan.differentiable),
        shared_again=each(plan.shared_again),
    )

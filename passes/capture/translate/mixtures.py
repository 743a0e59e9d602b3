"""Routing as users write it, as one operation: rows go to their experts, and come back weighted.

Three forms are known. *Dense*: every expert gets every row, and gates, zero but for the chosen experts, weigh the results.
*Sorted*: rows in the order of their experts, multiplied in groups. *Loop*: of every expert the rows that chose it. Their
experts are matrices in one tensor each for the first and the second product (or one more, of what a gate multiplies).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from autoshard.passes.capture.translate.canonical import remove_dead
from autoshard.passes.capture.translate.patterns import Patterns, Product, letters
from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType
from autoshard.runtime.experts import experts_op

aten = torch.ops.aten


def as_mixtures(graph: Graph) -> Graph:
    """``graph`` in which the routings that are known are :func:`~autoshard.runtime.experts.experts_op`."""
    patterns, nodes, types = Patterns(graph), list[Node](), dict(graph.types)
    found = False
    for node in graph.nodes:
        mixture = next((m for form in (_dense, _sorted, _loop) if (m := form(node, patterns)) is not None), None)
        for made, shape in _made(node, mixture, graph) if mixture is not None else ((node, None),):
            nodes.append(made)
            if shape is not None:
                found = True
                like = types[made.inputs[0]]
                types[made.outputs[0]] = TensorType(shape, like.dtype, any(types[n].grad for n in made.inputs))
    return remove_dead(replace(graph, nodes=tuple(nodes), types=types)) if found else graph


class Mixture:
    """The operands of one."""

    def __init__(self, x: Ref, ids: Ref, weights: Ref, experts: Experts) -> None:
        self.x, self.ids, self.weights, self.experts = x, ids, weights, experts


class Experts:
    """Two products around an activation; ``first``: one tensor, or that of gates and that of what they multiply."""

    def __init__(
        self, x: Ref, first: tuple[Ref, ...], second: Ref, activation: str, gated: bool, transposed: bool
    ) -> None:
        self.x, self.first, self.second = x, first, second
        self.form = activation, gated, transposed

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Experts) and vars(self) == vars(other)

    __hash__ = object.__hash__


def _made(node: Node, mixture: Mixture, graph: Graph) -> Iterator[tuple[Node, tuple[int, ...] | None]]:
    """The nodes in the place of ``node``, with the shapes of their results."""
    experts = mixture.experts
    first, shape = experts.first[0], graph.shape(experts.first[0])
    if len(experts.first) == 2:
        name, dim = f"{node.name}_experts", 2 if experts.form[2] else 1
        wide = (*shape[:dim], 2 * shape[dim], *shape[dim + 1 :])
        first = Ref(name)
        yield replace(node, name=name, op=aten.cat.default, args=(list(experts.first), dim), kwargs={},
                      outputs=(name,), output_slots=(0,)), wide  # fmt: skip
    args = (mixture.x, mixture.ids, mixture.weights, first, experts.second, *experts.form)
    yield replace(node, op=experts_op._opoverload, args=args, kwargs={}), graph.shape(node.outputs[0])


def _experts(y: Ref, product: Product, patterns: Patterns) -> Experts | None:
    """The experts whose results are ``y``, in the order that ``product`` knows a product of rows and matrices by."""
    if (second := product(y)) is None:
        return None
    mid, matrices, transposed = second
    for hidden, gate, activation in patterns.activated(mid):
        halves = (gate,) if hidden is None else patterns.halves(gate, hidden) or (gate, hidden)
        made = [product(half) for half in halves]
        if any(m is None or m[0] != made[0][0] or m[2] != transposed for m in made):  # type: ignore[index]
            continue
        x, first = made[0][0], tuple(m[1] for m in made if m is not None)  # type: ignore[index]
        if len({patterns.graph.shape(f) for f in first}) == 1:
            return Experts(x, first, matrices, activation, hidden is not None, transposed)
    return None


# --- the forms ---


def _dense(node: Node, patterns: Patterns) -> Mixture | None:
    """einsum("etd, te -> td", results of all experts, gates)."""
    if node.op is not aten.einsum.default or len(node.args[1]) != 2:
        return None
    for y, gates in (node.args[1], node.args[1][::-1]):
        if letters(node, (y, gates)) != ("abc", "ba", "bc"):
            continue
        routed, experts = patterns.gates(gates), _experts(y, patterns.by_expert, patterns)
        if routed is not None and experts is not None and len(patterns.graph.shape(experts.x)) == 2:
            return Mixture(experts.x, *routed, experts)
    return None


def _sorted(node: Node, patterns: Patterns) -> Mixture | None:
    """zeros.index_add(0, order // k, experts in groups(x[order // k]) * weights[order])."""
    if node.op is not aten.index_add.default or node.kwargs or node.args[1] != 0 or not patterns.is_zero(node.args[0]):
        return None
    rows, weighted = node.args[2:]
    for y, of_rows in patterns.times(weighted):
        ends: list[str] = []
        experts = _experts(y, patterns.in_groups(ends), patterns)
        picked = patterns.made(experts.x, aten.index.Tensor, aten.index_select.default) if experts is not None else None
        if experts is None or picked is None or len(set(ends)) != 1:
            continue
        order, top = patterns.divided(rows)
        ids = patterns.sorted_ids(order) if order is not None else None
        if order is None or ids is None or not patterns.same(patterns.picks(picked), rows):
            continue
        weights = patterns.weights_by(of_rows, order, ids)
        counted = patterns.same(patterns.ends_of(Ref(ends[0])), ids)
        if weights is not None and counted and patterns.graph.shape(ids[0])[-1:] == (top,):
            experts.x = picked.args[0]
            return Mixture(experts.x, ids[0], weights, experts)
    return None


def _loop(node: Node, patterns: Patterns) -> Mixture | None:
    """Of the last of ``count`` experts, one after the other: out.index_add(0, rows, expert(x[rows]) * weights[rows, slots])."""
    found: dict[int, tuple[Ref, Ref, Experts]] = {}
    here: Node | None = node
    total = Ref("")
    while here is not None and (step := patterns.added(here)) is not None:
        total, rows, value = step
        if (one := _of_one(rows, value, patterns)) is None:
            return None
        number, *what = one
        found[number] = tuple(what)  # type: ignore[assignment]
        here = patterns.graph.producers.get(total.name)
    count = patterns.graph.shape(found[max(found)][2].second)[0] if found else 0
    alike = bool(found) and all(what == found[max(found)] for what in found.values())
    if not alike or sorted(found) != list(range(count)) or not patterns.is_zero(total):
        return None
    ids, weights, experts = found[0]
    return Mixture(experts.x, ids, weights, experts) if patterns.is_distinct(ids) else None


def _of_one(rows: Ref, value: Ref, patterns: Patterns) -> tuple[int, Ref, Ref, Experts] | None:
    """(number, ids, weights, experts) of what one expert adds."""
    if (chosen := patterns.chosen(rows)) is None:
        return None
    ids, number, slots = chosen
    for y, factor in patterns.times(value):
        experts = _experts(y, patterns.of_number(number), patterns)
        weights = patterns.weights_at(factor, rows, slots)
        picked = patterns.made(experts.x, aten.index.Tensor) if experts is not None else None
        if experts is None or weights is None or picked is None or picked.args[1] != [rows]:
            continue
        experts.x = picked.args[0]
        return number, ids, weights, experts
    return None

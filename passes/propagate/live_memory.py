"""Liveness: live memory at each moment of a step, as a linear sum over choices of the network.
While operation t runs, forward or backward, live bytes are: parameters, optimizer state and the
gradients of parameters read later; saved tensors of operations up to t; values (or gradients) made
before t and read later; values recomputed together with t; workspace of t with conversions of its
operands; outputs. This approximates the simulation, which knows every storage. Peak memory is the
largest of these sums; a weighted mean of them is again linear, and no larger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from autoshard.layout import Layout
from autoshard.passes.ir.graph import Node, Ref
from autoshard.passes.ir.text import block_path
from autoshard.passes.propagate.activation_memory import ABSENT, EdgeSide
from autoshard.passes.propagate.edges import ValueEdge
from autoshard.passes.propagate.network import BuiltNetwork, LayoutNetwork
from autoshard.passes.redistribute import peak_move_elements
from autoshard.passes.search import LinearRow
from autoshard.passes.search.arrays import Classes, CompactMatrix, FloatArray, Matrix, stored_values


class _VariableWeights(NamedTuple):
    """Weights of the bytes of a variable."""

    work: float = 0.0
    """workspace of an operation"""
    kept: float = 0.0
    """its own saved tensors; of other variables, what always lives"""
    again: float = 0.0
    """saved tensors and results of a recomputed operation"""
    gradients: float = 0.0
    crossing: tuple[float, ...] = ()
    """each result while other operations run"""


class _EdgeWeights(NamedTuple):
    """Weights of the bytes of an edge."""

    moved: float
    """workspace of its conversion"""
    kept: float
    """tensor saved for its reader"""
    again: float
    """a value recomputed for recomputation in another block lives as long as a saved one"""


class LiveMemory:
    """Weighted memory rows of one network."""

    def __init__(self, network: LayoutNetwork, built: BuiltNetwork) -> None:
        self.graph, self.network, self.built = network.graph, network, built
        self.names = list(network.variables)
        self.place = {node.name: i for i, node in enumerate(self.graph.nodes)}
        self.blocks = [block_path(node.fqn) for node in self.graph.nodes]
        self.ends = {block: i + 1 for i, block in enumerate(self.blocks) if block}
        """block → the first operation after it"""
        self.begins = {block: i for i, block in reversed(list(enumerate(self.blocks))) if block}
        self.labels = [x or name for name, x in zip(self.names, built.alike, strict=True)]
        """equal for variables whose choices are tied"""
        self.known: dict[Hashable, Any] = {}

    def weights(self, powers: FloatArray) -> FloatArray:
        """Weights exp(``powers``), normalized, of moments [operations + 1]; equal layers share
        one."""
        operations = {self.at[i]: label for i, label in enumerate(self.labels) if self.names[i].startswith("node:")}
        sizes = Counter(operations.values())
        many = [sizes[operations[at]] for at in range(len(self.place))]
        found: FloatArray = np.exp(powers - powers.max()) / [*many, 1]
        found /= found.sum()
        return found

    def row(self, weights: FloatArray) -> LinearRow:
        """The weighted mean of live bytes as a row; tied variables share coefficients."""
        count, network = _MomentWeights(weights), self.built.network
        pairs = [(i, j) for i, j, _ in network.edges]
        ends = [(self.labels[i], self.labels[j]) for i, j in pairs]
        flat = _label_means(self.labels, [_weight_list(self._variable(i, count)) for i in range(len(self.names))])
        variables = [_VariableWeights(work, kept, again, step, tuple(rest)) for work, kept, again, step, *rest in flat]
        edges = _label_means(ends, [self._edge(*pair, count) for pair in pairs])
        made: dict[Hashable, Matrix | None] = {}
        for label, (i, j, table), held, means in zip(ends, network.edges, self.built.kept[0].edges, edges, strict=True):
            if (label, id(table), id(held)) not in made:
                made[label, id(table), id(held)] = self._edge_row(i, j, table, held, _EdgeWeights(*means))
        parts = zip(ends, network.edges, self.built.kept[0].edges, strict=True)
        return LinearRow(
            tuple(self._variable_row(i, x) for i, x in enumerate(variables)),
            tuple(made[label, id(table), id(held)] for label, (_, _, table), held in parts),
            0.0,
        )

    @cached_property
    def at(self) -> list[int]:
        """Operation number per variable; -1 for inputs, the number of operations for outputs."""
        return [self._at(*name.rpartition(":")[::2]) for name in self.names]

    def _at(self, kind: str, rest: str) -> int:
        if kind == "node":
            return self.place[rest]
        if kind in ("", "shared"):
            return self.place[self.graph.producers[rest].name] if rest in self.graph.producers else -1
        return len(self.place)

    def _last(self, value: str, default: int) -> int:
        return max((self.place[user.name] for user in self.graph.uses[value]), default=default)

    # --- variables ---

    def _variable(self, i: int, count: _MomentWeights) -> _VariableWeights:
        at, (kind, _, rest) = self.at[i], self.names[i].rpartition(":")
        if kind != "node":
            after = count.between(0, self._last(rest, 0)) + count.step if rest in self.graph.parameters else 0.0
            return _VariableWeights(kept=count.all, gradients=after)
        lasts = [self._last(o, at) for o in self.graph.nodes[at].outputs]
        block = self.blocks[max(lasts, default=at)]  # at the latest its backward recomputes it
        again = count.between(at, self.ends.get(block, len(self.place)))
        crossing = tuple(count.between(at + 1, last) for last in lasts)
        return _VariableWeights(count.of(at), count.since(at), again, 0.0, crossing)

    def _variable_row(self, i: int, weights: _VariableWeights) -> FloatArray | None:
        kind, _, rest = self.names[i].rpartition(":")
        if kind == "node":
            return self._operation(self.graph.nodes[self.at[i]], self.network.variables[self.names[i]].tags, weights)
        if kind == "out":
            out = self.graph.outputs[int(rest)]
            assert isinstance(out, Ref)
            return weights.kept * self.network.bytes(out.name, self.network.variables[self.names[i]].choices)
        kept, at_backward_end = (row.nodes[i] for row in self.built.kept)
        return (
            None
            if kept is None or at_backward_end is None
            else weights.kept * kept + weights.gradients * (at_backward_end - kept)
        )

    def _operation(self, node: Node, tags: Sequence[int], weights: _VariableWeights) -> FloatArray:
        work, keeps, results = self._sizes(node)
        rest = weights.work * work
        for weight, size in zip(weights.crossing, results, strict=True):
            rest = rest + weight * size
        if node.name in self.network.views:
            return np.tile(rest, len(tags))
        again = weights.again * (keeps + sum(results))
        return np.concatenate([rest + (again if tag == 2 else weights.kept * keeps) for tag in tags])

    def _sizes(self, node: Node) -> tuple[FloatArray, FloatArray, list[FloatArray]]:
        """Bytes per choice: workspace, own saved tensors, each result."""
        space = self.network.spaces[node]
        if (key := ("sizes", id(space))) not in self.known:
            keeps = self.network.keeps.of(node, space)
            pairs = ((node.inputs, space.inputs), (node.outputs, space.outputs))
            operands, results = ([self.network.bytes(*x) for x in zip(*pair, strict=True)] for pair in pairs)
            self.known[key] = np.maximum(keeps.work, sum(operands) + sum(results)), keeps.own, results
        return self.known[key]

    # --- edges ---

    def _edge(self, i: int, j: int, count: _MomentWeights) -> _EdgeWeights:
        first, last = sorted((self.at[i], self.at[j]))
        links = self._links.get(frozenset((self.names[i], self.names[j])))
        if links is None:
            return _EdgeWeights(0.0, 0.0, 0.0)
        value = links[0].value
        if value in self.graph.parameters and last < len(self.place):  # gathered for one of a block it is there for all
            users = [last] if last >= 0 else [self.place[user.name] for user in self.graph.uses[value]]
            blocks = ((self.begins.get(self.blocks[u], u), self.ends.get(self.blocks[u], u + 1)) for u in users)
            return _EdgeWeights(sum(count.between(*x) for x in blocks), count.since(min(users, default=0)), 0.0)
        inside = first >= 0 and last < len(self.place)
        apart = inside and self.blocks[self._last(value, first)] not in ("", self.blocks[first])
        return _EdgeWeights(count.of(last), count.since(last), count.since(first) if apart else 0.0)

    def _edge_row(self, i: int, j: int, table: Matrix, held: Matrix | None, weights: _EdgeWeights) -> Matrix:
        found = np.zeros(stored_values(table).shape)
        if held is not None:
            found += weights.kept * stored_values(held)
        if weights.moved or weights.again:
            moved, again = self._moved(i, j, table)
            found += weights.moved * moved + weights.again * again
        return CompactMatrix(found, table.rows, table.columns) if isinstance(table, CompactMatrix) else found

    @cached_property
    def _links(self) -> dict[frozenset[str], list[ValueEdge]]:
        """Links by their pair of variables."""
        found: dict[frozenset[str], list[ValueEdge]] = {}
        for link in self.network.links:
            found.setdefault(frozenset((link.source, link.reader)), []).append(link)
        return found

    def _moved(self, i: int, j: int, table: Matrix) -> tuple[FloatArray, FloatArray]:
        """Workspace of conversions, and bytes recomputed for recomputation, as in ``table``."""
        links = self._links[frozenset((self.names[i], self.names[j]))]
        key = "moved", id(table), tuple((x.source == self.names[i], x.given.key, x.asked.key) for x in links)
        if key not in self.known:
            total = np.zeros((2, *stored_values(table).shape))
            rows, columns = (_state_per_class(table, axis) for axis in (0, 1))
            for link in links:
                if link.source == self.names[i]:
                    total += self._link_bytes(link, rows, columns)
                else:
                    total += self._link_bytes(link, columns, rows).swapaxes(1, 2)
            self.known[key] = total[0], total[1]
        return self.known[key]

    def _link_bytes(self, link: ValueEdge, given: Classes, asked: Classes) -> FloatArray:
        """:meth:`_moved` of one link for some states of its ends: float64 [2, states, states]."""
        type_ = self.graph.types[link.value]
        (a, made), (b, needs) = self._states(link.given, given), self._states(link.asked, asked)
        moved = peak_move_elements(a, b, type_.shape, type_.dtype, type_.moves, type_.unknown) * type_.dtype.itemsize
        if link.given.passive or link.given.fixed:
            return np.stack([moved, np.zeros_like(moved)])
        size = self.network.bytes(link.value, [x.placements for x in a])
        return np.stack([moved, np.where(made[:, None] & needs, size[:, None], 0.0)])

    def _states(self, side: EdgeSide, states: Classes) -> tuple[list[Layout], np.ndarray]:
        """(layouts of some states, whether the value is recomputed or read by recomputation)."""
        tags, places = np.divmod(states, len(side.placed))
        layouts = [Layout(self.network.mesh, side.placed[place]) for place in places.tolist()]
        each = np.array(side.tags)[tags]
        return layouts, each != ABSENT if side.passive else each == 2


class _MomentWeights:
    """Sums of moment weights over ranges of operations."""

    def __init__(self, weights: FloatArray) -> None:
        self.each, self.step = weights[:-1], float(weights[-1])
        self.sums = np.append(0.0, np.cumsum(self.each))
        self.all = float(self.sums[-1]) + self.step

    def of(self, place: int) -> float:
        return float(self.each[place]) if 0 <= place < len(self.each) else 0.0

    def between(self, first: int, end: int) -> float:
        return float(self.sums[end] - self.sums[min(first, end)])

    def since(self, place: int) -> float:
        return self.between(max(0, place), len(self.each))


def _weight_list(of: _VariableWeights) -> list[float]:
    return [of.work, of.kept, of.again, of.gradients, *of.crossing]


def _label_means(labels: Sequence[Hashable], values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Per entry the mean over entries with its label."""
    of: dict[Hashable, list[Sequence[float]]] = {}
    for label, value in zip(labels, values, strict=True):
        of.setdefault(label, []).append(value)
    means = {label: [sum(x) / len(x) for x in zip(*each, strict=True)] for label, each in of.items()}
    return [means[label] for label in labels]


def _state_per_class(table: Matrix, axis: int) -> Classes:
    """One state per stored row or column."""
    where = (table.rows, table.columns)[axis] if isinstance(table, CompactMatrix) else np.arange(table.shape[axis])
    return np.unique(where, return_index=True)[1]

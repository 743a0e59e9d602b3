"""What a step holds while an operation runs, as a sum over the choices of the cost network.

While operation t runs, forward or backward, there are: parameters, what the optimizer keeps of them, and the gradients of
those that are read later; what autograd keeps of what comes up to t; values made before t and read later, or their gradients;
what is made again together with t; and what t works on, conversions of its operands included. That is near what a
simulation finds, which knows of every storage. The most that is held is the largest of these sums; a mean of them is a sum
again, and no more than that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from autoshard.layout import Layout
from autoshard.passes.ir.graph import Node
from autoshard.passes.ir.paths import block_path
from autoshard.passes.propagate.edges import Link
from autoshard.passes.propagate.keep import ABSENT
from autoshard.passes.propagate.network import Built, Network
from autoshard.passes.redistribute import on_the_way
from autoshard.passes.search import Row
from autoshard.passes.search.folded import Folded, Matrix, stored

Weights = np.ndarray
"""float64 [operations + 1]: how much the moment of each counts, and of the optimizer's step"""


class Moments:
    """Of one network with its bytes."""

    def __init__(self, network: Network, built: Built) -> None:
        self.graph, self.network, self.built = network.graph, network, built
        self.names = list(network.variables)
        self.place = {node.name: i for i, node in enumerate(self.graph.nodes)}
        self.blocks = [block_path(node.fqn) for node in self.graph.nodes]
        self.ends = {block: i + 1 for i, block in enumerate(self.blocks) if block}
        """block → the first operation after it"""
        self.begins = {block: len(self.blocks) - i for i, block in enumerate(reversed(self.blocks), 1) if block}
        self.known: dict[Hashable, Any] = {}

    def row(self, weights: Weights) -> Row:
        """The mean of what is held at all moments by these ``weights``; equal layers are to choose alike: each has their mean."""
        count = _Counts(weights)
        alike = [name if label is None else label for name, label in zip(self.names, self.built.alike, strict=True)]
        nodes = _means(alike, [self._node_weights(i, count) for i in range(len(self.names))])
        pairs = [(i, j) for i, j, _ in self.built.network.edges]
        edges = _means([(alike[i], alike[j]) for i, j in pairs], [self._edge_weights(*ends, count) for ends in pairs])
        made: dict[Hashable, Matrix | None] = {}

        def edge(e: int) -> Matrix | None:
            (i, j, table), held = self.built.network.edges[e], self.built.kept[0].edges[e]
            key = alike[i], alike[j], id(table), id(held)
            if key not in made:
                made[key] = self._edge(i, j, table, held, edges[e])
            return made[key]

        return Row(tuple(map(self._node, range(len(nodes)), nodes)), tuple(map(edge, range(len(pairs)))), 0.0)

    def weights(self, excess: np.ndarray) -> Weights:
        """e to the power of ``excess`` [operations + 1], as parts of 1; equal layers count as one."""
        labels = [x for i, x in enumerate(self.built.alike) if self.names[i].startswith("node:")]
        sizes = Counter(x for x in labels if x is not None)
        many = np.ones(len(excess))
        for i, name in enumerate(self.names):
            if name.startswith("node:") and (label := self.built.alike[i]) is not None:
                many[self.at[i]] = sizes[label]
        weights = np.exp(excess - excess.max()) / many
        return weights / weights.sum()

    @cached_property
    def at(self) -> list[int]:
        """Per variable the operation that it belongs to, by number; -1 of what comes in, and their number of what goes out."""
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

    def _node_weights(self, i: int, count: _Counts) -> list[float]:
        """Of an operation: of its work, of what autograd keeps, of what is made again, and of each result while others run;
        else of what is always there, and of gradients."""
        at, (kind, _, rest) = self.at[i], self.names[i].rpartition(":")
        if kind != "node":
            return [count.all, count.before(self._last(rest, 0)) + count.step if rest in self.graph.parameters else 0.0]
        lasts = [self._last(o, at) for o in self.graph.nodes[at].outputs]
        block = self.blocks[max(lasts, default=at)]
        again = count.between(at, self.ends[block] if block else len(self.place))
        return [count.of(at), count.since(at), again, *(count.between(at + 1, last) for last in lasts)]

    def _node(self, i: int, weights: Sequence[float]) -> np.ndarray | None:
        name, at = self.names[i], self.at[i]
        if name.startswith("node:"):
            return self._operation(self.graph.nodes[at], self.network.variables[name].tags, *weights)
        kept, stays = (row.nodes[i] for row in self.built.kept)
        if kept is None or stays is None:
            return None
        always, gradients = weights
        held: np.ndarray = always * kept + gradients * (stays - kept)
        return held

    def _operation(
        self, node: Node, tags: Sequence[int], own: float, since: float, again: float, *crossing: float
    ) -> np.ndarray:
        work, keeps, results = self._sizes(node)
        rest = own * work + sum(w * size for w, size in zip(crossing, results, strict=True))
        if node.name in self.network.views:
            return np.tile(rest, len(tags))
        made = again * (keeps + sum(results))
        return np.concatenate([rest + (made if tag == 2 else since * keeps) for tag in tags])

    def _sizes(self, node: Node) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Bytes per choice of what it works on, of what autograd keeps of its own, and of its results."""
        space = self.network.spaces[node]
        key = "sizes", id(space)
        if key not in self.known:
            keeps = self.network.keeps.of(node, space)
            operands, results = (
                [self.network.bytes(n, p) for n, p in zip(names, placed, strict=True)]
                for names, placed in ((node.inputs, space.inputs), (node.outputs, space.outputs))
            )
            kept = keeps.private + sum(
                np.where(saves, size, 0.0) for saves, size in zip(keeps.results, results, strict=True)
            )
            self.known[key] = np.maximum(keeps.work, sum(operands) + sum(results)), kept, results
        found: tuple[np.ndarray, np.ndarray, list[np.ndarray]] = self.known[key]
        return found

    # --- edges ---

    def _edge_weights(self, i: int, j: int, count: _Counts) -> list[float]:
        """Of the conversion, of what is kept, and of what is made again for what is made again in another block."""
        first, last = sorted((self.at[i], self.at[j]))
        value, many = self.links[frozenset((self.names[i], self.names[j]))][0].value, len(self.place)
        if value not in self.graph.parameters:
            block = self.blocks[self._last(value, first)] if 0 <= first and last < many else ""
            apart = block and block != self.blocks[first]
            return [count.of(last), count.since(last), count.since(first) if apart else 0.0]
        users = [last] if last >= 0 else [self.place[user.name] for user in self.graph.uses[value]]
        works = map(partial(self._block, count), users)
        return [sum(works), count.since(min(users, default=0)), 0.0]

    def _block(self, count: _Counts, place: int) -> float:
        """Of all moments of an operation's block: what is gathered for it is there for all of that."""
        block = self.blocks[place]
        return count.between(self.begins[block], self.ends[block]) if block else count.of(place)

    def _edge(self, i: int, j: int, table: Matrix, held: Matrix | None, weights: Sequence[float]) -> Matrix | None:
        own, since, again = weights
        found = np.zeros(stored(table).shape)
        if held is not None:
            found += since * stored(held)
        if own or again:
            moved, twice = self._moved(i, j, table)
            found += own * moved + again * twice
        return Folded(found, table.rows, table.columns) if isinstance(table, Folded) else found

    @cached_property
    def links(self) -> dict[frozenset[str], list[Link]]:
        """Between two variables."""
        found: dict[frozenset[str], list[Link]] = {}
        for link in self.network.links:
            found.setdefault(frozenset((link.source, link.reader)), []).append(link)
        return found

    def _moved(self, i: int, j: int, table: Matrix) -> tuple[np.ndarray, np.ndarray]:
        """Bytes that conversions work on, and of values that are made again for what is, as stored in ``table``."""
        links = self.links[frozenset((self.names[i], self.names[j]))]
        key = "moved", id(table), tuple((x.source == self.names[i], x.given.key, x.asked.key) for x in links)
        if key not in self.known:
            total = np.zeros((2, *stored(table).shape))
            for link in links:
                rows, columns = _representatives(table)
                turned = link.source != self.names[i]
                found = self._of_link(link, *((columns, rows) if turned else (rows, columns)))
                total += found.swapaxes(1, 2) if turned else found
            self.known[key] = total[0], total[1]
        moved: tuple[np.ndarray, np.ndarray] = self.known[key]
        return moved

    def _of_link(self, link: Link, given: np.ndarray, asked: np.ndarray) -> np.ndarray:
        """:meth:`_moved` of one link, for these states of its ends."""
        type_, sides = self.graph.types[link.value], ((link.given, given), (link.asked, asked))
        a, b = ([Layout(self.network.mesh, x.placed[s % len(x.placed)]) for s in states.tolist()] for x, states in sides)
        moved = on_the_way(a, b, type_.shape, type_.dtype, type_.moves, type_.unknown) * type_.dtype.itemsize
        tags = [np.array([x.tags[s // len(x.placed)] for s in states.tolist()]) for x, states in sides]
        again = [tag > ABSENT if x.passive else (tag == 2) & (not x.fixed) for tag, (x, _) in zip(tags, sides, strict=True)]
        if link.given.passive:
            again[0][:] = False
        size = self.network.bytes(link.value, [x.placements for x in a])
        return np.stack([moved, np.where(again[0][:, None] & again[1], size[:, None], 0.0)])


class _Counts:
    """Sums of weights of moments."""

    def __init__(self, weights: Weights) -> None:
        self.each, self.step = weights[:-1], float(weights[-1])
        self.sums = np.append(0.0, np.cumsum(self.each))
        self.all = float(self.sums[-1]) + self.step

    def of(self, place: int) -> float:
        return float(self.each[place]) if 0 <= place < len(self.each) else 0.0

    def before(self, place: int) -> float:
        return float(self.sums[place])

    def between(self, first: int, end: int) -> float:
        return float(max(0.0, self.sums[end] - self.sums[min(first, end)]))

    def since(self, place: int) -> float:
        return self.between(max(0, min(place, len(self.each))), len(self.each))


def _means(labels: Sequence[Hashable], values: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
    """Per entry the mean of those with its label."""
    of: dict[Hashable, list[Sequence[float]]] = {}
    for label, value in zip(labels, values, strict=True):
        of.setdefault(label, []).append(value)
    means = {label: tuple(sum(x) / len(x) for x in zip(*each, strict=True)) for label, each in of.items()}
    return [means[label] for label in labels]


def _representatives(table: Matrix) -> Iterator[np.ndarray]:
    """A state for each stored row, and for each stored column."""
    for k in range(2):
        where = (table.rows, table.columns)[k] if isinstance(table, Folded) else np.arange(table.shape[k])
        yield np.unique(where, return_index=True)[1]

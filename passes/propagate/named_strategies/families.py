"""Families: dims of values that are sharded together, by the rules of operations between them.
A transformer's families are its batch, its sequence, its residual stream, its vocabulary, and per
layer the heads and the hidden features. "The batch" or "the heads" of a named strategy is one of
them, whatever the model calls it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from networkx.utils import UnionFind

from autoshard.layout import Shard
from autoshard.passes.ir.analyses import node_signature, values_made_of, values_reached
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.propagate.op_space import OpRequest, axis_strategies
from autoshard.passes.propagate.prices import roofline as costs
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.facts import is_view
from autoshard.passes.rules.families import context_parallel

Family = tuple[str, int]
"""a representative (value, dim) of dims that are sharded together"""


@dataclass
class Families:
    """The families of a graph (union-find over sharding rules)."""

    graph: Graph
    _strategies: dict[Any, tuple[Strategy, ...]] = field(default_factory=dict)
    _by_node: dict[str, tuple[Strategy, ...]] = field(default_factory=dict)
    _union: UnionFind = field(default_factory=UnionFind)

    def __post_init__(self) -> None:
        for node in self.graph.nodes:
            for strategy in self.strategies(node):
                if strategy.label not in context_parallel.SEQUENCE_SHARDED and (
                    found := sharded_dims_of(node, strategy)
                ):
                    self._union.union(*found)

    def strategies(self, node: Node) -> tuple[Strategy, ...]:
        if node.name not in self._by_node:
            key = node_signature(node, self.graph.types)
            if key not in self._strategies:
                self._strategies[key] = tuple(s for s in axis_strategies(node, self.graph) if s.divides)
            self._by_node[node.name] = self._strategies[key]
        return self._by_node[node.name]

    def of(self, value: str, dim: int) -> Family:
        """The family of a dim; a dim that no operation shards is alone in its own."""
        return self._union[value, dim]

    def length(self, family: Family) -> int:
        value, dim = family
        return int(self.graph.types[value].shape[dim])

    def of_all(self, values: Iterable[str]) -> frozenset[Family]:
        """Families of all dims of ``values``."""
        return frozenset(self.of(v, d) for v in values for d in range(len(self.graph.types[v].shape)))

    def cut(self, node: Node, strategy: Strategy) -> Family | None:
        """The family that ``strategy`` shards; None if it shards no dim."""
        found = sharded_dims_of(node, strategy)
        return self.of(*found[0]) if found else None

    def labels(self, node: Node, families: Iterable[Family]) -> frozenset[str]:
        """Factors of strategies of ``node`` that shard one of ``families``."""
        wanted = set(families)
        return frozenset(s.factor for s in self.strategies(node) if self.cut(node, s) in wanted)

    @cached_property
    def of_parameters(self) -> frozenset[Family]:
        """Families with a dim of a parameter."""
        return self.of_all(self.graph.parameters)

    @cached_property
    def weights(self) -> frozenset[str]:
        """Values made from parameters, buffers and constants alone."""
        return values_made_of(self.graph, (i.name for i in self.graph.inputs if i.kind != "input"))

    @cached_property
    def activations(self) -> frozenset[str]:
        """Values made from parameters and floating-point inputs: no masks, no positions."""
        types = self.graph.types
        carried = {
            i.name
            for i in self.graph.inputs
            if i.kind == "parameter" or (i.kind == "input" and types[i.name].dtype.is_floating_point)
        }
        return values_reached(self.graph, carried) - self.weights

    @cached_property
    def ring_families(self) -> frozenset[Family]:
        """Families that ring attention can shard: sequences."""
        found = ((self.cut(n, s), s.label) for n in self.graph.nodes for s in self.strategies(n))
        return frozenset(
            family for family, label in found if family is not None and label in context_parallel.SEQUENCE_SHARDED
        )

    @cached_property
    def from_inputs(self) -> frozenset[str]:
        """Values that depend on an input."""
        return values_reached(self.graph, (i.name for i in self.graph.of_kind("input")))

    def origins(self, weight: str) -> frozenset[str]:
        """Parameters behind a value of :attr:`weights`."""
        if weight in self.graph.parameters:
            return frozenset({weight})
        producer = self.graph.producers.get(weight)
        return frozenset().union(*map(self.origins, producer.inputs)) if producer is not None else frozenset()

    def flops(self, node: Node) -> float:
        """Forward and backward FLOPs of ``node``."""
        return costs.node_flops(node, self.graph)

    def is_activation(self, node: Node) -> bool:
        return not self.activations.isdisjoint(node.outputs)

    def asked(self, node: Node, cuts: frozenset[str], optional: bool = False) -> OpRequest:
        """A request to shard ``node``; masks and positions may be replicated, weights not
        partial."""
        reads_weights = not self.weights.isdisjoint(node.inputs)
        return OpRequest(cuts, optional or not self.is_activation(node), sums=not reads_weights)

    def is_dependent(self, node: Node, strategy: Strategy) -> bool:
        """Whether ``strategy`` communicates or leaves a dim of its family unsharded."""
        if strategy.label in context_parallel.SEQUENCE_SHARDED:
            return True
        family, cut = self.cut(node, strategy), dict(sharded_dims_of(node, strategy))
        rest = [v for v in node.values if v not in cut]
        return any(family in self.of_all([v]) for v in rest)


def sharded_dims_of(node: Node, strategy: Strategy) -> list[tuple[str, int]]:
    """(value, dim) pairs that a strategy shards, as far as they belong to one family."""
    if strategy.joins == "none":
        return []
    names, placed = node.values, strategy.placements
    if strategy.joins == "results":
        names, placed = node.outputs, strategy.outputs
    return [(n, p.dim) for n, p in zip(names, placed, strict=True) if isinstance(p, Shard)]


@dataclass(frozen=True)
class WeightProduct:
    """A product of an activation and a weight, or a look-up in a weight."""

    node: Node
    weight: str
    work: float
    """cost of leaving it unsharded, in arbitrary units"""
    sums: Family | None
    """the weight's input features, which it sums over; sharded: row-parallel"""
    makes: Family | None
    """the weight's output features, which it makes; sharded: column-parallel"""
    is_lookup: bool = False


def weight_products(families: Families) -> tuple[WeightProduct, ...]:
    """All products of an activation and a weight, and vocabulary look-ups."""
    found = []
    for node in families.graph.nodes:
        rule = rule_for(node.op)
        weights = [v for v in node.inputs if v in families.weights]
        if rule is None or not weights or len(weights) == len(node.inputs) or is_view(node.op):
            continue
        work = families.flops(node)
        is_lookup = not work and _is_vocabulary_lookup(node, families)
        if work or is_lookup:
            weight = max(weights, key=lambda v: families.graph.types[v].nbytes)
            sums, makes = _feature_families(node, weight, families)
            bytes_ = float(families.graph.types[weight].nbytes)
            found.append(WeightProduct(node, weight, work or bytes_, sums, makes, is_lookup))
    return tuple(found)


def _is_vocabulary_lookup(node: Node, families: Families) -> bool:
    """Whether the user's input selects rows of a table (vocabulary); positions do not count."""
    if "embedding" not in str(node.op):
        return False
    return any(v in families.from_inputs for v in node.inputs if v not in families.weights)


def _feature_families(node: Node, weight: str, families: Families) -> tuple[Family | None, Family | None]:
    """(family summed over, family made) of a product with ``weight``."""
    sums = makes = None
    others = [v for v in node.inputs if v != weight and v not in families.weights]
    for strategy in families.strategies(node):
        cut = dict(sharded_dims_of(node, strategy))
        if weight not in cut:
            continue
        if not any(o in cut for o in node.outputs):
            sums = families.cut(node, strategy)
        elif not any(v in cut for v in others):
            makes = families.cut(node, strategy)
    return sums, makes


def batch_of(families: Families) -> frozenset[Family]:
    """Families of the batch: the input dim along which most work is independent, on no parameter.
    Ties: dim 0 of the first input. Empty if there is none."""
    graph = families.graph
    inputs = [i.name for i in graph.of_kind("input")]
    places: dict[Family, tuple[int, int]] = {}
    for number, value in enumerate(inputs):
        for dim in range(len(graph.types[value].shape)):
            places.setdefault(families.of(value, dim), (-dim, -number))
    places = {f: place for f, place in places.items() if f not in families.of_parameters}
    if not places:
        return frozenset()
    scores = _independent_work(families, frozenset(places))
    ranked = sorted(places, key=lambda f: (*scores[f], places[f]), reverse=True)
    best = ranked[0]
    if scores[best] == (0.0, 0.0):
        return frozenset()
    alike = [f for f in ranked[1:] if families.length(f) == families.length(best) and places[f][0] == 0]
    return frozenset({best, *(f for f in alike if _is_batch_too(f, families, inputs, best))})


def _independent_work(families: Families, found: frozenset[Family]) -> dict[Family, tuple[float, float]]:
    """Family → (FLOPs, elements) of operations that it divides into independent parts."""
    from_rules = dict.fromkeys(found, (0.0, 0.0))
    for node in families.graph.nodes:
        made = sum(families.graph.types[o].numel for o in node.outputs)
        cuts = [families.cut(node, s) for s in families.strategies(node) if not families.is_dependent(node, s)]
        for family in found.intersection(cuts):  # counted once, whatever the number of attention strategies
            flops, elements = from_rules[family]
            from_rules[family] = (flops + families.flops(node), elements + made)
    return from_rules


def _is_batch_too(family: Family, families: Families, inputs: list[str], batch: Family) -> bool:
    """Whether it is the batch of inputs without one: two towers that never meet."""
    having = [v for v in inputs if family in families.of_all([v])]
    return not any(batch in families.of_all([v]) for v in having)

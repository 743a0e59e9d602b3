"""Sequence parallelism: Ulysses (Jacobs et al. 2023), ring attention (Liu et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterator

from autoshard.passes.ir.graph import Node
from autoshard.passes.propagate.experts.families import Families, Family, Product, cut_dims
from autoshard.passes.propagate.experts.mixture import mixtures
from autoshard.passes.propagate.experts.tensor import tokens
from autoshard.passes.propagate.op_space import Asked
from autoshard.passes.rules.families import ring
from autoshard.passes.rules.families.fold import ORDERS


def along_sequence(
    families: Families, found: tuple[Product, ...], batch: frozenset[Family], around: bool
) -> Iterator[tuple[str, Asked | None]]:
    """Requests: shard the sequence, and in attention the heads (Ulysses) or the sequence (ring).

    Between products and attention (rotary positions) either may be sharded. Free are: operations
    that no rule shards along the sequence, back to the product before them; experts, as tokens are
    dispatched; and zigzag reorderings, as a replicated value needs no message for them.
    """
    sequence = tokens(families, found, batch)
    core = {n.name: n for n in families.graph.nodes if _mixes(n, sequence, families)}
    by_head = {n: _by_head(node, sequence | batch, families) for n, node in core.items()}
    rings = {n: rings_of(node, families) for n, node in core.items()} if around else {}
    heads = set() if around else {f for found_ in by_head.values() for f in found_}
    free = _tail(families, sequence, found, core) | {node.name for node in mixtures(families)}
    for node in families.graph.nodes:
        cuts = families.labels(node, sequence)
        if rings.get(node.name):
            yield node.name, families.asked(node, rings[node.name])
        elif node.name in core:
            yield node.name, families.asked(node, families.labels(node, by_head[node.name]))
        elif node.name in free or node.op in ORDERS or (not cuts and families.is_activation(node)):
            yield node.name, None
        else:
            if cuts and families.weights.isdisjoint(node.inputs):
                apart = in_parts(node, families)  # no product leads there from a replicated value
                cuts |= families.labels(node, heads) - apart
            yield node.name, families.asked(node, cuts)


def in_parts(node: Node, families: Families) -> frozenset[str]:
    """Factors that shard every part of a fused dim, such as queries, keys and values."""
    return frozenset(s.factor for s in families.strategies(node) if s.in_parts)


def without_room(
    families: Families, found: tuple[Product, ...], batch: frozenset[Family], around: bool, ranks: int
) -> Iterator[str]:
    """Notes where positions or heads are fewer than ``ranks``, so that they are not sharded."""
    sequence = tokens(families, found, batch)
    core = [n for n in families.graph.nodes if _mixes(n, sequence, families)]
    mixed = {f for n in core for s in families.strategies(n) if (f := families.cut(n, s)) in sequence and f is not None}
    if (positions := min(map(families.length, mixed or sequence), default=ranks)) < ranks:
        many = "1 position" if positions == 1 else f"{positions} positions"
        yield f"a sequence of {many} cannot be cut over {ranks} ranks, so that every rank has all of it"
    for node in core:
        labels = families.labels(node, _by_head(node, sequence | batch, families))
        by_head = [s for s in families.strategies(node) if s.factor in labels]
        in_ring = around and rings_of(node, families)
        if node.op in ring.ATTENTION and by_head and not in_ring and not any(s.allows((ranks,)) for s in by_head):
            heads = max(int(s.size) for s in by_head if s.size is not None)
            yield f"attention of {heads} heads cannot be cut over {ranks} ranks, so that every rank does all of it"
            return


def _mixes(node: Node, sequence: frozenset[Family], families: Families) -> bool:
    """Whether ``node`` mixes positions: sharding the sequence leaves no independent parts."""
    reads_weights = node.op not in ring.ATTENTION and not families.weights.isdisjoint(node.inputs)  # sinks aside
    if not families.is_activation(node) or reads_weights:
        return False
    along = [s for s in families.strategies(node) if families.cut(node, s) in sequence]
    return bool(along) and all(families.loose(node, s) for s in along)


def rings_of(node: Node, families: Families) -> frozenset[str]:
    """Ring attention strategies of ``node``."""
    return frozenset(s.label for s in families.strategies(node) if s.label in ring.LABELS)


def _by_head(node: Node, others: frozenset[Family], families: Families) -> frozenset[Family]:
    """Families other than sequence and batch that shard all activations of ``node``: heads."""
    found = set()
    activations = {v for v in (*node.inputs, *node.outputs) if v in families.activations}
    for strategy in families.strategies(node):
        family = families.cut(node, strategy)
        if family is not None and family not in others and activations <= dict(cut_dims(node, strategy)).keys():
            found.add(family)
    return frozenset(found)


def _tail(
    families: Families, sequence: frozenset[Family], found: tuple[Product, ...], core: dict[str, Node]
) -> frozenset[str]:
    """Operations after a result without the sequence, and before it back to the last product."""
    graph, made_by = families.graph, {p.node.name for p in found}
    leaving = [n for n in graph.nodes if n.name not in core and _leaves(n, sequence, families)]
    free = {n.name for n in leaving}
    for node in graph.nodes:
        if any((p := graph.producers.get(v)) is not None and p.name in free for v in node.inputs):
            free.add(node.name)
    if not free.isdisjoint(core):  # its result flows back into the sequence
        return frozenset()
    pending = list(leaving)
    while pending:
        node = pending.pop()
        if node.name in made_by:
            continue
        for value in node.inputs:
            producer = graph.producers.get(value)
            if producer is not None and value in families.activations and len(graph.uses[value]) == 1:
                free.add(producer.name)
                pending.append(producer)
    return frozenset(free)


def _leaves(node: Node, sequence: frozenset[Family], families: Families) -> bool:
    """Whether ``node`` reads activations with the sequence, and cannot be sharded along it."""
    read = [v for v in node.inputs if v in families.activations]
    return bool(sequence & families.of_all(read)) and not families.labels(node, sequence)

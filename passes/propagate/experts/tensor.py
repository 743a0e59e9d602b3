"""Tensor parallelism: pairs of column- and row-parallel products (Megatron, Shoeybi 2019)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator

import numpy as np

from autoshard.passes.propagate.experts.families import Families, Family, Product
from autoshard.passes.propagate.op_space import Asked
from autoshard.passes.search import CostNetwork, solve

WHOLE_PRODUCT = 1e6
"""price of leaving all products unsharded; sending everything costs 1: work first, then bytes"""


def paired(families: Families, found: tuple[Product, ...], ranks: int) -> frozenset[Family]:
    """Families to shard so that each product is sharded once, by output or by input features.

    A product sharded by both would gather its operand; one sharded by neither is not divided, nor
    is work between products such as attention. The choice divides most work, then sends fewest
    bytes: heads, hidden features and vocabulary are sharded, the residual stream is not.
    """
    usable = [f for f in dict.fromkeys(f for p in found for f in (p.sums, p.makes)) if f and _fits(f, families, ranks)]
    index = {f: i for i, f in enumerate(usable)}
    if not index:
        return frozenset()
    nodes = [np.array([0.0, sent]) for sent in _sent(usable, found, families)]
    between = _between(index, found, families)
    work = sum(p.work for p in found) + sum(between.values())
    edges: dict[tuple[int, int], np.ndarray] = defaultdict(lambda: np.zeros((2, 2)))
    for p in found:
        sides = sorted({index[f] for f in (p.sums, p.makes) if f in index})
        whole = WHOLE_PRODUCT * p.work / work
        if len(sides) == 1 and p.sums != p.makes:
            nodes[sides[0]] = nodes[sides[0]] + np.array([whole, 0.0])
        elif len(sides) == 2:
            edges[sides[0], sides[1]] = edges[sides[0], sides[1]] + np.array([[whole, 0.0], [0.0, np.inf]])
    for family, part in between.items():
        nodes[index[family]] = nodes[index[family]] + np.array([WHOLE_PRODUCT * part / work, 0.0])
    chosen = solve(CostNetwork(tuple(nodes), tuple((i, j, table) for (i, j), table in edges.items()))).choice
    return frozenset(f for f, cut in zip(usable, chosen, strict=True) if cut)


def _between(usable: Collection[Family], found: tuple[Product, ...], families: Families) -> dict[Family, float]:
    """Work of operations that no product family divides, by the one of ``usable`` that does.

    Of attention these are the heads, also if it has a parameter.
    """
    products, between = {p.node.name for p in found if p.sums or p.makes}, defaultdict[Family, float](float)
    for node in families.graph.nodes:
        cut = {f for s in families.strategies(node) if (f := families.cut(node, s)) is not None and f in usable}
        if len(cut) == 1 and node.name not in products:
            between[cut.pop()] += families.flops(node)
    return between


def _fits(family: Family, families: Families, ranks: int) -> bool:
    """Whether every parameter has ``ranks`` elements along its dims of the family."""
    types = families.graph.types
    dims = ((p, d) for p in families.graph.parameters for d in range(len(types[p].shape)))
    return all(types[p].shape[d] >= ranks for p, d in dims if families.of(p, d) == family)


def _sent(usable: list[Family], found: tuple[Product, ...], families: Families) -> list[float]:
    """Bytes that sharding each family sends, as shares of the total.

    Row-parallel: all-reduce of the result in the forward. Column-parallel: of the operand's
    gradient in the backward, once for all products that read the operand.
    """
    types = families.graph.types
    sent: Counter[Family] = Counter()
    seen = set()
    for p in found:
        if p.sums is not None:
            sent[p.sums] += sum(types[o].nbytes for o in p.node.outputs)
        for value in p.node.inputs:
            if (
                p.makes is not None
                and types[value].grad
                and value not in families.weights
                and (p.makes, value) not in seen
            ):
                seen.add((p.makes, value))
                sent[p.makes] += types[value].nbytes
    every = sum(sent.values()) or 1.0
    return [sent[f] / every for f in usable]


def with_sequence(
    families: Families, chosen: frozenset[Family], found: tuple[Product, ...], batch: frozenset[Family]
) -> Iterator[tuple[str, Asked]]:
    """Products sharded along ``chosen``, and the sequence between pairs (Korthikanti et al. 2022).

    Between pairs are operations on the stream: read by column-, written by row-parallel products.
    """
    pairs = [p for p in found if p.sums in chosen or p.makes in chosen]
    stream = {f for p in pairs for f in (p.sums, p.makes) if f is not None and f not in chosen}
    sequence = tokens(families, tuple(pairs), batch)
    for node in families.graph.nodes:
        cuts, outside = families.labels(node, chosen), False
        if not cuts:
            touched = families.of_all(v for v in (*node.inputs, *node.outputs) if v not in families.weights)
            cuts, outside = families.labels(node, sequence), stream.isdisjoint(touched)
        yield node.name, families.asked(node, cuts, outside)


def tokens(families: Families, found: tuple[Product, ...], batch: frozenset[Family]) -> frozenset[Family]:
    """Families of the sequence: the dim before features of what products read and make."""
    types = families.graph.types
    batch = batch - families.attended  # with one sample most work is independent along the sequence
    sequence: set[Family] = set()
    for p in found:
        for value in (*p.node.inputs, *p.node.outputs):
            dims = len(types[value].shape)
            if value in families.weights or dims < 2 or (p.is_lookup and value in p.node.inputs):
                continue
            family = families.of(value, dims - 2)
            if family not in batch and family not in (p.sums, p.makes):
                sequence.add(family)
    return frozenset(sequence)

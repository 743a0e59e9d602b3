"""Tensor parallel plans: pairs of column- and row-parallel products, found by the graph (Shoeybi et al. 2019)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator

import numpy as np

from autoshard.passes.propagate.experts.families import Families, Family, Product
from autoshard.passes.propagate.op_space import Asked
from autoshard.passes.search import CostNetwork, solve

WHOLE_PRODUCT = 1e6
"""the price of leaving all products whole, where all that can be sent costs 1: first all work is divided, then bytes count"""


def paired(families: Families, found: tuple[Product, ...], ranks: int) -> frozenset[Family]:
    """The families to cut so that each product is cut once: along its output features, or along its input features.

    A product of which both are cut would need its operand gathered, one of which none is cut is not divided, nor is what
    stands between them and does work, such as attention. Of the choices that divide the most work the one that sends the
    fewest bytes: heads and hidden features are cut, the residual stream is not; the vocabulary is.
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
    """The work of operations that neither sum over a family nor make one, by the one of ``usable`` that divides it.

    Of attention that is the heads, also where it has a parameter of its own.
    """
    products, between = {p.node.name for p in found if p.sums or p.makes}, defaultdict[Family, float](float)
    for node in families.graph.nodes:
        cut = {f for s in families.strategies(node) if (f := families.cut(node, s)) is not None and f in usable}
        if len(cut) == 1 and node.name not in products:
            between[cut.pop()] += families.flops(node)
    return between


def _fits(family: Family, families: Families, ranks: int) -> bool:
    """Whether every parameter that has a dim in the family is long enough there."""
    types = families.graph.types
    dims = ((p, d) for p in families.graph.parameters for d in range(len(types[p].shape)))
    return all(types[p].shape[d] >= ranks for p, d in dims if families.of(p, d) == family)


def _sent(usable: list[Family], found: tuple[Product, ...], families: Families) -> list[float]:
    """Bytes that cutting each family sends, of all that could be sent.

    A row-parallel product's result is reduced in the forward; the gradient of what column-parallel ones read, once for
    all of them, in the backward.
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
    """Products cut along ``chosen``, and the sequence between the pairs (Korthikanti et al. 2022).

    Between the pairs is what works on the stream: what column-parallel products read, and row-parallel ones add to.
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
    """The families of the sequence: of what products read and make, the dim before the features that is not the batch."""
    types = families.graph.types
    batch = batch - families.attended  # of a single sample, most of the work is independent along the sequence
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

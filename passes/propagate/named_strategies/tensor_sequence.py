"""Tensor parallelism (Megatron), sequence parallelism (Ulysses), ring attention as strategies.
Pairs of column- and row-parallel products: Shoeybi et al. 2019. The sequence sharded between the
pairs: Korthikanti et al. 2022. All-to-all around attention: Jacobs et al. 2023. Ring attention:
Liu et al. 2023."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator

import numpy as np

from autoshard.passes.ir.graph import Node
from autoshard.passes.propagate.named_strategies.families import Families, Family, WeightProduct, sharded_dims_of
from autoshard.passes.propagate.named_strategies.sparse_models import expert_nodes
from autoshard.passes.propagate.op_space import OpRequest
from autoshard.passes.rules.families import context_parallel
from autoshard.passes.rules.families.context_parallel import ZIGZAG_OPS
from autoshard.passes.search import CostNetwork, solve

UNDIVIDED_PRODUCT_PRICE = 1e6
"""price of leaving all products unsharded; sending everything costs 1: work first, then bytes"""


def tensor_parallel_families(families: Families, found: tuple[WeightProduct, ...], ranks: int) -> frozenset[Family]:
    """Families to shard so that each product is sharded once, by output or by input features: by
    both it would gather its operand, by neither it is not divided, nor is work between products.
    The choice divides most work, then sends fewest bytes: heads, hidden features and vocabulary,
    not the residual stream."""
    usable = [
        f
        for f in dict.fromkeys(f for p in found for f in (p.sums, p.makes))
        if f and _is_long_enough(f, families, ranks)
    ]
    index = {f: i for i, f in enumerate(usable)}
    if not index:
        return frozenset()
    nodes = [np.array([0.0, sent]) for sent in _sent_shares(usable, found, families)]
    between = _work_between_products(index, found, families)
    work = sum(p.work for p in found) + sum(between.values())
    edges: dict[tuple[int, int], np.ndarray] = defaultdict(lambda: np.zeros((2, 2)))
    for p in found:
        sides = sorted({index[f] for f in (p.sums, p.makes) if f in index})
        whole = UNDIVIDED_PRODUCT_PRICE * p.work / work
        if len(sides) == 1 and p.sums != p.makes:
            nodes[sides[0]] = nodes[sides[0]] + np.array([whole, 0.0])
        elif len(sides) == 2:
            edges[sides[0], sides[1]] = edges[sides[0], sides[1]] + np.array([[whole, 0.0], [0.0, np.inf]])
    for family, part in between.items():
        nodes[index[family]] = nodes[index[family]] + np.array([UNDIVIDED_PRODUCT_PRICE * part / work, 0.0])
    chosen = solve(CostNetwork(tuple(nodes), tuple((i, j, table) for (i, j), table in edges.items()))).choice
    return frozenset(f for f, cut in zip(usable, chosen, strict=True) if cut)


def _work_between_products(
    usable: Collection[Family], found: tuple[WeightProduct, ...], families: Families
) -> dict[Family, float]:
    """Work that no product family divides, by the one of ``usable`` that does (attention:
    heads)."""
    products, between = {p.node.name for p in found if p.sums or p.makes}, defaultdict[Family, float](float)
    for node in families.graph.nodes:
        cut = {f for s in families.strategies(node) if (f := families.cut(node, s)) is not None and f in usable}
        if len(cut) == 1 and node.name not in products:
            between[cut.pop()] += families.flops(node)
    return between


def _is_long_enough(family: Family, families: Families, ranks: int) -> bool:
    """Whether every parameter has ``ranks`` elements along its dims of the family."""
    types = families.graph.types
    dims = ((p, d) for p in families.graph.parameters for d in range(len(types[p].shape)))
    return all(types[p].shape[d] >= ranks for p, d in dims if families.of(p, d) == family)


def _sent_shares(usable: list[Family], found: tuple[WeightProduct, ...], families: Families) -> list[float]:
    """Bytes that sharding each family sends, as shares of the total. Row-parallel: the result's
    all-reduce in the forward. Column-parallel: the operand's gradient's, once for all its
    products."""
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


def megatron_sp_requests(
    families: Families, chosen: frozenset[Family], found: tuple[WeightProduct, ...], batch: frozenset[Family]
) -> Iterator[tuple[str, OpRequest]]:
    """Products sharded along ``chosen``, and the sequence between pairs (Korthikanti et al. 2022):
    on the stream, which column-parallel products read and row-parallel ones write."""
    pairs = [p for p in found if p.sums in chosen or p.makes in chosen]
    stream = {f for p in pairs for f in (p.sums, p.makes) if f is not None and f not in chosen}
    sequence = sequence_families(families, tuple(pairs), batch)
    for node in families.graph.nodes:
        cuts, outside = families.labels(node, chosen), False
        if not cuts:
            touched = families.of_all(v for v in node.values if v not in families.weights)
            cuts, outside = families.labels(node, sequence), stream.isdisjoint(touched)
        yield node.name, families.asked(node, cuts, outside)


def sequence_families(
    families: Families, found: tuple[WeightProduct, ...], batch: frozenset[Family]
) -> frozenset[Family]:
    """Families of the sequence: the dim before features of what products read and make."""
    types = families.graph.types
    batch = batch - families.ring_families  # with one sample most work is independent along the sequence
    sequence: set[Family] = set()
    for p in found:
        for value in p.node.values:
            dims = len(types[value].shape)
            if value in families.weights or dims < 2 or (p.is_lookup and value in p.node.inputs):
                continue
            family = families.of(value, dims - 2)
            if family not in batch and family not in (p.sums, p.makes):
                sequence.add(family)
    return frozenset(sequence)


def sequence_requests(
    families: Families, found: tuple[WeightProduct, ...], batch: frozenset[Family], around: bool
) -> Iterator[tuple[str, OpRequest | None]]:
    """Requests: shard the sequence, and in attention the heads (Ulysses) or the sequence (ring).
    Between products and attention (rotary positions) either may be sharded. Free are: operations
    that no rule shards along the sequence, back to the product before them; experts, as tokens are
    dispatched; and zigzag reorderings, as a replicated value needs no message for them."""
    sequence = sequence_families(families, found, batch)
    core = {n.name: n for n in families.graph.nodes if _mixes_positions(n, sequence, families)}
    by_head = {n: _head_families(node, sequence | batch, families) for n, node in core.items()}
    rings = {n: ring_strategies(node, families) for n, node in core.items()} if around else {}
    heads = set() if around else {f for found_ in by_head.values() for f in found_}
    free = _nodes_after_sequence(families, sequence, found, core) | {node.name for node in expert_nodes(families)}
    for node in families.graph.nodes:
        cuts = families.labels(node, sequence)
        if rings.get(node.name):
            yield node.name, families.asked(node, rings[node.name])
        elif node.name in core:
            yield node.name, families.asked(node, families.labels(node, by_head[node.name]))
        elif node.name in free or node.op in ZIGZAG_OPS or (not cuts and families.is_activation(node)):
            yield node.name, None
        else:
            if cuts and families.weights.isdisjoint(node.inputs):
                apart = frozenset(
                    s.factor for s in families.strategies(node) if s.in_parts
                )  # no product leads there from a replicated value
                cuts |= families.labels(node, heads) - apart
            yield node.name, families.asked(node, cuts)


def infeasible_sequence_notes(
    families: Families, found: tuple[WeightProduct, ...], batch: frozenset[Family], around: bool, ranks: int
) -> Iterator[str]:
    """Notes where positions or heads are fewer than ``ranks``, so that they are not sharded."""
    sequence = sequence_families(families, found, batch)
    core = [n for n in families.graph.nodes if _mixes_positions(n, sequence, families)]
    mixed = {f for n in core for s in families.strategies(n) if (f := families.cut(n, s)) in sequence and f is not None}
    if (positions := min(map(families.length, mixed or sequence), default=ranks)) < ranks:
        many = "1 position" if positions == 1 else f"{positions} positions"
        yield f"a sequence of {many} cannot be sharded over {ranks} ranks, so every rank has all of it"
    for node in core:
        labels = families.labels(node, _head_families(node, sequence | batch, families))
        by_head = [s for s in families.strategies(node) if s.factor in labels]
        in_ring = around and ring_strategies(node, families)
        if (
            node.op in context_parallel.ATTENTION_OPS
            and by_head
            and not in_ring
            and not any(s.allows((ranks,)) for s in by_head)
        ):
            heads = max(int(s.size) for s in by_head if s.size is not None)
            yield f"attention of {heads} heads cannot be sharded over {ranks} ranks, so every rank does all of it"
            return


def _mixes_positions(node: Node, sequence: frozenset[Family], families: Families) -> bool:
    """Whether ``node`` mixes positions: sharding the sequence leaves no independent parts."""
    # sinks aside
    reads_weights = node.op not in context_parallel.ATTENTION_OPS and not families.weights.isdisjoint(node.inputs)
    if not families.is_activation(node) or reads_weights:
        return False
    along = [s for s in families.strategies(node) if families.cut(node, s) in sequence]
    return bool(along) and all(families.is_dependent(node, s) for s in along)


def ring_strategies(node: Node, families: Families) -> frozenset[str]:
    return frozenset(s.label for s in families.strategies(node) if s.label in context_parallel.RING_LABELS)


def _head_families(node: Node, others: frozenset[Family], families: Families) -> frozenset[Family]:
    """Families other than sequence and batch that shard all activations of ``node``: heads."""
    found = set()
    activations = {v for v in node.values if v in families.activations}
    for strategy in families.strategies(node):
        family = families.cut(node, strategy)
        if family is not None and family not in others and activations <= dict(sharded_dims_of(node, strategy)).keys():
            found.add(family)
    return frozenset(found)


def _nodes_after_sequence(
    families: Families, sequence: frozenset[Family], found: tuple[WeightProduct, ...], core: dict[str, Node]
) -> frozenset[str]:
    """Operations after a result without the sequence, and before it back to the last product."""
    graph, made_by = families.graph, {p.node.name for p in found}
    leaving = [n for n in graph.nodes if n.name not in core and _leaves_sequence(n, sequence, families)]
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


def _leaves_sequence(node: Node, sequence: frozenset[Family], families: Families) -> bool:
    """Whether ``node`` reads activations with the sequence, and cannot be sharded along it."""
    read = [v for v in node.inputs if v in families.activations]
    return bool(sequence & families.of_all(read)) and not families.labels(node, sequence)

"""Zigzag (load-balanced) order of a sequence, carried through a graph: balanced causal attention.
Causal ring attention is balanced if each rank holds one early and one late block of the sequence.
Position-wise operations run in any order, so a chunk of a tensor in zigzag order is such a pair of
blocks. The graph switches order only at the ends: a minimum cut chooses which operations run in
zigzag order so that reordering sends the fewest bytes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import networkx as nx
from networkx.algorithms.flow import dinitz

from autoshard.layout import Partial, Replicate, Shard
from autoshard.passes.ir.analyses import node_signature
from autoshard.passes.ir.assignment import Assignment, Strategy
from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType, map_refs
from autoshard.passes.propagate.op_space import axis_strategies
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.base import ops, positive
from autoshard.passes.rules.families import context_parallel
from autoshard.passes.rules.families.context_parallel import FROM_ZIGZAG, TO_ZIGZAG
from autoshard.runtime.attention.masked_attention import banded_op
from autoshard.runtime.operations.experts import experts_op
from autoshard.runtime.operations.losses import cross_entropy_op, linear_cross_entropy_op

SEQUENTIAL_ORDER, ZIGZAG_ORDER = "", "*"
"""the ends of the cut: sequence order, and zigzag order"""
BALANCED_STRATEGIES = (
    context_parallel.ZIGZAG_RING,
    context_parallel.HELPED_RING,
    context_parallel.ZIGZAG_QUERIES,
    context_parallel.ZIGZAG_CHUNKED,
)
"""attention strategies that balance the work of a causal mask"""

POSITION_REDUCTIONS = frozenset(
    (
        cross_entropy_op,
        linear_cross_entropy_op,
        *ops(
            "mean.default mean.dim softmax.int _softmax.default log_softmax.int _log_softmax.default layer_norm.default "
            "_safe_softmax.default rms_norm.default cross_entropy_loss.default nll_loss_nd.default nll_loss.default "
            "mse_loss.default l1_loss.default binary_cross_entropy_with_logits.default"
        ),
    )
)
ORDER_FREE_OPS = POSITION_REDUCTIONS.union(
    ops(
        "view.default reshape.default _unsafe_view.default view_as.default reshape_as.default view_copy.default "
        "unflatten.int squeeze.default squeeze.dim squeeze.dims expand.default expand_copy.default expand_as.default "
        "broadcast_to.default repeat.default repeat_interleave.self_int slice.Tensor select.int split.Tensor split.sizes "
        "split_with_sizes.default chunk.default zeros.default ones.default full.default embedding.default gather.default "
        "topk.default max.dim min.dim amax.default amin.default any.dim all.dim cumsum.default logsumexp.default "
        "linalg_vector_norm.default"
    ),
    (experts_op._opoverload,),
)
"""order-free operations whose local form differs from the global one; ``POSITION_REDUCTIONS``: the part of
them that may reduce over positions"""


@dataclass(frozen=True)
class SequenceLink:
    """The sequence dim of each operand and result of an operation; None: not sharded there."""

    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]


def zigzag_ranks(assignment: Assignment) -> int:
    """Size of the rings that balance causal attention; 0 without any, or with several sizes."""
    mesh, found = assignment.mesh, set[int]()
    for node in assignment.graph.nodes:
        if node.op in context_parallel.ATTENTION_OPS:
            pairs = list(zip(assignment.choices[node.name], mesh.shape, strict=True))
            found |= {math.prod(n for s, n in pairs if s.label == label) for label in BALANCED_STRATEGIES} - {1}
    return found.pop() if len(found) == 1 else 0


def to_zigzag_order(graph: Graph, ranks: int) -> Graph | None:
    """``graph`` with operations rewritten to zigzag order where that is cheaper; None: nowhere."""
    found = sequence_links(graph, ranks)
    return _rewrite_to_zigzag(graph, ranks, found, chosen) if (chosen := zigzag_nodes(graph, ranks, found)) else None


def can_run_zigzag(node: Node, graph: Graph, ranks: int) -> bool:
    """Whether ``node`` is causal attention that supports zigzag order over ``ranks``."""
    if (
        node.op not in context_parallel.ATTENTION_OPS
        or node.argument("dropout_p", 0.0)
        or context_parallel.zigzag_order_ranks(node)
    ):
        return False
    length = graph.shape(node.argument("query"))[-2]
    return length % ranks == 0 and any(s.label == context_parallel.ZIGZAG_RING for s in axis_strategies(node, graph))


# --- operations along the sequence ---


def sequence_links(graph: Graph, ranks: int) -> dict[str, SequenceLink]:
    """Operation → sequence dims, for operations tied to balanced attention by order-free ones."""
    blocked = frozenset[str]()
    candidates: dict[Any, list[SequenceLink]] = {}
    while True:
        found, clashing = _propagate_links(graph, ranks, blocked, candidates)
        if not clashing:
            return found
        blocked |= clashing


def _propagate_links(
    graph: Graph, ranks: int, blocked: Collection[str], candidates: dict[Any, list[SequenceLink]]
) -> tuple[dict[str, SequenceLink], set[str]]:
    """(:func:`sequence_links`, operations with a value along two dims); skips ``blocked``."""
    found: dict[str, SequenceLink] = {}
    dims: dict[str, int] = {}
    clashing = set[str]()
    pending = list[str]()

    def add(node: Node, link: SequenceLink) -> None:
        found[node.name] = link
        for value, dim in zip(node.values, (*link.inputs, *link.outputs), strict=True):
            if dim is None:
                continue
            if dims.setdefault(value, dim) != dim:
                clashing.add(node.name)
            pending.append(value)

    for node in graph.nodes:
        if node.name not in blocked and can_run_zigzag(node, graph, ranks):
            add(node, _attention_link(node, graph))
    seen = set[str]()
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        made = [graph.producers[value]] if value in graph.producers else []
        for node in (*made, *graph.uses[value]):
            if node.name in found or node.name in blocked:
                continue
            key = node_signature(node, graph.types)
            if key not in candidates:
                candidates[key] = list(order_free_links(node, graph))
            link = next((x for x in candidates[key] if _link_touches(node, x, value, dims[value])), None)
            if link is not None:
                add(node, link)
    return found, clashing


def _link_touches(node: Node, link: SequenceLink, value: str, dim: int) -> bool:
    return (value, dim) in zip(node.values, (*link.inputs, *link.outputs), strict=True)


def _attention_link(node: Node, graph: Graph) -> SequenceLink:
    """Queries, keys and values; a mask is read in the order of the sequence."""
    along = {node.positions[name] for name in ("query", "key", "value")}
    dims = (len(graph.shape(value)) - 2 if i in along else None for i, value in enumerate(node.inputs))
    return SequenceLink(tuple(dims), (len(graph.shape(node.outputs[0])) - 2,))


def order_free_links(node: Node, graph: Graph) -> Iterator[SequenceLink]:
    """Dims along which ``node`` is position-wise, reduces, or runs unchanged on any chunk."""
    rule = rule_for(node.op)
    if rule is None or (rule.local is not None and node.op not in ORDER_FREE_OPS):
        return
    adds = rule.local is None or node.op in POSITION_REDUCTIONS
    own = node.argument("dim", None)
    own = positive(own, len(graph.shape(node.inputs[0]))) if isinstance(own, int) and not adds else ()
    for strategy in axis_strategies(node, graph):
        inputs, outputs = (tuple(map(_sharded_dim, placed)) for placed in (strategy.inputs, strategy.outputs))
        if _is_order_free(strategy) and (adds or (None not in outputs and own not in inputs[:1])):
            pairs = zip(node.values, (*inputs, *outputs), strict=True)
            if len({graph.shape(value)[dim] for value, dim in pairs if dim is not None}) == 1:
                yield SequenceLink(inputs, outputs)


def _is_order_free(strategy: Strategy) -> bool:
    """Whether a strategy shards one dim anywhere, and ranks exchange nothing but sums."""
    # tokens are dispatched; a vocabulary shard has its own indices
    if strategy.joins == "none" or strategy.label == "vocab":
        return False
    reads = all(type(p) in (Shard, Replicate) for p in strategy.inputs)
    return reads and all(type(p) in (Shard, Partial) for p in strategy.outputs)


def _sharded_dim(placement: Any) -> int | None:
    return placement.dim if type(placement) is Shard else None


# --- the minimum cut ---


def zigzag_nodes(graph: Graph, ranks: int, found: Mapping[str, SequenceLink]) -> frozenset[str]:
    """Operations to run in zigzag order: a minimum cut over bytes reordered at the ends. Ties:
    fewest ends, then the largest set, so that equal layers stay equal."""
    network = nx.DiGraph()
    network.add_nodes_from([SEQUENTIAL_ORDER, ZIGZAG_ORDER])
    many = 2 * len(graph.types)
    for node in graph.nodes:
        if node.name in found and node.op in context_parallel.ATTENTION_OPS:
            network.add_edge(ZIGZAG_ORDER, node.name, capacity=internal_reorder_bytes(node, graph, ranks) * many)
    for value, (maker, readers) in makers_and_readers(graph, found).items():
        if readers <= {maker}:
            continue
        size = reorder_bytes(graph, value) * many + 1
        folds, unfolds = f"folds {value}", f"unfolds {value}"
        network.add_edge(folds, maker, capacity=size)
        network.add_edge(maker, unfolds, capacity=size)
        network.add_edges_from((reader, folds) for reader in readers)
        network.add_edges_from((unfolds, reader) for reader in readers)
    _, (folded, _) = nx.minimum_cut(network, ZIGZAG_ORDER, SEQUENTIAL_ORDER, flow_func=dinitz)
    return frozenset(found.keys() & folded)


def makers_and_readers(graph: Graph, found: Mapping[str, SequenceLink]) -> dict[str, tuple[str, set[str]]]:
    """Value with the sequence → (its producer, its readers along it); others count as PLAIN."""
    made: dict[str, tuple[str, set[str]]] = {}
    for node in graph.nodes:
        if node.name in found:
            along = zip(node.values, _link_dims(found[node.name]), strict=True)
            made |= {value: (SEQUENTIAL_ORDER, set()) for value, dim in along if dim is not None and value not in made}
    for node in graph.nodes:
        link = found.get(node.name)
        for i, value in enumerate(node.inputs):
            if value in made:
                made[value][1].add(SEQUENTIAL_ORDER if link is None or link.inputs[i] is None else node.name)
        for i, value in enumerate(node.outputs):
            if value in made and link is not None and link.outputs[i] is not None:
                made[value] = node.name, made[value][1]
    for value in graph.returned & made.keys():
        made[value][1].add(SEQUENTIAL_ORDER)
    return made


def _link_dims(link: SequenceLink) -> tuple[int | None, ...]:
    return (*link.inputs, *link.outputs)


def reorder_bytes(graph: Graph, value: str) -> int:
    """Bytes reordered between sequence and zigzag order, forward and backward."""
    type_ = graph.types[value]
    return type_.nbytes * (1 + (type_.grad and graph.training))


def internal_reorder_bytes(node: Node, graph: Graph, ranks: int) -> int:
    """Bytes that attention reorders by itself; with two ranks, keys and values stay."""
    names = ("query", "key", "value") if ranks > 2 else ("query",)
    return sum(reorder_bytes(graph, value) for value in (*(node.argument(n).name for n in names), *node.outputs))


# --- rewriting the graph ---


def _rewrite_to_zigzag(graph: Graph, ranks: int, found: Mapping[str, SequenceLink], chosen: Collection[str]) -> Graph:
    """``graph`` with ``chosen`` operations in zigzag order, and reorderings around them."""
    new = _ZigzagRewriter(graph, ranks, {name: found[name] for name in chosen})
    nodes = list(map(new.node, graph.nodes))
    outputs = map_refs(graph.outputs, lambda ref: Ref(new.read(ref.name, None, None)))
    mutations = {fqn: new.read(name, None, None) for fqn, name in graph.mutations.items()}
    placed = (node for i in range(len(nodes) + 1) for node in (*new.made.get(i, ()), *nodes[i : i + 1]))
    return replace(graph, nodes=tuple(placed), types=new.types, outputs=outputs, mutations=mutations)


class _ZigzagRewriter:
    """Rewrites a graph to zigzag order; ``along``: the operations to run in it."""

    def __init__(self, graph: Graph, ranks: int, along: Mapping[str, SequenceLink]) -> None:
        self.graph, self.ranks, self.along = graph, ranks, along
        self.types = dict(graph.types)
        self.places = {node.name: i for i, node in enumerate(graph.nodes)}
        self.made: dict[int, list[Node]] = {}
        """position → reorderings to insert before it"""
        self._brought: dict[tuple[str, bool], str] = {}
        self._taken = {*graph.types, *self.places}
        self._folded: dict[str, int] = {}
        """value made in zigzag order → its sequence dim"""
        for node in graph.nodes:
            if node.name in along:
                dims = zip(node.outputs, along[node.name].outputs, strict=True)
                self._folded |= {value: dim for value, dim in dims if dim is not None}

    def node(self, node: Node) -> Node:
        """The node with its operands in the order that it reads."""
        dims = iter(self.along[node.name].inputs if node.name in self.along else (None,) * len(node.inputs))
        read = map_refs((node.args, dict(node.kwargs)), lambda ref: Ref(self.read(ref.name, next(dims), node)))
        node = replace(node, args=read[0], kwargs=read[1])
        return (
            _zigzag_attention(node, self.ranks)
            if node.name in self.along and node.op in context_parallel.ATTENTION_OPS
            else node
        )

    def read(self, value: str, dim: int | None, reader: Node | None) -> str:
        """Name of ``value`` in zigzag order along ``dim`` (or sequence order) for ``reader``."""
        made = self._folded.get(value)
        folded = dim is not None
        if folded is (made is not None):
            return value
        if (value, folded) not in self._brought:
            name = self._brought[value, folded] = self._free(f"{value}_{'folded' if folded else 'unfolded'}")
            place, stack, checkpoint = self._place(value, reader)
            args = Ref(value), dim if folded else made, self.ranks
            where = stack[-1][0] if stack else "", stack, () if reader is None else reader.frames
            node = Node(
                name, TO_ZIGZAG if folded else FROM_ZIGZAG, args, {}, (name,), (0,), *where, checkpoint=checkpoint
            )
            self.made.setdefault(place, []).append(node)
            type_ = self.types[value]
            self.types[name] = TensorType(type_.shape, type_.dtype, type_.grad)
        return self._brought[value, folded]

    def _free(self, name: str) -> str:
        numbered = (f"{name}_{i}" for i in itertools.count(1))
        found = next(n for n in itertools.chain((name,), numbered) if n not in self._taken)
        self._taken.add(found)
        return found

    def _place(self, value: str, reader: Node | None) -> tuple[int, tuple[tuple[str, str], ...], int]:
        """(position, module stack, checkpoint) of the reordering of ``value``: early, in the
        innermost module of producer and reader, so that equal layers stay equal."""
        maker = self.graph.producers.get(value)
        if maker is None:
            return 0, (), 0
        pairs = zip(maker.module_types, () if reader is None else reader.module_types, strict=False)
        stack = tuple(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        inner = maker.module_types[: len(stack) + 1]
        checkpoint = maker.checkpoint if reader is not None and maker.checkpoint == reader.checkpoint else 0
        place, end = self.places[maker.name] + 1, len(self.graph.nodes) if reader is None else self.places[reader.name]
        for node in self.graph.nodes[place:end]:
            inside = len(inner) > len(stack) and node.module_types[: len(inner)] == inner
            if not inside and (node.checkpoint == checkpoint or node.checkpoint != maker.checkpoint):
                break
            place += 1
        return place, stack, checkpoint


def _zigzag_attention(node: Node, ranks: int) -> Node:
    """Attention rewritten to read and make zigzag order."""
    if node.op is banded_op._opoverload:
        args, kwargs = node.with_arguments(folded=ranks)
        return replace(node, args=args, kwargs=kwargs)
    given = {name: node.argument(name) for name in ("attn_mask", "scale", "enable_gqa")}
    form = {name: value for name, value in given.items() if value not in (None, False)}
    return replace(node, op=banded_op._opoverload, args=node.args[:3], kwargs={**form, "after": 0, "folded": ranks})

"""Unflatten rows: ops that work row by row run on the leading dims, each of which can be sharded.

In [batch · sequence, width] a shard of the sequence is not contiguous; nor is one of the batch in
[sequence · batch, width], as in nn.MultiheadAttention. Layers, routers, experts and losses do the
same on [batch, sequence, width]. Rows stay flat unless experts or losses read them, or a reshape
restores their dims.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from autoshard.aten import aten
from autoshard.passes.capture.translate.canonical import remove_dead
from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType, map_refs
from autoshard.passes.rules.factors import positive
from autoshard.runtime.operations.experts import experts_op
from autoshard.runtime.operations.loss import cross_entropy_op

Lead = tuple[int, ...]
"""lengths of the leading dims that rows were flattened from"""

EXPERTS = experts_op._opoverload
_LOSSES = {aten.cross_entropy_loss.default: cross_entropy_op}
"""loss of [rows, classes] → the same loss of [..., classes]"""
_BESIDE = {EXPERTS: slice(1, 3), **dict.fromkeys(_LOSSES, slice(1, 2))}
"""ops that want unflattened rows → their operands that follow: ids and weights, labels"""
_SUMS = {aten.sum.default, aten.mean.default}
"""reductions over all elements, which shapes do not change"""
_BY_ROW = {aten.linear.default, aten.matmul.default, aten.layer_norm.default, aten.rms_norm.default}
"""ops of rows and a matrix, or weights of features"""
_LIKE = {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default}
_ELEMENTWISE = {*_LIKE, aten._to_copy.default, aten.detach.default, aten.dropout.default}
"""elementwise ops without torch's pointwise tag"""
_ALONG = frozenset(
    (
        "softmax.int log_softmax.int topk.default sum.dim_IntList mean.dim amax.default argmax.default cumsum.default "
        "gather.default scatter.src scatter.value sort.default argsort.default unsqueeze.default squeeze.dim logsumexp.default"
    ).split()
)
"""ops along dims of their first operand"""


def in_their_dims(graph: Graph) -> Graph:
    """``graph`` with row-wise ops on unflattened rows where experts, losses, reshapes want it."""
    rows = _Rows(graph)
    wanted = rows.kept()
    return remove_dead(rows.written(wanted)) if wanted else graph


class _Rows:
    """Finds flat rows, their leading dims, and the ops that can run on unflattened ones."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.leads: dict[str, Lead] = {}
        self.starts: dict[str, str] = {}
        """flattened value → source of its reshape, whose trailing dims may differ"""
        self.made: dict[str, Node] = {}
        """node name → the node on unflattened rows"""
        self.ends: set[str] = set()
        """names of reshapes that restore the leading dims"""
        for node in graph.nodes:
            if (lead := self._flattened(node)) is not None:
                self.leads[node.outputs[0]] = lead
                self.starts[node.outputs[0]] = node.inputs[0]
            elif (lead := self._lead(node)) is not None and (made := self._apart(node, lead)) is not None:
                self.made[node.name] = made
                self.leads |= dict.fromkeys((name for name in node.outputs if graph.shape(name)), lead)
            elif lead is not None and self._is_back(node, lead):
                self.ends.add(node.name)

    def _flattened(self, node: Node) -> Lead | None:
        """The leading dims that reshape ``node`` merges into one."""
        if node.op is not aten.reshape.default or len(node.inputs) != 1:
            return None
        before, after = (self.graph.types[name] for name in (*node.inputs, *node.outputs))
        if before.unknown or not after.shape:
            return None
        same = len(before.shape) - len(after.shape) + 1
        leads = (before.shape[:count] for count in (same, *range(2, len(before.shape) + 1)) if count > 1)
        several = (lead for lead in leads if len([n for n in lead if n != 1]) > 1)
        return next((lead for lead in several if math.prod(lead) == after.shape[0]), None)

    def _lead(self, node: Node) -> Lead | None:
        """The common leading dims of the rows that ``node`` reads."""
        found = {self.leads[name] for name in node.inputs if name in self.leads}
        return found.pop() if len(found) == 1 else None

    def _is_back(self, node: Node, lead: Lead) -> bool:
        if node.op is not aten.reshape.default or len(node.inputs) != 1:
            return False
        return self.graph.shape(node.outputs[0]) == (*lead, *self.graph.shape(node.inputs[0])[1:])

    def _apart(self, node: Node, lead: Lead) -> Node | None:
        """``node`` on unflattened rows, if it works row by row; else None."""
        graph, rows = self.graph, math.prod(lead)
        types = [graph.types[name] for name in (*node.inputs, *node.outputs)]
        made = [graph.types[name] for name in node.outputs]
        if node.order or not made or any(t.unknown or t.permuted for t in types):
            return None
        if node.op in _SUMS:
            return node
        if any(t.shape[:1] != (rows,) for t in made) and node.op not in _LOSSES:
            return None
        if node.op in _BESIDE:  # its other operands of rows get reshaped
            weights = node.inputs[_BESIDE[node.op].stop :]
            apart = node.inputs[0] in self.leads and self.leads.keys().isdisjoint(weights)
            return replace(node, op=_LOSSES.get(node.op, node.op)) if apart else None
        if node.op in _BY_ROW:
            matrices = all(name not in self.leads and len(graph.shape(name)) < 3 for name in node.inputs[1:])
            return node if matrices and node.inputs[0] in self.leads else None
        if torch.Tag.pointwise in node.op.tags or node.op in _ELEMENTWISE:
            return node if self._is_aligned(node) else None
        first, *others = node.inputs
        if first not in self.leads or not all(name in self.leads for name in others):
            return None
        shape, (result, *_) = graph.shape(first), (t.shape for t in made)
        if node.op is aten.reshape.default and not others:
            return replace(node, args=(node.args[0], [*lead, *result[1:]]))
        if node.op is aten.expand.default and len(result) == len(shape) and not others:
            return replace(node, args=(node.args[0], [*lead, *result[1:]]), kwargs={})
        return _along(node, len(shape), len(lead) - 1)

    def _is_aligned(self, node: Node) -> bool:
        """Whether operands other than rows are broadcast along the dim of rows."""
        rank = len(self.graph.shape(node.outputs[0]))
        shapes = {name: self.graph.shape(name) for name in node.inputs}
        return all(
            len(shape) == rank if name in self.leads else len(shape) < rank or (len(shape) == rank and shape[0] == 1)
            for name, shape in shapes.items()
        )

    def kept(self) -> set[str]:
        """Names of nodes connected by rows to experts, losses or restoring reshapes."""
        by_name = {node.name: node for node in self.graph.nodes}
        back = {by_name[name].inputs[0] for name in self.ends}
        open_ = [n for n in self.made if by_name[n].op in _BESIDE or not back.isdisjoint(by_name[n].outputs)]
        found = set(open_)
        while open_:
            for value in self._shared(by_name[open_.pop()]):
                producer = self.graph.producers.get(value)
                near = [*self.graph.uses[value], *([producer] if producer is not None else [])]
                new = {n.name for n in near if n.name in self.made} - found
                found |= new
                open_ += new
        return found

    def _shared(self, node: Node) -> Iterator[str]:
        return (name for name in (*node.inputs, *node.outputs) if name in self.leads)

    def written(self, wanted: set[str]) -> Graph:
        """The graph with ``wanted`` nodes on unflattened rows; the others read them flattened."""
        graph, nodes, types = self.graph, list[Node](), dict(self.graph.types)
        apart = dict[str, str]()
        """flat value → the unflattened one"""
        names = dict[str, str]()
        """value → its replacement in nodes that are not wanted"""
        for node in graph.nodes:
            (out, *_), source = node.outputs or ("",), node.inputs[0] if node.inputs else ""
            if node.name in wanted:
                for name in node.inputs[_BESIDE[node.op]] if node.op in _BESIDE else ():
                    if name not in apart:
                        of, apart[name] = graph.types[name], f"{name}_rows"
                        types[apart[name]] = replace(of, shape=(*self.leads[source], *of.shape[1:]))
                        nodes.append(_reshaped(node, names.get(name, name), apart[name], types))
                nodes.append(_renamed(self.made[node.name], names | apart))
                for name in self.leads.keys() & node.outputs:
                    of = graph.types[name]
                    types[name] = replace(of, shape=(*self.leads[name], *of.shape[1:]))
                    apart[name] = name
                    if self._is_read_flat(name, wanted):
                        names[name], types[f"{name}_flat"] = f"{name}_flat", of
                        nodes.append(_reshaped(node, name, f"{name}_flat", types))
            elif node.name in self.ends and source in apart:
                names[out] = apart[source]
            else:
                nodes.append(_renamed(node, names))
                if out in self.starts:
                    shape = (*self.leads[out], *types[out].shape[1:])
                    apart[out] = names.get(source, source)
                    if types[source].shape != shape:
                        types[f"{out}_rows"] = replace(types[out], shape=shape)
                        nodes.append(_reshaped(node, apart[out], f"{out}_rows", types))
                        apart[out] = f"{out}_rows"
        given = replace(graph, nodes=()).renamed(names)
        return replace(given, nodes=tuple(nodes), types=types)

    def _is_read_flat(self, name: str, wanted: set[str]) -> bool:
        readers = self.graph.uses[name]
        return name in self.graph.returned or any(n.name not in wanted and n.name not in self.ends for n in readers)


def _renamed(node: Node, names: Mapping[str, str]) -> Node:
    found: Node = map_refs(node, lambda ref: Ref(names.get(ref.name, ref.name)))
    return found


def _reshaped(node: Node, name: str, made: str, types: Mapping[str, TensorType]) -> Node:
    """A reshape of ``name`` to ``made``, with the metadata of ``node``."""
    args = (Ref(name), list(types[made].shape))
    return replace(node, name=made, op=aten.reshape.default, args=args, kwargs={}, outputs=(made,), output_slots=(0,))


def _along(node: Node, rank: int, more: int) -> Node | None:
    """``node`` with its dims shifted by ``more`` leading dims; None if it acts along rows."""
    if str(node.op).removeprefix("aten.") not in _ALONG:
        return None
    given = node.argument("dim")
    dims = given if isinstance(given, list | tuple) else [given]
    rank += node.op is aten.unsqueeze.default
    if not dims or any(not isinstance(d, int) or positive(d, rank) == 0 for d in dims):
        return None
    moved: list[Any] = [d if d < 0 else d + more for d in dims]
    if moved == list(dims):
        return node
    args, kwargs = node.with_arguments(dim=moved if isinstance(given, list | tuple) else moved[0])
    return replace(node, args=args, kwargs=kwargs)

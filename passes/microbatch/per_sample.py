"""Graph rewrites to per-sample operations: fills by size, indexing by sample number as gather."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from autoshard.aten import aten
from autoshard.passes.capture.translate.canonicalize import remove_dead
from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType

_SIZED_FILLS: dict[Any, Any] = {
    aten.zeros_like.default: aten.zeros.default,
    aten.new_zeros.default: aten.zeros.default,
    aten.ones_like.default: aten.ones.default,
    aten.new_ones.default: aten.ones.default,
    aten.full_like.default: aten.full.default,
    aten.new_full.default: aten.full.default,
}
"""fill like an operand → fill by size"""


def fills_by_size(graph: Graph) -> Graph:
    """``graph`` with fills by size, where no length is unknown."""
    nodes = tuple(_without_template(node, graph) for node in graph.nodes)
    return graph if nodes == graph.nodes else remove_dead(replace(graph, nodes=nodes))


def _without_template(node: Node, graph: Graph) -> Node:
    if node.op not in _SIZED_FILLS:
        return node
    type_ = graph.types[node.outputs[0]]
    if type_.unknown:
        return node
    value = [node.argument("fill_value")] if _SIZED_FILLS[node.op] is aten.full.default else []
    args = ([*type_.shape], *value)
    return replace(node, op=_SIZED_FILLS[node.op], args=args, kwargs={"dtype": type_.dtype})


_ARANGE_ARGUMENTS = {
    aten.arange.default: ("end",),
    aten.arange.start: ("start", "end"),
    aten.arange.start_step: ("start", "end"),
}
"""op → its arguments; as many results as samples imply step 1"""
_COLUMN_OPS = {aten.reshape.default, aten.unsqueeze.default}
"""ops that may make a column of the numbers"""


def indexing_as_gather(graph: Graph) -> Graph:
    """``graph`` with such an ``index`` as a ``gather`` along dim 1."""
    types = dict(graph.types)
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes += _gather_nodes(node, graph, types) if _is_by_sample(node, graph) else (node,)
    return graph if len(nodes) == len(graph.nodes) else remove_dead(replace(graph, nodes=tuple(nodes), types=types))


def _is_by_sample(node: Node, graph: Graph) -> bool:
    if node.op is not aten.index.Tensor or len(node.argument("indices")) != 2:
        return False
    source, (numbers, positions) = graph.shape(node.args[0]), node.argument("indices")
    if numbers is None or positions is None or graph.types[positions.name].dtype not in (torch.int32, torch.int64):
        return False
    samples, column = source[0], graph.shape(numbers)
    return (
        column == (samples, *(1,) * (len(column) - 1))
        and len(column) == len(graph.shape(positions))
        and graph.shape(positions)[0] == samples
        and _is_sample_range(numbers, samples, graph)
    )


def _is_sample_range(numbers: Ref, samples: int, graph: Graph) -> bool:
    """Whether ``numbers`` is arange(samples)."""
    node = graph.producers.get(numbers.name)
    while node is not None and node.op in _COLUMN_OPS:
        node = graph.producers.get(node.inputs[0])
    if node is None or node.op not in _ARANGE_ARGUMENTS:
        return False
    given = {name: node.argument(name) for name in _ARANGE_ARGUMENTS[node.op]}
    return graph.types[node.outputs[0]].shape == (samples,) and {"start": 0, **given} == {"start": 0, "end": samples}


def _gather_nodes(node: Node, graph: Graph, types: dict[str, TensorType]) -> Iterator[Node]:
    source, (_, positions) = node.args[0], node.argument("indices")
    (out,), (samples, length, *rest) = node.outputs, graph.shape(source)
    index, many = types[positions.name], math.prod(graph.shape(positions)[1:])

    def made(name: str, op: Any, type_: TensorType, *args: Any, **kwargs: Any) -> Iterator[Node]:
        types[f"{out}_{name}"] = type_
        yield replace(node, name=f"{node.name}_{name}", op=op, args=args, kwargs=kwargs, outputs=(f"{out}_{name}",))

    def value(name: str) -> Ref:
        return Ref(f"{out}_{name}")

    column, wide = (samples, many, *(1 for _ in rest)), (samples, many, *rest)
    # Negative positions count from the end; others out of range still fail.
    if index.dtype != torch.int64:
        yield from made(
            "long", aten._to_copy.default, index := replace(index, dtype=torch.int64), positions, dtype=torch.int64
        )
        positions = value("long")
    yield from made("negative", aten.lt.Scalar, replace(index, dtype=torch.bool), positions, 0)
    yield from made("from_end", aten.add.Tensor, index, positions, length)
    yield from made("at", aten.where.self, index, value("negative"), value("from_end"), positions)
    yield from made("column", aten.reshape.default, replace(index, shape=column), value("at"), list(column))
    yield from made("wide", aten.expand.default, replace(index, shape=wide), value("column"), list(wide))
    yield from made("gathered", aten.gather.default, replace(types[out], shape=wide), source, 1, value("wide"))
    yield replace(node, op=aten.reshape.default, args=(value("gathered"), list(graph.shape(out))), kwargs={})

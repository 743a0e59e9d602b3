"""Graph rewrites to per-sample operations: fills by size, indexing by sample number as gather."""

from __future__ import annotations

import math
from typing import Any

import torch

from autoshard.aten import aten
from autoshard.passes.capture.translate.canonicalize import remove_dead
from autoshard.passes.ir.graph import Graph, Node, Ref
from autoshard.passes.ir.patterns import behind
from autoshard.passes.ir.rewrite import NodeBuilder, rewrite

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

    def by_size(build: NodeBuilder, node: Node) -> bool:
        fill, type_ = _SIZED_FILLS.get(node.op), graph.types[node.outputs[0]] if node.outputs else None
        if fill is None or type_ is None or type_.unknown:
            return False
        value = [node.argument("fill_value")] if fill is aten.full.default else []
        build.finish(fill, [*type_.shape], *value, dtype=type_.dtype)
        return True

    return _live(graph, rewrite(graph, by_size))


def _live(graph: Graph, made: Graph) -> Graph:
    return graph if made is graph else remove_dead(made)


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

    def gathered(build: NodeBuilder, node: Node) -> bool:
        found = _is_by_sample(node, graph)
        if found:
            _build_gather(build, node)
        return found

    return _live(graph, rewrite(graph, gathered))


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
    node = graph.producers.get(behind(numbers, _COLUMN_OPS, graph).name)
    if node is None or node.op not in _ARANGE_ARGUMENTS:
        return False
    given = {name: node.argument(name) for name in _ARANGE_ARGUMENTS[node.op]}
    return graph.types[node.outputs[0]].shape == (samples,) and {"start": 0, **given} == {"start": 0, "end": samples}


def _build_gather(build: NodeBuilder, node: Node) -> None:
    source, (_, at) = node.args[0], node.argument("indices")
    (out,), (samples, length, *rest), many = node.outputs, build.shape(source), math.prod(build.shape(at)[1:])
    # Negative positions count from the end; others out of range still fail.
    if build.types[at.name].dtype != torch.int64:
        at = build(aten._to_copy.default, at, dtype=torch.int64, name=f"{out}_long")
    negative = build(aten.lt.Scalar, at, 0, name=f"{out}_negative")
    from_end = build(aten.add.Tensor, at, length, name=f"{out}_from_end")
    at = build(aten.where.self, negative, from_end, at, name=f"{out}_at")
    column = build(aten.reshape.default, at, [samples, many, *(1 for _ in rest)], name=f"{out}_column")
    wide = build(aten.expand.default, column, [samples, many, *rest], name=f"{out}_wide")
    gathered = build(aten.gather.default, source, 1, wide, name=f"{out}_gathered")
    build.finish(aten.reshape.default, gathered, list(build.shape(Ref(out))))

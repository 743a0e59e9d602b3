"""Sort, top-k, argmax: over a sharded dim the ranks gather their best candidates."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from autoshard.aten import aten
from autoshard.layout import I
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.program import Call, Internal, spell
from autoshard.passes.rules.base import NOTHING, Facts, Rule, Site, SpaceOf, indices, rules
from autoshard.passes.rules.factors import Dims, Factors, Space, numbered, positive, sizes_of

Strategies = SpaceOf


def _along(distributed: bool) -> Strategies:
    """Other dims are kept; over a sharded ordered dim the result is I on every rank."""

    def strategies(node: Node, graph: Graph) -> Space:
        (shape,) = graph.shapes(node.inputs)
        if node.argument("dim") is None:
            return _flat(node, graph)
        dim = positive(node.argument("dim"), max(1, len(shape)))
        kept = numbered(shape, (dim,))

        def result(name: str) -> Dims:
            return kept if len(graph.types[name].shape) == len(shape) else kept[:dim] + kept[dim + 1 :]

        source = numbered(shape) if distributed else kept
        outputs = tuple(map(result, node.outputs))
        return Factors((source,), outputs, sizes_of(shape), reduced={f"d{dim}": I})

    return strategies


def _flat(node: Node, graph: Graph) -> Factors:
    """``argmax()`` over all elements; every rank needs some, flat indices need all lengths."""
    (shape,) = graph.shapes(node.inputs)
    sizes = {} if graph.types[node.inputs[0]].unknown else sizes_of(shape)
    result: Dims = (None,) * len(graph.types[node.outputs[0]].shape)
    whole = dict.fromkeys(sizes, I)
    return Factors((numbered(shape),), (result,), sizes, reduced=whole, filled=frozenset(sizes))


def _local_topk(site: Site) -> Call:
    dim, axes = site.cut_dim
    if not axes:
        return site.unchanged()
    node = site.node
    extra = {} if node.argument("largest") else {"largest": False}
    size = site.in_type(0).shape[dim]
    return Call("topk", (node.argument("self"), node.argument("k"), dim, size, spell(axes)), extra)


def _local_extreme(function: str) -> Callable[[Site], Call]:
    """``max.dim`` and its kin, and ``argmax`` with or without a dim."""

    def local(site: Site) -> Call:
        node, shape = site.node, site.in_type(0).shape
        x = node.argument("self")
        if node.argument("dim") is None:
            cuts = [(d, spell(a)) for d in range(len(shape)) if (a := site.inputs[0].axes_of(d))]
            if not cuts:
                return site.unchanged()
            found = Call(f"flat_{function}", (x, list(shape), cuts, spell(_all_axes(site))), {})
            kept = len(site.out_type().shape)
            return Call(aten.view.default, (found, [1] * kept), {}) if kept else found
        dim, axes = site.cut_dim
        if not axes:
            return site.unchanged()
        extra: dict[str, Any] = {"keepdim": True} if node.argument("keepdim") else {}
        return Call(function, (x, dim, shape[dim], spell(axes)), extra)

    return local


def _all_axes(site: Site) -> tuple[str, ...]:
    layout = site.inputs[0]
    return tuple(a for d in range(len(site.in_type(0).shape)) for a in layout.axes_of(d))


def _collectives(site: Site) -> tuple[Internal, ...]:
    """All-gathers of candidates and their indices; nothing in the backward."""
    node, local = site.node, site.local_shape("self")
    if node.argument("dim") is None:
        axes, each = _all_axes(site), 1
    else:
        dim, axes = site.cut_dim
        rows = math.prod(n for d, n in enumerate(local) if d != dim)
        each = rows * (min(node.argument("k"), local[dim]) if node.op is aten.topk.default and local else 1)
    values = site.gathered(axes, each * site.in_type(0).dtype.itemsize, "candidates", "I")
    return values + site.gathered(axes, each * torch.int64.itemsize, "their indices", "I")


_NOTE = "... -> ..., dim whole"

EXACT = Facts("result1", indices, rounding="exact")
PICKED = Facts("result1", indices)

_best: Callable[..., list[Rule]] = partial(rules, notation=_NOTE, collectives=_collectives, sized=False)

RULES: tuple[Rule, ...] = (
    *_best("topk.default", _along(True), _local_topk, facts=EXACT),
    *_best("max.dim", _along(True), _local_extreme("max_dim"), facts=PICKED),
    *_best("min.dim", _along(True), _local_extreme("min_dim"), facts=PICKED),
    *_best("argmax.default", _along(True), _local_extreme("argmax"), facts=NOTHING),
    *_best("argmin.default", _along(True), _local_extreme("argmin"), facts=NOTHING),
    *rules("sort.default sort.stable", _along(False), notation="dim whole", facts=EXACT),
    *rules("kthvalue.default mode.default median.dim nanmedian.dim", _along(False), notation="dim whole", facts=PICKED),
    *rules("argsort.default argsort.stable", _along(False), notation="dim whole", facts=NOTHING),
)

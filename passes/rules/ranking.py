"""Ops that order a dim. Where they want the best few of it, it may be cut: the ranks gather their candidates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from autoshard.layout import I
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.program import Call, Internal
from autoshard.passes.rules.base import Facts, Rule, Site, indices
from autoshard.passes.rules.factors import Dims, Factors, argument, input_shapes, numbered, positive, sizes_of
from autoshard.passes.rules.named import gathered, local_shape, ops, spell, unchanged

aten = torch.ops.aten

Strategies = Callable[[Node, Graph], tuple[Strategy, ...]]


def _along(distributed: bool) -> Strategies:
    """Results keep the other dims; without ``keepdim`` the ordered one is gone. Where that is cut, they are whole."""

    def strategies(node: Node, graph: Graph) -> tuple[Strategy, ...]:
        (shape,) = input_shapes(node, graph)
        if argument(node, "dim") is None:
            return _flat(node, graph)
        dim = positive(argument(node, "dim"), max(1, len(shape)))
        kept = numbered(shape, (dim,))

        def result(name: str) -> Dims:
            return kept if len(graph.types[name].shape) == len(shape) else kept[:dim] + kept[dim + 1 :]

        source = numbered(shape) if distributed else kept
        outputs = tuple(map(result, node.outputs))
        return Factors((source,), outputs, sizes_of(shape), reduced={f"d{dim}": I}).strategies(node, graph)

    return strategies


def _flat(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """``argmax()`` of all elements, of which every rank needs some; flat indices need every length."""
    (shape,) = input_shapes(node, graph)
    sizes = {} if graph.types[node.inputs[0]].unknown else sizes_of(shape)
    result: Dims = (None,) * len(graph.types[node.outputs[0]].shape)
    whole = dict.fromkeys(sizes, I)
    return Factors((numbered(shape),), (result,), sizes, reduced=whole, filled=frozenset(sizes)).strategies(node, graph)


def _cut(site: Site) -> tuple[int, tuple[str, ...]]:
    """The ordered dim, and the axes that cut it."""
    shape = site.in_type(0).shape
    dim = positive(argument(site.node, "dim"), max(1, len(shape)))
    return dim, site.inputs[0].axes_of(dim) if shape else ()


def _local_topk(site: Site) -> Call:
    dim, axes = _cut(site)
    if not axes:
        return unchanged(site)
    node = site.node
    extra = {} if argument(node, "largest") else {"largest": False}
    size = site.in_type(0).shape[dim]
    return Call("topk", (argument(node, "self"), argument(node, "k"), dim, size, spell(axes)), extra)


def _local_extreme(function: str) -> Callable[[Site], Call]:
    """``max.dim`` and its like, and ``argmax`` with or without a dim."""

    def local(site: Site) -> Call:
        node, shape = site.node, site.in_type(0).shape
        x = argument(node, "self")
        if argument(node, "dim") is None:
            cuts = [(d, spell(a)) for d in range(len(shape)) if (a := site.inputs[0].axes_of(d))]
            if not cuts:
                return unchanged(site)
            found = Call(f"flat_{function}", (x, list(shape), cuts, spell(_all_axes(site))), {})
            kept = len(site.out_type().shape)
            return Call(aten.view.default, (found, [1] * kept), {}) if kept else found
        dim, axes = _cut(site)
        if not axes:
            return unchanged(site)
        extra: dict[str, Any] = {"keepdim": True} if argument(node, "keepdim") else {}
        return Call(function, (x, dim, shape[dim], spell(axes)), extra)

    return local


def _all_axes(site: Site) -> tuple[str, ...]:
    layout = site.inputs[0]
    return tuple(a for d in range(len(site.in_type(0).shape)) for a in layout.axes_of(d))


def _collectives(site: Site) -> tuple[Internal, ...]:
    """Candidates and their indices; nothing backward."""
    node, local = site.node, local_shape(site, "self")
    if argument(node, "dim") is None:
        axes, each = _all_axes(site), 1
    else:
        dim, axes = _cut(site)
        rows = math.prod(n for d, n in enumerate(local) if d != dim)
        each = rows * (min(argument(node, "k"), local[dim]) if node.op is aten.topk.default and local else 1)
    values = gathered(site, axes, each * site.in_type(0).dtype.itemsize, "candidates", "I")
    return values + gathered(site, axes, each * torch.int64.itemsize, "their indices", "I")


_NOTE = "... -> ..., dim whole"

EXACT = Facts("result1", indices, rounding="exact")
PICKED = Facts("result1", indices)
PLACES = Facts(saves="")

RULES: tuple[Rule, ...] = (
    Rule(aten.topk.default, _along(True), _local_topk, None, _NOTE, _collectives, sized=False, facts=EXACT),
    *(
        Rule(op, _along(True), _local_extreme(name), None, _NOTE, _collectives, sized=False, facts=facts)
        for name, op, facts in (
            ("max_dim", aten.max.dim, PICKED),
            ("min_dim", aten.min.dim, PICKED),
            ("argmax", aten.argmax.default, PLACES),
            ("argmin", aten.argmin.default, PLACES),
        )
    ),
    *(
        Rule(op, _along(False), notation="dim whole", facts=facts)
        for names, facts in (
            ("sort.default sort.stable", EXACT),
            ("kthvalue.default mode.default median.dim nanmedian.dim", PICKED),
            ("argsort.default argsort.stable", PLACES),
        )
        for op in ops(names)
    ),
)

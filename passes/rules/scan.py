"""Scans: every dim is a factor; along the scanned one the ranks gather their totals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.program import Call, Internal
from autoshard.passes.rules.base import Facts, Rule, Site, indices
from autoshard.passes.rules.factors import Factors, argument, numbered, positive, sizes_of
from autoshard.passes.rules.named import gathered, local_shape, spell, unchanged, wide_bytes

aten = torch.ops.aten


def _scan(linear: bool) -> Callable[[Node, Graph], tuple[Strategy, ...]]:
    def strategies(node: Node, graph: Graph) -> tuple[Strategy, ...]:
        shape = graph.types[node.inputs[0]].shape
        dims = numbered(shape)
        groups = ((0,),) if linear else ()
        return Factors((dims,), (dims,) * len(node.outputs), sizes_of(shape), linear=groups).strategies(node, graph)

    return strategies


def _local(function: str, positions: bool) -> Callable[[Site], Call]:
    """The op itself where the scanned dim is whole. ``positions``: whether the function also gives indices."""

    def local(site: Site) -> Call:
        dim, axes = _cut(site)
        if not axes:
            return unchanged(site)
        x = argument(site.node, "self")
        if positions:
            return Call(function, (x, dim, site.in_type(0).shape[dim], spell(axes)), {})
        dtype = site.graph.types[site.node.outputs[0]].dtype
        extra: dict[str, Any] = {} if dtype == site.in_type(0).dtype else {"dtype": dtype}
        return Call(function, (x, dim, spell(axes)), extra)

    return local


def _cut(site: Site) -> tuple[int, tuple[str, ...]]:
    """The scanned dim, and the axes that cut it."""
    shape = site.in_type(0).shape
    dim = positive(argument(site.node, "dim"), max(1, len(shape)))
    return dim, site.inputs[0].axes_of(dim) if shape else ()


def _collectives(positions: bool) -> Callable[[Site], tuple[Internal, ...]]:
    def collectives(site: Site) -> tuple[Internal, ...]:
        dim, axes = _cut(site)
        dtype = site.out_type().dtype
        rows = math.prod(n for d, n in enumerate(local_shape(site, "self")) if d != dim)
        if not positions:
            return gathered(site, axes, rows * wide_bytes(dtype), "totals", "R")
        found = gathered(site, axes, rows * site.in_type(0).dtype.itemsize, "last values", "R")
        indices = gathered(site, axes, rows * torch.int64.itemsize, "their indices", "R")
        return (*found[:1], *indices[:1], *found[1:])

    return collectives


def _rule(op: torch._ops.OpOverload, linear: bool = False, positions: bool = False) -> Rule:
    name = op._schema.name.removeprefix("aten::")
    saves = "" if linear else "self result1" if positions else "self result"
    return Rule(
        op,
        _scan(linear),
        _local(name, positions),
        None,
        "... -> ...",
        _collectives(positions),
        sized=False,
        facts=Facts(saves, indices if positions else None),
    )


RULES: tuple[Rule, ...] = (
    _rule(aten.cumsum.default, linear=True),
    _rule(aten.cumprod.default),
    _rule(aten.logcumsumexp.default),
    _rule(aten.cummax.default, positions=True),
    _rule(aten.cummin.default, positions=True),
)

"""Counting elements by value: every rank counts what it holds, and counts add up."""

from __future__ import annotations

import torch

from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.program import Call, Internal
from autoshard.passes.rules.base import Facts, Rule, Site, stating
from autoshard.passes.rules.factors import Factors, argument, input_shapes, numbered, sizes_of
from autoshard.passes.rules.named import reductions, spell, unchanged

aten = torch.ops.aten


def _histc(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """Counts per bin, between given limits: every element counts by itself."""
    (shape,) = input_shapes(node, graph)
    ranged = argument(node, "min") != argument(node, "max")
    return Factors((numbered(shape, () if ranged else range(len(shape))),), ((None,),), sizes_of(shape)).strategies(
        node, graph
    )


def _bincount(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """Counts, or sums of weights, per value."""
    shapes = input_shapes(node, graph)
    linear = ((1,),) if len(shapes) == 2 else ()
    return Factors((("d0",),) * len(shapes), ((None,),), sizes_of(shapes[0]), linear=linear).strategies(node, graph)


def _local_bincount(site: Site) -> Call:
    axes = site.inputs[0].axes_of(0)
    if not axes:
        return unchanged(site)
    x, weights, least = (argument(site.node, a) for a in ("self", "weights", "minlength"))
    return Call("bincount", (x, weights, least, spell(axes)), {})


def _bincount_collectives(site: Site) -> tuple[Internal, ...]:
    return reductions(site, site.inputs[0].axes_of(0), torch.int64.itemsize, ("largest value",), ())


RULES: tuple[Rule, ...] = stating(
    Facts(saves=""),
    (
        Rule(aten.histc.default, _histc, notation="counts summed"),
        Rule(aten.bincount.default, _bincount, _local_bincount, None, "n, n -> _", _bincount_collectives, sized=False),
    ),
)

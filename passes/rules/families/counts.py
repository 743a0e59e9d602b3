"""Counts by value (histc, bincount): each rank counts its shard, and counts are summed."""

from __future__ import annotations

import torch

from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.program import Call, Internal, spell
from autoshard.passes.rules.base import NOTHING, Rule, Site, rules
from autoshard.passes.rules.factors import Factors, numbered, sizes_of


def _histc(node: Node, graph: Graph) -> Factors:
    """Counts per bin within given limits."""
    (shape,) = graph.shapes(node.inputs)
    ranged = node.argument("min") != node.argument("max")
    return Factors((numbered(shape, () if ranged else range(len(shape))),), ((None,),), sizes_of(shape))


def _bincount(node: Node, graph: Graph) -> Factors:
    """Counts, or sums of weights, per integer value."""
    shapes = graph.shapes(node.inputs)
    linear = ((1,),) if len(shapes) == 2 else ()
    return Factors((("d0",),) * len(shapes), ((None,),), sizes_of(shapes[0]), linear=linear)


def _local_bincount(site: Site) -> Call:
    axes = site.inputs[0].axes_of(0)
    if not axes:
        return site.unchanged()
    x, weights, least = (site.node.argument(a) for a in ("self", "weights", "minlength"))
    return Call("bincount", (x, weights, least, spell(axes)), {})


def _bincount_collectives(site: Site) -> tuple[Internal, ...]:
    return site.reductions(site.inputs[0].axes_of(0), torch.int64.itemsize, ("largest value",), ())


RULES: tuple[Rule, ...] = (
    *rules("histc.default", _histc, None, "counts summed", facts=NOTHING),
    *rules(
        "bincount.default", _bincount, _local_bincount, "n, n -> _", _bincount_collectives, sized=False, facts=NOTHING
    ),
)

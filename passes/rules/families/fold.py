"""To and from zigzag order (:mod:`autoshard.runtime.attention.fold`): mirrored ranks swap.

Along the sequence it is sharded by as many ranks as the order has; each swaps half a chunk.
"""

from __future__ import annotations

import math

from autoshard.layout import Shard
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.program import Call, Internal, spell
from autoshard.passes.rules.base import Facts, Rule, Site
from autoshard.passes.rules.factors import Factors, Space, numbered, positive, sizes_of
from autoshard.runtime.attention.fold import folded_op, unfolded_op

ORDERS = FOLDED, UNFOLDED = folded_op._opoverload, unfolded_op._opoverload
SWAPPED = "swapped"
"""label of the strategy that shards the sequence"""


def _strategies(node: Node, graph: Graph) -> Space:
    (shape,) = graph.shapes(node.inputs)
    dim: int = positive(node.argument("dim"), len(shape))
    dims = numbered(shape, (dim,))
    others = Factors((dims,), (dims,), sizes_of(shape), linear=((0,),)).strategies(node, graph)
    cut, ranks = Shard(dim), node.argument("ranks")
    return (*others, Strategy(SWAPPED, (cut,), (cut,), shape[dim], divides=True, ranks=ranks))


def _local(site: Site) -> Call:
    node, axes = site.node, site.axes(SWAPPED)
    cut = {"axes": spell(axes)} if axes else {}
    return Call("folded" if node.op is FOLDED else "unfolded", node.args, cut)


def _collectives(site: Site) -> tuple[Internal, ...]:
    axes, (dim, _) = site.axes(SWAPPED), site.cut_dim
    if site.mesh.size_of(axes) == 1:
        return ()
    local = site.local_shape("x")
    half = local[dim] - local[dim] // 2
    size = float(math.prod(local) // local[dim] * half * site.in_type(0).dtype.itemsize)
    found = (Internal("permute", axes, size, "forward", "halves of chunks"),)
    return (*found, Internal("permute", axes, size, "backward", "halves of the gradient")) if site.grad else found


FACTS = Facts(saves="", rounding="exact")

RULES: tuple[Rule, ...] = tuple(
    Rule(op, _strategies, _local, notation="...", collectives=_collectives, facts=FACTS, named=named)
    for op, named in ((FOLDED, "folded"), (UNFOLDED, "unfolded"))
)

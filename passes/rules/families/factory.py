"""Tensor factories: any dim of the result can be sharded, no gradient flows."""

from __future__ import annotations

from autoshard.aten import aten
from autoshard.layout import I, P, Placement, R, Shard
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.program import Call, spell
from autoshard.passes.rules.base import NOTHING, Facts, Rule, Site, rules
from autoshard.passes.rules.factors import Factors, broadcast, numbered, sizes_of


def factory_strategies(node: Node, graph: Graph) -> Factors:
    """Every dim of the result is a factor; a tensor fill value is a scalar and broadcasts."""
    (shape,) = graph.shapes(node.outputs)
    dims = numbered(shape)
    inputs = tuple(broadcast(s, shape, dims) for s in graph.shapes(node.inputs))
    return Factors(inputs, (dims,), sizes_of(shape))


def _of_local_size(site: Site) -> Call:
    """The op with local sizes."""
    return site.unchanged(size=site.local_sizes(site.outputs[0], site.out_type().shape))


def _cut(site: Site) -> Call:
    """Values depend on positions: make the full tensor and keep this rank's chunk."""
    made = site.unchanged()
    for dim in range(len(site.out_type().shape)):
        axes = site.outputs[0].axes_of(dim)
        if axes:
            made = Call("slice", (made, dim, spell(axes)), {"of": "R"})
    return made


def like_strategies(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """``zeros_like(x)``: only x's shape is used, so x may also be Partial."""
    (shape,) = graph.shapes(node.outputs)
    dims = numbered(shape)
    found = Factors((dims,), (dims,), sizes_of(shape)).strategies(node, graph)
    return (*found, Strategy("P(0)", (P,), (R,)))


def new_strategies(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """``x.new_zeros(size)``: only x's dtype and device are used, so any placement pair works."""
    (source,), (shape,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    held: list[tuple[Placement, int | None]] = [(I, None), (R, None), (P, None)]
    held += [(Shard(d), n) for d, n in enumerate(source) if int(n) > 1]
    found = []
    for p, limit in held:
        found.append(Strategy("I" if p == I else str(p), (p,), (I if p == I else R,), limit))
        for d, n in enumerate(shape):
            if int(n) > 1:
                size = min(n, limit or n, key=int)
                found.append(Strategy(f"d{d} of {p}", (p,), (Shard(d),), size, divides=True, joins="results"))
    return tuple(found)


_SIZED = "zeros.default ones.default empty.memory_format full.default"
_NEW = "new_zeros.default new_ones.default new_empty.default new_full.default"
_POSITIONAL = (
    "arange.default arange.start arange.start_step linspace.default logspace.default eye.default eye.m "
    "tril_indices.default triu_indices.default range.default range.step"
)
_LIKE = "zeros_like.default ones_like.default full_like.default"

FILLED = frozenset(
    getattr(aten, name).default for name in "new_zeros new_ones new_full zeros_like ones_like full_like".split()
)
"""ops whose values do not depend on operands, not even on the one that gives the shape"""

ZEROS = Facts(saves="", rounding="exact")

RULES: tuple[Rule, ...] = (
    *rules(_SIZED, factory_strategies, _of_local_size, "-> any dim", facts=NOTHING),
    *rules(_NEW, new_strategies, _of_local_size, "-> any dim", facts=NOTHING),
    *rules(_POSITIONAL, factory_strategies, _cut, "-> any dim", facts=NOTHING),
    *rules(_LIKE, like_strategies, notation="... -> ...", facts=ZEROS),
    *rules("empty_like.default", like_strategies, notation="... -> ...", facts=NOTHING),
    *rules("scalar_tensor.default", factory_strategies, notation="->", facts=NOTHING),
)

"""Ops that make a tensor of a given size: any dim can be made sharded, and no gradient flows."""

from __future__ import annotations

import torch

from autoshard.layout import I, P, Placement, R, Shard
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.program import Call
from autoshard.passes.rules.base import Facts, LocalFormOf, Rule, Site
from autoshard.passes.rules.factors import (
    Factors,
    broadcast,
    input_shapes,
    numbered,
    output_shapes,
    sizes_of,
    with_arguments,
)
from autoshard.passes.rules.named import spell

aten = torch.ops.aten


def factory_strategies(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """Every dim of the result is a factor; a tensor fill value broadcasts (it is a scalar)."""
    (shape,) = output_shapes(node, graph)
    dims = numbered(shape)
    inputs = tuple(broadcast(s, shape, dims) for s in input_shapes(node, graph))
    return Factors(inputs, (dims,), sizes_of(shape)).strategies(node, graph)


def local_sizes(argument: str) -> LocalFormOf:
    """A local form that replaces the size list ``argument`` by local lengths."""

    def local(site: Site) -> Call:
        sizes = [site.local(site.outputs[0], d, n) for d, n in enumerate(site.out_type().shape)]
        args, kwargs = with_arguments(site.node, **{argument: sizes})
        return Call(site.node.op, args, kwargs)

    return local


def _cut(site: Site) -> Call:
    """Values that depend on the position: make all of them, keep this rank's chunk."""
    made = Call(site.node.op, site.node.args, site.node.kwargs)
    for dim in range(len(site.out_type().shape)):
        axes = site.outputs[0].axes_of(dim)
        if axes:
            made = Call("slice", (made, dim, spell(axes)), {"of": "R"})
    return made


def like_strategies(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """``zeros_like(x)``: x gives the shape only, so also summands of x do."""
    (shape,) = output_shapes(node, graph)
    dims = numbered(shape)
    found = Factors((dims,), (dims,), sizes_of(shape)).strategies(node, graph)
    return (*found, Strategy("P(0)", (P,), (R,)))


def new_strategies(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """``x.new_zeros(size)``: x gives dtype and device only, so any placement of x goes with any of the result."""
    (source,), (shape,) = input_shapes(node, graph), output_shapes(node, graph)
    held: list[tuple[Placement, int | None]] = [(I, None), (R, None), (P, None)]
    held += [(Shard(d), n) for d, n in enumerate(source) if int(n) > 1]
    found = []
    for p, limit in held:
        found.append(Strategy("I" if p == I else str(p), (p,), (I if p == I else R,), limit))
        for d, n in enumerate(shape):
            if int(n) > 1:
                found.append(Strategy(f"d{d} of {p}", (p,), (Shard(d),), min(n, limit or n, key=int), divides=True))
    return tuple(found)


_SIZED = {
    "zeros.default": "size",
    "ones.default": "size",
    "empty.memory_format": "size",
    "full.default": "size",
    "new_zeros.default": "size",
    "new_ones.default": "size",
    "new_empty.default": "size",
    "new_full.default": "size",
}
_POSITIONAL = (
    "arange.default arange.start arange.start_step linspace.default logspace.default eye.default eye.m "
    "tril_indices.default triu_indices.default range.default range.step"
)
_LIKE = "zeros_like.default ones_like.default full_like.default"


def _op(name: str) -> torch._ops.OpOverload:
    packet, overload = name.split(".")
    found: torch._ops.OpOverload = getattr(getattr(aten, packet), overload)
    return found


ZEROS = Facts(saves="", rounding="exact")
NUMBERS = Facts(saves="")

RULES: tuple[Rule, ...] = (
    *(
        Rule(
            _op(name),
            new_strategies if name.startswith("new_") else factory_strategies,
            local_sizes(argument),
            notation="-> any dim",
            facts=NUMBERS,
        )
        for name, argument in _SIZED.items()
    ),
    *(Rule(_op(name), factory_strategies, _cut, notation="-> any dim", facts=NUMBERS) for name in _POSITIONAL.split()),
    *(Rule(_op(name), like_strategies, notation="... -> ...", facts=ZEROS) for name in _LIKE.split()),
    Rule(aten.empty_like.default, like_strategies, notation="... -> ...", facts=NUMBERS),
    Rule(aten.scalar_tensor.default, factory_strategies, notation="->", facts=NUMBERS),
)

"""float32 islands in a float64 model, such as norms, rotary tables and losses that a library computes in float32.

Whoever trains in float64 compares digits, and float32 values that are rounded otherwise than on one device differ in
the eighth. So an island is cut only where the result is the same to the last bit, and runs on full tensors elsewhere:
there each op sees what it sees on one device. What counts beside the values is the order of dims in memory, which
sums and complex products follow, and the order in which gradients are added. Redistributions keep the former
(:func:`autoshard.runtime.communicator.in_order_of`) where chunks show it, :func:`fan_out` fixes the latter.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autoshard.layout import Invariant, Placement, Replicate, Shard
from autoshard.passes.cost import is_view
from autoshard.passes.ir import Graph, Node, Ref, TensorType, map_refs
from autoshard.passes.rules.base import Strategy
from autoshard.runtime.fan_out import FAN_OUT

SINGLE = (torch.float32, torch.complex64)
_ROUNDED = frozenset(
    "_to_copy to type_as clone contiguous add sub mul div neg abs sqrt rsqrt where masked_fill cat concatenate stack "
    "index index_select gather topk sort zeros_like ones_like full_like fan_out".split()
)
"""rounded correctly, or not at all. Kernels of exp, sin or sigmoid round otherwise in a vector than at its end"""
_SUMS = frozenset({"sum", "mean"})
_PRODUCTS = frozenset({"bmm", "matmul", "einsum", "scaled_dot_product_attention"})
LEAST = 2
"""positions on every rank: kernels take chunks that are empty, or one long, for row-major ones"""
_POWERS = (1, 2, 3)
"""exponents that are products, and in the derivative too"""


def exact(strategies: tuple[Strategy, ...], node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """Without those that could change the last bits of a float32 island in a float64 model, forward or backward.

    Neither values nor gradients are summed over ranks.
    """
    if not is_single_in_double(node, graph):
        return strategies
    types = [graph.types[n] for n in (*node.inputs, *node.outputs)]
    name = node.op._schema.name.rpartition(":")[2]
    product, may_cut = name in _PRODUCTS, _may_cut(name, node, graph)

    def is_exact(type_: TensorType, placement: Placement) -> bool:
        if type_.dtype not in SINGLE or isinstance(placement, Invariant):
            return True
        if isinstance(placement, Shard):
            return may_cut
        return isinstance(placement, Replicate) and not type_.grad

    def is_kept(strategy: Strategy) -> bool:
        placements = (*strategy.inputs, *strategy.outputs)
        if product and strategy.divides and not all(isinstance(p, Shard) for p in placements):
            return False  # only whole products are divided among ranks: a kernel's blocks follow the sizes
        return all(map(is_exact, types, placements))

    return tuple(replace(s, least=LEAST) for s in strategies if is_kept(s))


def is_single_in_double(node: Node, graph: Graph) -> bool:
    """Whether ``node`` computes in float32 while the model is float64."""
    return graph.is_double and any(graph.types[n].dtype in SINGLE for n in (*node.inputs, *node.outputs))


def _may_cut(name: str, node: Node, graph: Graph) -> bool:
    """Whether each element of ``node``'s results and gradients is computed alike, however many there are beside it."""
    types = [graph.types[n] for n in (*node.inputs, *node.outputs)]
    if any(t.dtype.is_complex for t in types) or _spreads(node, graph):
        return False
    if name in _PRODUCTS:  # products with vectors take other kernels
        return len(node.inputs) < 4 and all(n > 1 for t in types for n in t.shape[-2:])
    if name in _SUMS:  # along the last dim row by row, along others by blocks of columns
        operand, result = types[0], types[-1]
        kept = len(result.shape) if len(result.shape) < len(operand.shape) else len(operand.shape) - 1
        return not operand.permuted and operand.shape[:kept] == result.shape[:kept]
    if name == "pow":
        return len(node.inputs) == 1 and node.args[-1] in _POWERS
    return name in _ROUNDED or is_view(node.op)


def _spreads(node: Node, graph: Graph) -> bool:
    """Whether an operand with a gradient is broadcast, so that its gradient is a sum."""
    for out in node.outputs:
        shape = graph.types[out].shape
        for type_ in (graph.types[n] for n in node.inputs):
            padded = (1,) * (len(shape) - len(type_.shape)) + type_.shape
            if len(padded) != len(shape) or padded == shape or not type_.grad:
                continue
            if all(a in (1, n) for a, n in zip(padded, shape, strict=True)):
                return True
    return False


def fan_out(graph: Graph) -> Graph:
    """``graph`` in which a float32 value with three gradients or more has them added in the order of one device.

    autograd adds the last reader's first; where readers have other layouts, or ranks share one autograd graph, it
    would add them in another order. With two gradients there is no order.
    """
    if not graph.is_double or not graph.training:
        return graph
    types, copies = dict(graph.types), _copies(graph)
    nodes: list[Node] = []
    for value in graph.inputs:
        _spread_to(copies, value.name, None, nodes, types)
    for node in graph.nodes:
        differentiable = any(graph.types[o].grad for o in node.outputs)

        def use(ref: Ref, differentiable: bool = differentiable) -> Ref:
            return Ref(copies[ref.name].pop(0)) if differentiable and ref.name in copies else ref

        node = replace(node, args=map_refs(node.args, use), kwargs=map_refs(dict(node.kwargs), use))
        nodes.append(node)
        for name in node.outputs:
            _spread_to(copies, name, node, nodes, types)
    outputs = tuple(Ref(copies[o.name].pop(0)) if isinstance(o, Ref) and o.name in copies else o for o in graph.outputs)
    return replace(graph, nodes=tuple(nodes), types=types, outputs=outputs)


def _copies(graph: Graph) -> dict[str, list[str]]:
    """Per value with three gradients or more a name for each of its uses, in the order of the readers."""
    count: dict[str, int] = {}
    for node in graph.nodes:
        if any(graph.types[o].grad for o in node.outputs):
            for name in node.inputs:
                count[name] = count.get(name, 0) + 1
    for out in graph.outputs:
        if isinstance(out, Ref):
            count[out.name] = count.get(out.name, 0) + 1
    many = [n for n, uses in count.items() if uses > 2 and graph.types[n].grad and graph.types[n].dtype in SINGLE]
    return {name: [f"{name}_use{i}" for i in range(count[name])] for name in many}


def _spread_to(
    copies: dict[str, list[str]], name: str, maker: Node | None, nodes: list[Node], types: dict[str, TensorType]
) -> None:
    """Add the node that makes the copies of ``name``, if it has any."""
    if name not in copies:
        return
    names = tuple(copies[name])
    types.update(dict.fromkeys(names, types[name]))
    spread = Node(f"{name}_uses", FAN_OUT, (Ref(name), len(names)), {}, names, tuple(range(len(names))))
    if maker is not None:
        spread = replace(spread, fqn=maker.fqn, module_types=maker.module_types, source=maker.source)
    nodes.append(spread)

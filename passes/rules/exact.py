"""float32 upcast regions in a float64 model: norms, rotary tables, losses that a library upcasts.

Users who train in float64 compare digits, and a float32 value that rounds differently is off in the
eighth. So a region is sharded only where the result is bit-equal to one device. Elsewhere it runs
on full tensors.

Two more orders matter. Sums and complex products follow the order of dims in memory: see
:func:`autoshard.runtime.transport.communicator.in_order_of`. :func:`fan_out` fixes the order in
which gradients are added.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autoshard.layout import Invariant, Placement, Replicate, Shard
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node, TensorType
from autoshard.passes.rules.facts import is_view, rounding

SINGLE = (torch.float32, torch.complex64)
LEAST = 2
"""least positions per rank: kernels take empty chunks, and chunks of one position, for row-major"""


def exact(strategies: tuple[Strategy, ...], node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """Strategies that keep a float32 upcast region bit-exact: nothing is summed over ranks."""
    if not is_single_in_double(node, graph):
        return strategies
    types = [graph.types[n] for n in (*node.inputs, *node.outputs)]
    product, may_cut = rounding(node) == "product", _may_cut(node, graph)

    def is_exact(type_: TensorType, placement: Placement) -> bool:
        if type_.dtype not in SINGLE or isinstance(placement, Invariant):
            return True
        if isinstance(placement, Shard):
            return may_cut
        return isinstance(placement, Replicate) and not type_.grad

    def is_kept(strategy: Strategy) -> bool:
        placements = (*strategy.inputs, *strategy.outputs)
        if product and strategy.divides and not all(isinstance(p, Shard) for p in placements):
            return False  # kernel blocks depend on sizes: products on shards or on full tensors
        return all(map(is_exact, types, placements))

    return tuple(replace(s, least=LEAST) for s in strategies if is_kept(s))


def is_single_in_double(node: Node, graph: Graph) -> bool:
    """Whether ``node`` computes in float32 while the model is float64."""
    return graph.is_double and any(graph.types[n].dtype in SINGLE for n in (*node.inputs, *node.outputs))


def _may_cut(node: Node, graph: Graph) -> bool:
    """Whether results and gradients of ``node`` are bit-equal when computed on shards."""
    types = [graph.types[n] for n in (*node.inputs, *node.outputs)]
    if any(t.dtype.is_complex for t in types) or _spreads(node, graph):
        return False
    rounded = rounding(node)
    if rounded == "product":  # products with vectors use other kernels
        return len(node.inputs) < 4 and all(n > 1 for t in types for n in t.shape[-2:])
    if rounded == "sum":  # the last dim is summed row by row, others in blocks of columns
        operand, result = types[0], types[-1]
        kept = len(result.shape) if len(result.shape) < len(operand.shape) else len(operand.shape) - 1
        return not operand.permuted and operand.shape[:kept] == result.shape[:kept]
    return rounded == "exact" or is_view(node.op)


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

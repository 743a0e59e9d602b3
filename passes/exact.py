"""float32 islands in a float64 model, such as norms, rotary tables and losses that a library computes in float32.

Whoever trains in float64 compares digits, and float32 values that are rounded otherwise than on one device differ in
the eighth. So an island is cut only where the result is the same to the last bit; its matrix products stay divided.
"""

from __future__ import annotations

import torch

from autoshard.layout import Invariant, Placement, Replicate, Shard
from autoshard.passes.cost import is_view
from autoshard.passes.ir import Graph, Node, TensorType
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.base import Strategy

_SINGLE = (torch.float32, torch.complex64)
# Rounded correctly, or not at all. Kernels of exp, sin or sigmoid round otherwise in a vector than at its end.
_ROUNDED = frozenset(
    "_to_copy to type_as clone contiguous add sub mul div neg abs sqrt rsqrt pow mean sum where masked_fill cat stack "
    "index index_select gather topk sort zeros_like ones_like full_like".split()
)


def exact(strategies: tuple[Strategy, ...], node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """Without those that could change the last bits of a float32 island in a float64 model.

    Neither values nor gradients are summed over ranks; a sum over rows is not cut at all, for its order depends on
    the number of columns.
    """
    if not is_single_in_double(node, graph):
        return strategies
    types = [graph.types[n] for n in (*node.inputs, *node.outputs)]
    name = node.op._schema.name.rpartition(":")[2]
    rule = rule_for(node.op)
    may_cut = name in _ROUNDED or is_view(node.op) or (rule is not None and rule.flops is not None)
    may_cut = may_cut and not _sums_rows(node, graph)

    def is_exact(type_: TensorType, placement: Placement) -> bool:
        if type_.dtype not in _SINGLE or isinstance(placement, Invariant):
            return True
        if isinstance(placement, Shard):
            return may_cut and not type_.dtype.is_complex
        return isinstance(placement, Replicate) and not type_.grad

    return tuple(s for s in strategies if all(map(is_exact, types, (*s.inputs, *s.outputs))))


def is_single_in_double(node: Node, graph: Graph) -> bool:
    """Whether ``node`` computes in float32 while the model is float64."""
    single = any(graph.types[n].dtype in _SINGLE for n in (*node.inputs, *node.outputs))
    return single and any(t.dtype == torch.float64 and t.grad for t in graph.types.values())


def _sums_rows(node: Node, graph: Graph) -> bool:
    """Whether an operand with a gradient is broadcast over a dim before the last, so that its gradient is a sum."""
    for out in node.outputs:
        shape = graph.types[out].shape
        for type_ in (graph.types[n] for n in node.inputs):
            padded = (1,) * (len(shape) - len(type_.shape)) + type_.shape
            spread = len(padded) == len(shape) and all(a in (1, n) for a, n in zip(padded, shape, strict=True))
            if type_.grad and spread and padded[:-1] != shape[:-1]:
                return True
    return False

"""Where rules are restricted: data-dependent sizes, float32 upcast regions, ops without a rule.

Users who train in float64 compare digits, and a float32 value that rounds differently is off in the
eighth. So a float32 upcast region of a float64 model (norms, rotary tables, losses that a library
upcasts) is sharded only where the result is bit-equal to one device. Elsewhere it runs on full
tensors.

Two more orders matter there. Sums and complex products follow the order of dims in memory: see
:func:`autoshard.runtime.transport.communicator.in_order_of`. :func:`fan_out` fixes the order in
which gradients are added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from autoshard.errors import RuleError
from autoshard.layout import Invariant, Placement, Replicate, Shard
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node, TensorType, refs, tensor_arguments
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.base import Rule
from autoshard.passes.rules.facts import is_random, is_view, rounding


def needs_full_tensors(node: Node, types: Mapping[str, TensorType], rule: Rule | None) -> bool:
    """Whether ``node`` must run on full tensors, because a size or number depends on the data.

    True if it makes or takes such a number, or if the rule's local form computes with such a
    length. A number in place of a tensor operand (``x * n``) counts as a scalar tensor.
    """
    used = [types[name] for name in (*node.inputs, *node.outputs)]
    if all(t.number is None and not t.unknown for t in used):
        return False
    if any(types[name].number is not None for name in node.outputs):
        return True
    if any(t.unknown for t in used) and (rule is None or (rule.local is not None and rule.sized)):
        return True
    takes = tensor_arguments(node.op)
    return any(
        types[ref.name].number is not None for name, value in node.given if name not in takes for ref in refs(value)
    )


def keeps_unknown_unsharded(strategy: Strategy, types: Sequence[TensorType]) -> bool:
    """Whether ``strategy`` leaves dims of unknown length and numbers unsharded."""
    for placement, type_ in zip((*strategy.inputs, *strategy.outputs), types, strict=True):
        if isinstance(placement, Shard) and placement.dim in type_.unknown:
            return False
        if type_.number is not None and not isinstance(placement, Replicate | Invariant):
            return False
    return True


SINGLE_DTYPES = (torch.float32, torch.complex64)
MIN_POSITIONS = 2
"""least positions per rank: kernels take empty chunks, and chunks of one position, for row-major"""


def bit_exact_strategies(strategies: tuple[Strategy, ...], node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """Strategies that keep a float32 upcast region bit-exact: nothing is summed over ranks."""
    if not is_single_in_double(node, graph):
        return strategies
    types = [graph.types[n] for n in (*node.inputs, *node.outputs)]
    product, may_cut = rounding(node) == "product", _is_shard_exact(node, graph)

    def is_exact(type_: TensorType, placement: Placement) -> bool:
        if type_.dtype not in SINGLE_DTYPES or isinstance(placement, Invariant):
            return True
        if isinstance(placement, Shard):
            return may_cut
        return isinstance(placement, Replicate) and not type_.grad

    def is_kept(strategy: Strategy) -> bool:
        placements = (*strategy.inputs, *strategy.outputs)
        if product and strategy.divides and not all(isinstance(p, Shard) for p in placements):
            return False  # kernel blocks depend on sizes: products on shards or on full tensors
        return all(map(is_exact, types, placements))

    return tuple(replace(s, least=MIN_POSITIONS) for s in strategies if is_kept(s))


def is_single_in_double(node: Node, graph: Graph) -> bool:
    """Whether ``node`` computes in float32 while the model is float64."""
    return graph.is_double and any(graph.types[n].dtype in SINGLE_DTYPES for n in (*node.inputs, *node.outputs))


def _is_shard_exact(node: Node, graph: Graph) -> bool:
    """Whether results and gradients of ``node`` are bit-equal when computed on shards."""
    types = [graph.types[n] for n in (*node.inputs, *node.outputs)]
    if any(t.dtype.is_complex for t in types) or _has_broadcast_gradient(node, graph):
        return False
    rounded = rounding(node)
    if rounded == "product":  # products with vectors use other kernels
        return len(node.inputs) < 4 and all(n > 1 for t in types for n in t.shape[-2:])
    if rounded == "sum":  # the last dim is summed row by row, others in blocks of columns
        operand, result = types[0], types[-1]
        kept = len(result.shape) if len(result.shape) < len(operand.shape) else len(operand.shape) - 1
        return not operand.permuted and operand.shape[:kept] == result.shape[:kept]
    return rounded == "exact" or is_view(node.op)


def _has_broadcast_gradient(node: Node, graph: Graph) -> bool:
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


def check_random(graph: Graph) -> None:
    """Raise :class:`RuleError` for a random op with a gradient and no rule: one draw has none."""
    for node in graph.nodes:
        if is_random(node) and rule_for(node.op) is None and any(graph.types[o].grad for o in node.outputs):
            raise RuleError(
                f"{node.op} in module {node.fqn or '(root)'!r} at {node.source} draws random numbers, has a gradient and no "
                "sharding rule: one draw for all ranks would lose the gradient. Draw with torch.rand or dropout and compute "
                "from that, or add a rule by hand (autoshard.register_rule)."
            )


def check_rules(graph: Graph) -> None:
    """``strict=True``: raise :class:`RuleError` for the first op without a sharding rule."""
    for node in graph.nodes:
        where = f"in module {node.fqn or '(root)'!r} at {node.source}"
        rigid = needs_full_tensors(node, graph.types, rule_for(node.op))
        if rigid and any(graph.types[name].unknown for name in (*node.inputs, *node.outputs)):
            raise RuleError(
                f"{node.op} {where} runs on full tensors, because a length in it depends on the data. "
                "Use a mask or a fixed size, or compile with strict=False."
            )
        if not has_rule(node, graph):
            shapes = ", ".join(str(graph.types[n]) for n in node.inputs)
            raise RuleError(
                f"no sharding rule for {node.op}({shapes}) {where}. "
                f'Add one: autoshard.register_rule(torch.ops.{node.op}, "...") with one letter per dim, '
                "or compile with strict=False to run it on full tensors."
            )


def has_rule(node: Node, graph: Graph) -> bool:
    """Whether ``node`` has a sharding rule or needs none (checks, data-dependent sizes)."""
    silent = not node.op._schema.returns
    return silent or rule_for(node.op) is not None or needs_full_tensors(node, graph.types, None)

"""Data-dependent sizes: which ops run on full tensors only, and which dims stay unsharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoshard.layout import Invariant, Replicate, Shard
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Node, TensorType, refs
from autoshard.passes.ir.schema import tensor_arguments
from autoshard.passes.rules.base import Rule


def is_rigid(node: Node, types: Mapping[str, TensorType], rule: Rule | None) -> bool:
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


def leaves_whole(strategy: Strategy, types: Sequence[TensorType]) -> bool:
    """Whether ``strategy`` leaves dims of unknown length and numbers unsharded."""
    for placement, type_ in zip((*strategy.inputs, *strategy.outputs), types, strict=True):
        if isinstance(placement, Shard) and placement.dim in type_.unknown:
            return False
        if type_.number is not None and not isinstance(placement, Replicate | Invariant):
            return False
    return True

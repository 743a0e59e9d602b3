"""Where a length or number depends on the data: what runs on full tensors, and what is never cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoshard.layout import Invariant, Replicate, Shard
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Node, TensorType, refs
from autoshard.passes.ir.schema import tensor_arguments
from autoshard.passes.rules.base import Rule


def is_rigid(node: Node, types: Mapping[str, TensorType], rule: Rule | None) -> bool:
    """Whether ``node`` runs on full tensors only, although ``rule`` may know better for fixed sizes.

    That is where it makes a number or reads one as such, or where the rule's local form would compute with a length
    that depends on the data. A number that stands where the op takes a tensor (``x * n``) is like a scalar tensor.
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
    """Whether ``strategy`` cuts no dim of unknown length and no number. ``types``: of every operand and result."""
    for placement, type_ in zip((*strategy.inputs, *strategy.outputs), types, strict=True):
        if isinstance(placement, Shard) and placement.dim in type_.unknown:
            return False
        if type_.number is not None and not isinstance(placement, Replicate | Invariant):
            return False
    return True

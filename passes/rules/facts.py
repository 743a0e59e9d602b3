"""Ops that count even where nobody reads what they give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autoshard.passes.ir.graph import Node, TensorType
from autoshard.runtime.exactly import EXACTLY


def is_random(op: Any) -> bool:
    """Whether ``op`` draws from the generator."""
    return isinstance(op, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in op.tags


def has_effect(op: Any) -> bool:
    """Whether ``op`` counts where nobody reads its result: it draws, has none, or checks a length."""
    silent = isinstance(op, torch._ops.OpOverload) and not op._schema.returns
    return is_random(op) or silent or op == EXACTLY


# Ops that move no memory: they only change how a tensor is indexed.
VIEWS = frozenset(
    "view _unsafe_view reshape transpose permute unsqueeze squeeze expand slice select alias detach t unbind split "
    "split_with_sizes chunk flatten unflatten diagonal unfold view_as movedim narrow".split()
)


def is_view(op: torch._ops.OpOverload) -> bool:
    """Whether ``op`` returns a view of its operand, at no cost."""
    return op._schema.name.removeprefix("aten::") in VIEWS


_KEEP_NOTHING = VIEWS | {
    "add",
    "sub",
    "neg",
    "sum",
    "mean",
    "cat",
    "stack",
    "embedding",
    "_to_copy",
    "clone",
    "dropout",
}


_WITH_BIAS = frozenset({"linear", "conv1d", "conv2d", "conv3d", "convolution", "layer_norm", "native_layer_norm"})


def saves_operand(node: Node, types: Mapping[str, TensorType], position: int) -> bool:
    """Whether autograd keeps the value of operand ``position`` of ``node`` for the backward.

    A product keeps an operand for the gradients of the others; sums and indexing keep none; a bias is never kept.
    """
    name = node.op._schema.name.removeprefix("aten::")
    if name in _KEEP_NOTHING or (name in _WITH_BIAS and position == 2):
        return False
    if len(node.inputs) == 1:
        return True
    return any(types[other].grad for i, other in enumerate(node.inputs) if i != position)

"""Reading a node by the names of its op's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autoshard.passes.ir import Node
from autoshard.passes.rules.base import Call, Site
from autoshard.passes.rules.factors import Dims, operands, tensor_arguments, with_arguments


def ops(names: str) -> tuple[torch._ops.OpOverload, ...]:
    """aten ops, as in ``"conv1d.default conv2d.default"``."""
    pairs = (name.split(".") for name in names.split())
    return tuple(getattr(getattr(torch.ops.aten, packet), overload) for packet, overload in pairs)


def positions(node: Node) -> dict[str, int]:
    """Argument name → where its tensor stands in ``node.inputs``; arguments without a tensor are left out."""
    names = tensor_arguments(node.op)
    return {names[slot]: i for i, slot in enumerate(operands(node))}


def inputs(node: Node, dims: Mapping[str, Dims]) -> tuple[Dims, ...]:
    """Factors per entry of ``node.inputs`` from factors per argument name."""
    return tuple(dims[name] for name in positions(node))


def axes_of(site: Site, name: str, dim: int) -> tuple[str, ...]:
    """Mesh axes that cut ``dim`` of the operand ``name``, outer to inner; none where the operand is absent."""
    position = positions(site.node).get(name)
    return () if position is None else site.inputs[position].axes_of(dim)


def spell(axes: Sequence[str]) -> str | tuple[str, ...]:
    """Mesh axes as generated code names them: one alone, several as a tuple."""
    return axes[0] if len(axes) == 1 else tuple(axes)


def unchanged(site: Site, **changes: Any) -> Call:
    """The same op, with some arguments replaced."""
    args, kwargs = with_arguments(site.node, **changes)
    return Call(site.node.op, args, kwargs)

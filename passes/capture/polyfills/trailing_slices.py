"""Trailing slices of a dynamic dim (KV caches of sliding windows): one graph for all lengths."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from autoshard.aten import aten
from autoshard.errors import CaptureError
from autoshard.passes.ir.sizes import ENDLESS
from autoshard.torch_private.ops import HigherOrderOperator, OpOverload


@torch.library.custom_op("autoshard::last", mutates_args=())
def last_elements(x: Tensor, dim: int, count: int) -> Tensor:
    """The last ``count`` elements along ``dim``, or all if fewer: a slice of traceable length."""
    return x.narrow(dim, max(x.shape[dim] - count, 0), min(x.shape[dim], count)).clone()


@last_elements.register_fake
def _(x: Tensor, dim: int, count: int) -> Tensor:
    return x.new_empty(*x.shape[:dim], torch.sym_min(x.shape[dim], count), *x.shape[dim + 1 :])


def as_trailing_slice(op: Any, args: Any) -> tuple[Any, Any]:
    """(op, args) of the graph for an op of the trace: :func:`last_elements` becomes a slice."""
    if op is not torch.ops.autoshard.last.default:
        return op, args
    x, dim, count = args
    return aten.slice.Tensor, (x, dim, -count, ENDLESS)


def check_trailing_writes(program: fx.GraphModule) -> None:
    """Refuse writes into a trailing slice or its source: the trace has a copy."""
    _check_view_writes(program, _ViewSources({}, set()))


class _ViewSources(NamedTuple):
    sources: dict[fx.Node, fx.Node]
    """view → node that owns its memory"""
    taken: set[fx.Node]
    """owners of which a trailing slice was taken"""


def _check_view_writes(program: fx.GraphModule, views: _ViewSources) -> None:
    sources, taken = views
    for node in program.graph.nodes:
        if isinstance(node.target, HigherOrderOperator):
            _check_region_bodies(program, node, views)
        if node.target is operator.getitem and isinstance(source := node.args[0], fx.Node):
            sources.setdefault(node, sources.get(source, source))
        if not isinstance(node.target, OpOverload):
            continue
        schema = node.target._schema
        is_last = node.target is torch.ops.autoshard.last.default
        if node.args and isinstance(node.args[0], fx.Node) and (is_last or any(r.alias_info for r in schema.returns)):
            sources[node] = sources.get(node.args[0], node.args[0])
        if is_last:
            taken.add(sources[node])
        written = (
            x for x, a in zip(node.args, schema.arguments, strict=False) if a.alias_info and a.alias_info.is_write
        )
        if any(isinstance(x, fx.Node) and sources.get(x, x) in taken for x in written):
            raise CaptureError(
                f"{schema.name} writes to the last elements along a dim of open length, or "
                "to a tensor with such elements"
            )


def _check_region_bodies(program: fx.GraphModule, region: fx.Node, views: _ViewSources) -> None:
    """Check the bodies of a higher-order op, whose last arguments are its tensors."""
    leaves = pytree.tree_leaves(region.args, is_leaf=lambda x: isinstance(x, fx.Node))
    bodies = [getattr(program, str(x.target)) for x in leaves if isinstance(x, fx.Node) and x.op == "get_attr"]
    for body in (x for x in bodies if isinstance(x, fx.GraphModule)):
        inner = [n for n in body.graph.nodes if n.op == "placeholder"]
        for placeholder, operand in zip(reversed(inner), reversed(leaves), strict=False):
            if isinstance(operand, fx.Node):
                views.sources[placeholder] = views.sources.get(operand, operand)
        _check_view_writes(body, views)
        results = next(n for n in body.graph.nodes if n.op == "output").args[0]
        for get in region.users:
            slot = get.args[1] if get.target is operator.getitem else None
            given = results[slot] if isinstance(slot, int) and isinstance(results, tuple | list) else None
            if isinstance(given, fx.Node):
                views.sources[get] = views.sources.get(given, given)


def is_trailing_index(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call is an index that :func:`index_trailing` handles."""
    return func is Tensor.__getitem__ and bool(_trailing_counts(*args))


def index_trailing(x: Tensor, index: tuple[slice, ...]) -> Tensor:
    """``x[index]`` for all lengths. For short dims, torch specializes the graph."""
    ends = _trailing_counts(x, index)
    for dim, count in ends.items():
        x = last_elements(x, dim, count)
    rest = tuple(slice(None) if d in ends else i for d, i in enumerate(index))
    return x if all(i == slice(None) for i in rest) else x[rest]


def _trailing_counts(x: Tensor, index: Any) -> dict[int, int]:
    """Dim → number of trailing elements requested."""
    if not isinstance(index, tuple) or not all(isinstance(i, slice) for i in index):
        return {}
    return {d: -i.start for d, (i, n) in enumerate(zip(index, x.shape, strict=False)) if _takes_whole_dim(i, n)}


def _takes_whole_dim(i: slice, length: Any) -> bool:
    """Whether slice ``i`` takes the end of a dynamic dim, at least the example's length."""
    if not isinstance(length, torch.SymInt) or not length.node.has_hint() or not isinstance(i.start, int):
        return False
    return i.start < 0 and (i.stop, i.step) == (None, None) and bool(length.node.hint <= -i.start)

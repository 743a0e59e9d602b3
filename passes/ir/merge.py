"""Statements merged into one call: buckets, collective matmuls, grouped look-ups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from autoshard.passes.ir.graph import Ref
from autoshard.passes.ir.program import Call, Local, Statement, reads

TABLES = "table_wise"
"""runtime function: look-ups in tables that are placed table-wise"""

POOLED, POOLED_TOGETHER = "pooled", "pooled_together"
"""runtime functions: pooled look-up in one table, replicated or sharded, and in several"""

GATHERED, SCATTERED = "gather_products", "scatter_product"
"""runtime functions of collective matmuls: all-gather + products, product + reduce-scatter"""
TRAVELLING = frozenset({GATHERED, SCATTERED})


def merged(function: str, members: Sequence[Statement], zero: Mapping[str, int] = MappingProxyType({})) -> Statement:
    """Redistribution steps of one kind over the same axes as one call of ``function`` (a bucket).

    Arguments but the axes become tuples: ``all_gather(w, 0, "dp", to="R")`` and the same of ``b``
    become ``gather_parameters((w, b), (0, 0), "dp", to="R")``. ``sizes`` holds gathered lengths
    where shards are uneven. ``zero``: see :attr:`~autoshard.passes.ir.assignment.Assignment.zero`.
    """
    if function in _MERGES:
        return _MERGES[function](members)
    first = members[0]
    *dims, axes = zip(*(s.call.args[1:] for s in members), strict=True)
    kwargs = {k: v for k, v in first.call.kwargs.items() if k != "size"}
    if any("size" in s.call.kwargs for s in members):
        kwargs["sizes"] = tuple(s.call.kwargs.get("size") or _length(s) for s in members)
    if function == "gather_parameters" and first.value in zero:
        kwargs["zero"] = zero[first.value]
    return replace(
        first,
        outputs=tuple(s.outputs[0] for s in members),
        call=Call(function, (tuple(Ref(reads(s)[0]) for s in members), *dims, axes[0]), kwargs),
        layouts=tuple(s.layouts[0] for s in members),
        members=tuple(members),
    )


def _tables(members: Sequence[Statement]) -> Statement:
    """Table-wise look-ups as one grouped look-up: their tuple arguments are concatenated."""
    first, calls = members[0], [s.call for s in members]

    def joint(values: Sequence[Any]) -> Any:
        return tuple(x for value in values for x in value) if isinstance(values[0], tuple) else values[0]

    names = dict.fromkeys(name for call in calls for name in call.kwargs)
    lists = {"offsets", "weights", "padding"}
    kwargs = {n: joint([c.kwargs.get(n, (None,) if n in lists else None) for c in calls]) for n in names}
    args = (*(joint([c.args[i] for c in calls]) for i in range(3)), *first.call.args[3:])
    return _side_by_side(members, Call(TABLES, args, kwargs))


def _pooled(members: Sequence[Statement]) -> Statement:
    """Pooled look-ups in one table each as one grouped look-up."""
    calls = [s.call for s in members]
    tables, indices, modes = zip(*(c.args for c in calls), strict=True)
    kwargs: dict[str, Any] = {}
    if any("padding_idx" in c.kwargs for c in calls):
        kwargs["padding"] = tuple(c.kwargs.get("padding_idx", -1) for c in calls)
    if "axes" in calls[0].kwargs:
        kwargs |= {"sizes": tuple(c.kwargs["size"] for c in calls), "axes": calls[0].kwargs["axes"]}
    return _side_by_side(members, Call(POOLED_TOGETHER, (tables, indices, modes[0]), kwargs))


def _side_by_side(members: Sequence[Statement], call: Call) -> Statement:
    return replace(
        members[0],
        outputs=tuple(o for s in members for o in s.outputs),
        call=call,
        layouts=tuple(x for s in members for x in s.layouts),
        members=tuple(members),
    )


def _gathered(members: Sequence[Statement]) -> Statement:
    """Collective matmul: an all-gather and the products that read its result."""
    gather, *products = members
    calls = [s.call for s in products]
    kwargs = {k: v for k, v in gather.call.kwargs.items() if k == "size"}
    biases = tuple(c.args[2] if len(c.args) > 2 else None for c in calls)
    if any(b is not None for b in biases):
        kwargs["biases"] = biases
    if gather.again and not products[0].again:
        kwargs["again"] = True
    args = gather.call.args[0], tuple(c.args[1] for c in calls), *gather.call.args[1:]
    return replace(
        products[0],
        outputs=tuple(s.outputs[0] for s in products),
        call=Call(GATHERED, args, kwargs),
        layouts=tuple(s.layouts[0] for s in products),
        members=tuple(members),
    )


def _scattered(members: Sequence[Statement]) -> Statement:
    """Collective matmul: a product and the reduce-scatter of its result."""
    product, scatter = members
    x, weight, *bias = product.call.args
    kwargs = {"bias": bias[0]} if bias and bias[0] is not None else {}
    call = Call(SCATTERED, (x, weight, *scatter.call.args[1:]), kwargs)
    return replace(product, outputs=scatter.outputs, call=call, layouts=scatter.layouts, members=(product, scatter))


_MERGES = {TABLES: _tables, POOLED_TOGETHER: _pooled, GATHERED: _gathered, SCATTERED: _scattered}


def fused(enter: Statement, gather: Statement) -> Statement:
    """I → R over replicas and the all-gather of a shard as one call (hybrid sharding).

    Its backward reduce-scatters, then all-reduces the shard. In mixed precision ``enter`` may be
    the cast, where the gather reduces no gradient.
    """
    replicas = enter.step.axes if enter.step is not None else ()
    kwargs = {**enter.call.kwargs, **gather.call.kwargs, "replicas": replicas}
    call = Call(gather.call.fn, (enter.call.args[0], *gather.call.args[1:]), kwargs)
    return replace(gather, call=call, members=(enter, gather))


def _length(s: Statement) -> Any:
    """Local length of the gathered dim afterwards; None where an owner rank knows it alone."""
    step = s.step
    if step is None or step.src.owner:
        return None
    left = step.dst.axes_of(step.dims[0])
    return Local(step.shape[step.dims[0]], left) if left else step.shape[step.dims[0]]

"""Losses on sharded outputs: pointwise functions, sums and means by autograd on the local shard.

DTensor gives the same values, but runs each backward op as a DTensor op and reshards the replicated
gradient of a mean: several times the host time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from autoshard.module.dtensors.made import local_gradient, new_dtensor, part_of, spec_of, whole_of
from autoshard.runtime.transport.handed_on import HandingOn


def _both(*names: str) -> frozenset[Any]:
    return frozenset(getattr(of, name) for name in names for of in (torch, torch.Tensor))


_EACH = _both("abs", "exp", "log", "neg", "relu", "sigmoid", "sqrt", "square", "tanh")
_SUMS, _MEANS = _both("sum"), _both("mean")
_KNOWN = _EACH | _SUMS | _MEANS


def on_parts(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DTensor | None:
    """``func`` on local shards; None if unsupported or if the argument has partial sums.

    A total is Partial over the sharding axes.
    """
    if func not in _KNOWN or len(args) != 1 or kwargs:
        return None
    x = args[0]
    spec = x._spec
    whole = spec.shape.numel()
    if not (whole and x.dtype.is_floating_point and all(type(p) in (Shard, Replicate) for p in spec.placements)):
        return None
    if func in _EACH:
        return whole_of(func(part_of(x)), spec)
    found: DTensor = _Total.apply(x, whole if func in _MEANS else 1)
    return found


class _Total(HandingOn):
    """The sum of all elements divided by ``count``, as one autograd node."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, count: int) -> DTensor:
        part, spec = x._local_tensor, x._spec
        mean = count > 1 and part.numel()  # the mean of an empty shard is NaN
        made = part.mean() * (part.numel() / count) if mean else part.sum()
        placements = tuple([_SUMMAND if type(p) is Shard else p for p in spec.placements])
        ctx.spec, ctx.shape, ctx.count = spec, part.shape, count
        ctx.made = spec_of(spec.mesh, placements, torch.Size(()), made.dtype)
        found: DTensor = new_dtensor(DTensor, made, ctx.made, requires_grad=False)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> Any:
        each = local_gradient(gradient, ctx.made).expand(ctx.shape)
        return whole_of(each / ctx.count if ctx.count > 1 else each, ctx.spec), None


_SUMMAND = Partial()

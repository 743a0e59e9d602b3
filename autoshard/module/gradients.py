"""Gradients of a sharded module: clipping by norm, and one GradScaler verdict for all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autoshard.errors import AutoshardError, RuntimeMismatchError
from autoshard.module.base import ShardedModule
from autoshard.module.dtensors.ops import is_ours
from autoshard.runtime.transport.work import all_gather_single

Found = dict[torch.device, torch.Tensor]
"""device → 1 if a gradient there is not finite"""


def clip_grad_norm_(
    sharded: ShardedModule, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale gradients in place to a norm of at most ``max_norm``; returns the prior norm (scalar).

    It is the unsharded model's norm, by one collective of one number;
    :func:`torch.nn.utils.clip_grad_norm_` needs one per layout. Raises RuntimeError for a
    non-finite norm if ``error_if_nonfinite``, :class:`AutoshardError` for another module.
    """
    if not isinstance(sharded, ShardedModule):
        raise AutoshardError(
            f"autoshard.clip_grad_norm_ takes what autoshard.compile returned, got {type(sharded).__name__}; "
            "for other parameters there is torch.nn.utils.clip_grad_norm_"
        )
    gradients: list[Any] = [p.grad for p in sharded.parameters() if p.grad is not None]
    partial = [g for g in gradients if isinstance(g, DTensor) and any(p.is_partial() for p in g.placements)]
    if partial:
        raise RuntimeMismatchError(
            f"{len(partial)} gradients are not summed over the ranks yet: the last backward pass was inside no_sync()"
        )
    if not sharded.is_staged and (not gradients or not isinstance(gradients[0], DTensor)):
        norm, held = torch.nn.utils.get_total_norm([_values(g) for g in gradients], norm_type), gradients
    else:
        norm = _norm(sharded.gradients_once(), float(norm_type), next(sharded.whole_parameters()))
        held = [g.to_local() for g in gradients]
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"the norm of order {norm_type} of the gradients is {float(norm)}, and nothing was clipped")
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for g in held:
        g.mul_(scale)
    return norm


def _norm(gradients: Sequence[Any], order: float, like: torch.Tensor) -> torch.Tensor:
    """The norm of all DTensors in the dtype of ``like``; of replicas only the first counts."""
    mine = []
    for g in gradients:
        place = g.device_mesh.get_coordinate()
        if place is None:  # another rank owns it
            continue
        # is_shard() is False for torch's strided shards
        first = all(n == 0 or not p.is_replicate() for p, n in zip(g.placements, place, strict=True))
        if first and g.to_local().numel():
            mine.append(_values(g.to_local()))
    device = mine[0].device if mine else torch.device("cuda" if "nccl" in str(dist.get_backend()) else "cpu")
    norms = torch.stack([n.to(device, like.dtype) for n in torch._foreach_norm(mine, order)]) if mine else None
    total = (
        torch.zeros((), device=device, dtype=like.dtype) if norms is None else torch.linalg.vector_norm(norms, order)
    )
    everyone = total.new_empty(dist.get_world_size())
    all_gather_single(everyone, total.reshape(1))  # no all-reduce: the maximum of gloo loses NaN
    norm: torch.Tensor = torch.linalg.vector_norm(everyone, order)
    return norm


def _values(x: torch.Tensor) -> torch.Tensor:
    """The stored values: of a sparse gradient those of its rows."""
    return x.coalesce().values() if x.is_sparse else x


@functools.cache
def one_verdict() -> None:
    """Make :class:`torch.amp.GradScaler` find the same overflow on every rank.

    DTensor reduces over the axes that shard the *first* gradient. If that one is replicated and
    another is not, ranks decide alone and diverge in scale and steps. Ranks of other stages or
    tables may have other gradients, dtypes, or none. So local findings are combined once per
    optimizer.
    """
    torch.amp.GradScaler._unscale_grads_ = _together(torch.amp.GradScaler._unscale_grads_)  # type: ignore[method-assign]


def _together(unscale: Callable[..., Found]) -> Callable[..., Found]:
    @functools.wraps(unscale)
    def together(
        scaler: Any, optimizer: torch.optim.Optimizer, inverse: torch.Tensor, found: torch.Tensor, fp16: bool
    ) -> Found:
        by_device = unscale(scaler, optimizer, inverse, found, fp16)
        if any(is_ours(p) for group in optimizer.param_groups for p in group["params"]):
            by_device = by_device or {found.device: found}
            for x in by_device.values():
                dist.all_reduce(x, dist.ReduceOp.MAX)
        return by_device

    return together

"""DTensors in files of ``torch.save``: each holds the part of the rank that wrote it, and is of no use to others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autoshard.errors import LayoutError


def mend_files(is_ours: Callable[[object], bool]) -> None:
    """Have parts of ours in files know their rank, and be refused on others: torch takes them for these ranks' own.

    Nor does it know a wrapper whose local tensor does not begin its memory, as of tables that lie one after another.
    """
    reduced: Callable[..., Any] = DTensor.__reduce_ex__
    inner: Callable[..., Any] = DTensor._reduce_ex_internal

    def reduce_inner(x: DTensor, protocol: Any) -> Any:
        if not x.storage_offset():
            return inner(x, protocol)
        how = type(x), x.dtype, tuple(x.size()), x.stride(), 0, x.layout, x.device, x.requires_grad
        return torch._utils._rebuild_wrapper_subclass, how

    def reduce_ex(x: DTensor, protocol: Any) -> Any:
        rebuild, args, *rest = reduced(x, protocol)
        if not is_ours(x) or all(p.is_replicate() for p in x.placements):
            return (rebuild, args, *rest)
        return (of_rank, (dist.get_rank(), rebuild, args), *rest)

    DTensor.__reduce_ex__ = reduce_ex  # type: ignore[assignment, method-assign]
    DTensor._reduce_ex_internal = reduce_inner  # type: ignore[assignment, method-assign]
    torch.serialization.add_safe_globals([of_rank])


def of_rank(rank: int, rebuild: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What ``rebuild`` gives. Raises :class:`LayoutError` on other ranks than the one that wrote it."""
    if dist.is_initialized() and dist.get_rank() != rank:
        raise LayoutError(
            f"a tensor in this file holds the part of rank {rank}, which wrote it, and is read on rank {dist.get_rank()}. Save "
            "full_state_dict() and autoshard.full_optimizer_state_dict(), or use torch.distributed.checkpoint."
        )
    return rebuild(*args)

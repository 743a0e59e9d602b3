"""Serialization of DTensors: pickle, ``torch.save``, safetensors, NumPy.

Replicated ones become plain tensors. A shard is refused: on another rank it would be wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.errors import LayoutError
from autoshard.module.dtensors.views import Copied

_VALUES = "numpy tolist __array__ __dlpack__".split()
_MEMORY = "storage share_memory_".split()
"""methods that read a storage, which DTensors lack; safetensors calls ``storage``"""


def mend_files(is_ours: Callable[[object], bool], is_whole: Callable[[DTensor], bool]) -> None:
    """Serialize DTensors of sharded modules as plain tensors if ``is_whole``; refuse others."""
    of: Any = DTensor
    reduced, at, shared = of.__reduce_ex__, of.data_ptr, of.share_memory_

    def plain(x: DTensor, allowed: bool) -> torch.Tensor:
        if not allowed:
            raise LayoutError(
                f"rank {dist.get_rank()} is about to save, or to hand to something other than torch, a tensor of shape "
                f"{list(x.shape)} of which it holds {list(x._local_tensor.shape)} ({x.placements}). Save "
                "sharded.full_state_dict() and autoshard.full_optimizer_state_dict(sharded, optimizer) on one rank, or "
                "state_dict() with torch.distributed.checkpoint; of single tensors take .full_tensor() on every rank."
            )
        return x._local_tensor.detach()

    def reduce_ex(x: DTensor, protocol: Any) -> Any:
        if not is_ours(x):
            return reduced(x, protocol)
        whole = plain(x, is_whole(x)).requires_grad_(x.requires_grad)
        return (nn.Parameter(whole, x.requires_grad) if isinstance(x, nn.Parameter) else whole).__reduce_ex__(protocol)

    def copied(x: DTensor) -> Any:
        """``copy.copy`` within this process."""
        rebuild, args = reduced(x, 4)
        return rebuild(*args)

    def reading(read: Callable[..., Any], of_whole: bool) -> Callable[..., Any]:
        def wrapped(x: DTensor, *args: Any, **kwargs: Any) -> Any:
            ours = type(x) in (DTensor, Copied) and is_ours(x)  # outputs gather
            if ours and read is shared:
                raise LayoutError(
                    f"share_memory() of a tensor of shape {list(x.shape)} of a sharded module, of which rank {dist.get_rank()} "
                    f"holds {list(x._local_tensor.shape)} ({x.placements}): other processes could not use it. Share the "
                    "tensors of sharded.full_state_dict(); a module of its own in this process is copy.deepcopy(sharded)."
                )
            return read(plain(x, of_whole and is_whole(x)) if ours else x, *args, **kwargs)

        return wrapped

    of.__reduce_ex__, of.__copy__ = reduce_ex, copied
    of.data_ptr = lambda x: 0 if is_ours(x) else at(x)  # torch adds the local tensor's offset to 0
    for name in (*_VALUES, *_MEMORY):
        setattr(of, name, reading(getattr(of, name), name in _VALUES))

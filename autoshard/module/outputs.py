"""Outputs that stay in their layout: DTensors that also work with plain tensors, as labels are."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.distributed.tensor import DTensor, distribute_tensor

log = logging.getLogger("autoshard")

_ON_WHOLE = (
    *(torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__iter__),  # what leaves torch
    torch.Tensor.__setitem__,  # DTensor's own writes into a copy where the dim is cut
)
_WRITING = re.compile(r"\w*[^_]_|__setitem__|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__")
"""names of functions that write into their first argument"""


class Output(DTensor):
    """A DTensor that becomes whole where it meets a plain tensor.

    Ops on it alone are DTensor's, where that has one. Others, and those that also take a plain tensor (labels, a mask,
    another model's logits), run on the whole values, which are gathered for them, and give plain tensors: the same on
    every rank, as with an unsharded model. In the backward every rank takes its part of that gradient: nothing is
    summed twice.
    """

    __slots__ = ()

    @staticmethod
    def of(x: DTensor) -> DTensor:
        """The same DTensor, of this class; other subclasses, such as parameters, stay what they are."""
        if type(x) is DTensor:
            x.__class__ = Output
        return x

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = tuple(args), dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if func not in _ON_WHOLE and not any(_is_plain(x) for x in pytree.tree_leaves(given)):
                try:
                    return pytree.tree_map_only(DTensor, Output.of, func(*given[0], **given[1]))
                except torch.OutOfMemoryError:
                    raise
                except (RuntimeError, NotImplementedError) as error:
                    log.info("%s of an output in its layout: %s. It is gathered", func, error)
            own, named = pytree.tree_map_only(DTensor, lambda x: x.full_tensor(), given)
            result = func(*own, **named)
            if _writes(func) and isinstance(x := given[0][0], DTensor):
                _take(x, own[0])
                return x if result is own[0] else result
            return result


def _is_plain(x: Any) -> bool:
    """Numbers go with DTensors, but for those that want a gradient: it would be a DTensor."""
    return isinstance(x, torch.Tensor) and not isinstance(x, DTensor) and (x.ndim > 0 or x.requires_grad)


def _writes(func: Any) -> bool:
    """Whether ``func`` writes into its first argument."""
    return bool(_WRITING.fullmatch(getattr(func, "__name__", "")))


def _take(x: DTensor, full: torch.Tensor) -> None:
    """Take this rank's part of what was written into a copy of the whole."""
    part = distribute_tensor(full.detach(), x.device_mesh, x.placements, src_data_rank=None)
    x._local_tensor.copy_(part.to_local())

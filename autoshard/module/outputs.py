"""Outputs that stay in their layout: DTensors that also work with plain tensors, as labels are."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.distributed.tensor import DTensor

log = logging.getLogger("autoshard")

_WHOLE = (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__iter__)
"""what leaves torch"""


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
            if func not in _WHOLE and not any(_is_plain(x) for x in pytree.tree_leaves(given)):
                try:
                    return pytree.tree_map_only(DTensor, Output.of, func(*given[0], **given[1]))
                except torch.OutOfMemoryError:
                    raise
                except (RuntimeError, NotImplementedError) as error:
                    log.info("%s of an output in its layout: %s. It is gathered", func, error)
            own, named = pytree.tree_map_only(DTensor, lambda x: x.full_tensor(), given)
            return func(*own, **named)


def _is_plain(x: Any) -> bool:
    """Numbers go with DTensors, but for those that want a gradient: it would be a DTensor."""
    return isinstance(x, torch.Tensor) and not isinstance(x, DTensor) and (x.ndim > 0 or x.requires_grad)

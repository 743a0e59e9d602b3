"""Gradients of one rank's stages: combining them as if they were the model's raises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoshard.errors import RuntimeMismatchError

_NORMS = (torch.linalg.vector_norm, torch.linalg.norm, torch.norm, torch.Tensor.norm, torch._foreach_norm)
_SAME = (torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]
_FLAT = (torch.Tensor.view, torch.Tensor.reshape, torch.reshape, torch.Tensor.flatten, torch.flatten)


def mark(p: torch.Tensor) -> None:
    """Mark ``p.grad`` as a stage's gradient; a post-accumulate hook."""
    if type(p.grad) is DTensor:
        p.grad.__class__ = StageGradient


class StageGradient(DTensor):
    """A gradient whose norm must not be combined, as ``torch.nn.utils.clip_grad_norm_`` does.

    Nor may its elements be concatenated, as LBFGS does.
    """

    @staticmethod
    def __tensor_unflatten__(inner: Any, spec: Any, size: Any, stride: Any) -> DTensor:
        """Keeps the class: a compiled ``optimizer.step`` guards on it."""
        made: DTensor = DTensor.__tensor_unflatten__(inner, spec, size, stride)
        made.__class__ = StageGradient
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            for kind, funcs in ((_Norm, _NORMS), (_Elements, _FLAT), (cls, _SAME)):
                for x in (result if isinstance(result, list | tuple) else (result,)) if func in funcs else ():
                    if type(x) is DTensor:
                        x.__class__ = kind
            return result


class _Norm(DTensor):
    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.stack:
            raise RuntimeMismatchError(
                "the norm of these gradients is that of this rank's pipeline stages, not of the model: use "
                "autoshard.clip_grad_norm_(sharded, max_norm) instead of torch.nn.utils.clip_grad_norm_"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if func is torch.Tensor.to and type(result) is DTensor:
                result.__class__ = cls
            return result


class _Elements(DTensor):
    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.cat, torch.concat, torch.concatenate):
            raise RuntimeMismatchError(
                "these gradients put together are those of this rank's pipeline stages, not of the model: optimizers that "
                "take all parameters as one vector, such as LBFGS, do not train stages. sharded.full_gradients() has all"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

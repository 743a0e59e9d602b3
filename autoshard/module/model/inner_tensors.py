"""Frozen tensor subclasses, such as quantised weights, as parametrizations of their inner tensors, which are plain."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from autoshard.errors import CaptureError
from autoshard.module.model.closures import deepcopy_functions, ids_in_model, plain_memo


class InnerTensors(nn.Module):
    """A parametrization that puts a wrapper subclass together from its inner tensors, as the subclass itself does."""

    def right_inverse(self, x: Tensor) -> list[Tensor]:
        """The inner tensors of ``x``; those of nested subclasses, too."""
        found: list[Tensor] = []
        self.recipe = _taken_apart(x, found)
        return found

    def forward(self, *inner: Tensor) -> Tensor:
        """The subclass."""
        return _put_together(self.recipe, iter(inner))


def _taken_apart(x: Any, found: list[Tensor]) -> Any:
    """How :func:`_put_together` makes ``x``; None if it is plain. Plain tensors are added to ``found``."""
    if not _is_wrapper(x):
        found.append(x.detach())
        return None
    names, context = x.__tensor_flatten__()
    return type(x), {n: _taken_apart(getattr(x, n), found) for n in names}, context, x.shape, x.stride()


def _put_together(recipe: Any, inner: Iterator[Tensor]) -> Tensor:
    if recipe is None:
        return next(inner)
    kind, each, context, shape, stride = recipe
    made: Tensor = kind.__tensor_unflatten__(
        {n: _put_together(r, inner) for n, r in each.items()}, context, shape, stride
    )
    return made


def _is_wrapper(x: Any) -> bool:
    """Whether ``x`` is a dense tensor that consists of others. A DTensor is a shard, and must be gathered first."""
    return hasattr(type(x), "__tensor_unflatten__") and not isinstance(x, DTensor) and x.layout == torch.strided


def with_inner_tensors(model: nn.Module) -> nn.Module:
    """``model``, or a copy on its tensors in which frozen wrapper subclasses are inner tensors.

    The weight ``a.weight`` becomes ``a.parametrizations.weight.original0``, ``original1`` and so on.
    """
    found = [
        (path, name)
        for path, module in model.named_modules()
        for name, x in (*module._parameters.items(), *module._buffers.items())
        if x is not None and _is_wrapper(x) and not x.requires_grad
    ]
    if not found:
        return model
    tensors = {id(x): x for x in (*model.parameters(), *model.buffers())}
    first: dict[int, nn.Module] = {}
    try:
        with deepcopy_functions(ids_in_model(model)):
            made: nn.Module = copy.deepcopy(model, {**tensors, **plain_memo(model)})
        for path, name in found:
            module, x = made.get_submodule(path), getattr(model.get_submodule(path), name)
            parametrize.register_parametrization(module, name, InnerTensors())
            own: Any = module.parametrizations
            if (of := first.setdefault(id(x), own[name])) is not own[name]:  # tied
                own[name]._parameters.update(of._parameters)
                own[name]._buffers.update(of._buffers)
    except Exception as error:
        raise CaptureError(
            f"the tensor subclasses of the model cannot be taken apart, as of {'.'.join(found[0]).lstrip('.')!r}: {error}. "
            "Compile the model before its weights are quantised"
        ) from error
    return made

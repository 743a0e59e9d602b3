"""User attributes of parameters and buffers, carried over to the sharded module's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.errors import CaptureError
from autoshard.module.dtensors.outputs import Output
from autoshard.module.model.closures import copied
from autoshard.module.model.parts import part_of
from autoshard.passes.capture.exported.attached import attributes_on, class_of, with_class
from autoshard.passes.capture.refusals.shared import memory_of

_WHOLE = (torch.Tensor, nn.Parameter)


def carry(tensors: Mapping[str, torch.Tensor], new: Mapping[int, torch.Tensor], memo: Mapping[int, Any]) -> None:
    """Copy the attributes that users set on the ``tensors`` to their successors.

    ``tensors``: the old ones by name. ``new``: successors by id of the old tensor; ``memo``: of
    modules. Functions and containers are copied with successors inside. A tensor of the parameter's
    shape, such as a mask, is sharded like the parameter.
    """
    memory = memory_of(tensors.values())
    for name, old in tensors.items():
        for attribute, value in attributes_on(old).items():
            if isinstance(value, torch.Tensor) and id(value) not in new and not memory.isdisjoint(memory_of([value])):
                raise CaptureError(
                    f"attribute {attribute!r} of {name!r} is a view of the model's tensors, which the sharded module does not "
                    "keep in that memory. Delete it, and set it on the sharded module's parameter."
                )
            made, target = copied(value, {**memo, **new}), new[id(old)]
            if isinstance(target, DTensor) and type(made) in _WHOLE and made.shape == old.shape:
                made = part_of(made, target)
            setattr(target, attribute, made)


def without_data(p: nn.Parameter) -> nn.Parameter:
    """A meta stand-in of a parameter, with its class and its hooks, which capture refuses."""
    made = with_class(nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad), p)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        setattr(made, hooks, getattr(p, hooks))
    return made


def duplicate(x: DTensor) -> torch.Tensor:
    """A copy without gradient, as ``copy.deepcopy`` makes; plain Parameters lose attributes."""
    is_parameter, kind = isinstance(x, nn.Parameter), class_of(x)
    made: torch.Tensor = x.detach().clone()
    if is_parameter:
        made = nn.Parameter(made, x.requires_grad)
    elif isinstance(x, Output):
        made = Output.of(made)  # type: ignore[arg-type]
    if not is_parameter or getattr(kind, "__deepcopy__", None) is not nn.Parameter.__deepcopy__:
        vars(made).update(attributes_on(x))
    return with_class(made, x)

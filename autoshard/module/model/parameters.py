"""Parameters and buffers taken over from the model: attributes, clamping, moved-from originals."""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from autoshard.errors import AutoshardError, SharedStateError
from autoshard.module.dtensors.outputs import ShardedOutput
from autoshard.module.model.closures import copy_with_memo
from autoshard.module.model.submodules import shard_like
from autoshard.passes.capture.exported.tensor_attributes import (
    MOVED_MARK,
    eager_tensor_class,
    user_attributes,
    with_user_class,
)
from autoshard.passes.capture.polyfills.parameter_writes import ClampBounds
from autoshard.passes.capture.refusals.aliasing import storages_of

_PLAIN_CLASSES = (Tensor, nn.Parameter)


def carry_attributes(tensors: Mapping[str, Tensor], new: Mapping[int, Tensor], memo: Mapping[int, Any]) -> None:
    """Copy the attributes that users set on the ``tensors``, by name, to their successors (``new``:
    by id of the old tensor; ``memo``: of modules), also inside functions and containers. A
    tensor of the parameter's shape, such as a mask, is sharded like the parameter."""
    memory = storages_of(tensors.values())
    for name, old in tensors.items():
        for attribute, value in user_attributes(old).items():
            if isinstance(value, Tensor) and id(value) not in new and not memory.isdisjoint(storages_of([value])):
                raise SharedStateError(
                    f"attribute {attribute!r} of {name!r} is a view of the model's tensors, and the sharded "
                    "module would not keep that memory. Delete it, and set it on the sharded module's parameter."
                )
            made, target = copy_with_memo(value, {**memo, **new}), new[id(old)]
            if isinstance(target, DTensor) and type(made) in _PLAIN_CLASSES and made.shape == old.shape:
                made = shard_like(made, target)
            setattr(target, attribute, made)


def meta_parameter(p: nn.Parameter) -> nn.Parameter:
    """A meta stand-in of a parameter, with its class and its hooks, which capture refuses."""
    made = with_user_class(nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad), p)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        setattr(made, hooks, getattr(p, hooks))
    return made


def copy_dtensor(x: DTensor) -> Tensor:
    """A copy without gradient, as ``copy.deepcopy`` makes; plain Parameters lose attributes."""
    is_parameter, kind = isinstance(x, nn.Parameter), eager_tensor_class(x)
    made: Tensor = x.detach().clone()
    if is_parameter:
        made = nn.Parameter(made, x.requires_grad)
    elif isinstance(x, ShardedOutput):
        made = ShardedOutput.of(made)  # type: ignore[arg-type]
    if not is_parameter or getattr(kind, "__deepcopy__", None) is not nn.Parameter.__deepcopy__:
        vars(made).update(user_attributes(x))
    return with_user_class(made, x)


def clamp_parameters(parameters: Iterable[tuple[Any, ClampBounds]]) -> None:
    """Clamp parameters or shards to their bounds; as for ``.data``, autograd does not see it."""
    for parameter, (low, high) in parameters:
        held = parameter.detach()
        own: Tensor = held.to_local() if isinstance(held, DTensor) else held
        own.data.clamp_(low, high)


log = logging.getLogger("autoshard")

_MODULE_NUMBERS = itertools.count()
_MOVED_TO: weakref.WeakKeyDictionary[nn.Module, tuple[int, weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()
"""sharded module → (its number, its model)"""


def mark_moved_from(model: nn.Module, inside: Collection[str], sharded: nn.Module) -> None:
    """Mark parameters as moved; warn of those shared with another compiled model.
    ``inside``: names shared with its own submodules."""
    _watch_optimizers()
    number, others = next(_MODULE_NUMBERS), {n for n, of in _MOVED_TO.values() if of() is not model}
    _MOVED_TO[sharded] = number, weakref.ref(model)
    named = dict(model.named_parameters())
    if shared := [name for name, p in named.items() if name not in inside and getattr(p, MOVED_MARK, None) in others]:
        log.warning(
            "%s shares %r (and %d more) with another compiled model. Each sharded module now has "
            "its own copy. To train one tensor, assign it: second.x = first.x",
            type(model).__name__,
            shared[0],
            len(shared) - 1,
        )
    for p in named.values():
        setattr(p, MOVED_MARK, number)


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse_stale_step)


def _refuse_stale_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a step on moved-from parameters without any gradient."""
    if len(args) > 1 or kwargs.get("closure") is not None:  # the closure computes gradients
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if all(p.grad is None for p in parameters) and any(hasattr(p, MOVED_MARK) for p in parameters):
        raise AutoshardError(
            "this optimizer has the parameters of a model from before autoshard.compile. None of them has a gradient, "
            "so its step would train nothing. Use the sharded module's parameters: Optimizer(sharded.parameters())."
        )

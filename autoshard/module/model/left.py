"""A model's own parameters, which a sharded module has taken over since.

The step of an optimizer that was made of them would train nothing. Another model that shares them has its own when it is
compiled, too.
"""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Collection
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from autoshard.errors import AutoshardError

log = logging.getLogger("autoshard")

_MARK = "_autoshard_left"
"""of a parameter that was left, the number of the sharded module that took it over last"""
_NUMBERS = itertools.count()
_TAKEN: weakref.WeakKeyDictionary[nn.Module, tuple[int, weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()
"""sharded module → its number, and the model that it is of"""


def leave(model: nn.Module, inside: Collection[str], sharded: nn.Module) -> None:
    """Know that the parameters of the user's model have successors in a sharded module, and tell of those that the sharded
    module of another model has, too. ``inside``: those that it shares with modules inside of it."""
    _watch()
    number, others = next(_NUMBERS), {n for n, of in _TAKEN.values() if of() is not model}
    _TAKEN[sharded] = number, weakref.ref(model)
    named = dict(model.named_parameters())
    if shared := [name for name, p in named.items() if name not in inside and getattr(p, _MARK, None) in others]:
        log.warning(
            "%s shares %r (and %d more) with a model that is compiled, too: each sharded module has its own from now on. To "
            "train them as one, assign it: second.x = first.x",
            type(model).__name__,
            shared[0],
            len(shared) - 1,
        )
    for p in named.values():
        setattr(p, _MARK, number)


@functools.cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a step of which no parameter has a gradient, where some were left; the user may well train his own model."""
    if len(args) > 1 or kwargs.get("closure") is not None:  # it makes the gradients
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if all(p.grad is None for p in parameters) and any(hasattr(p, _MARK) for p in parameters):
        raise AutoshardError(
            "this optimizer was made of the parameters of a model before autoshard.compile took them over, and none of them "
            "has a gradient: its step would train nothing. Make it of the sharded module's: Optimizer(sharded.parameters())."
        )

"""Moved-from parameters: the originals, after a sharded module has taken them over.

An optimizer made of them would train nothing. Another compiled model that shares them gets its own.
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
"""attribute of a moved-from parameter: number of the sharded module that took it last"""
_NUMBERS = itertools.count()
_TAKEN: weakref.WeakKeyDictionary[nn.Module, tuple[int, weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()
"""sharded module → (its number, its model)"""


def leave(model: nn.Module, inside: Collection[str], sharded: nn.Module) -> None:
    """Mark parameters as moved; warn of those shared with another compiled model.
    ``inside``: names shared with its own submodules."""
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
    """Refuse a step on moved-from parameters without any gradient."""
    if len(args) > 1 or kwargs.get("closure") is not None:  # the closure computes gradients
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if all(p.grad is None for p in parameters) and any(hasattr(p, _MARK) for p in parameters):
        raise AutoshardError(
            "this optimizer was made of the parameters of a model before autoshard.compile took them over, and none of them "
            "has a gradient: its step would train nothing. Make it of the sharded module's: Optimizer(sharded.parameters())."
        )

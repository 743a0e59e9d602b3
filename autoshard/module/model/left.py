"""Optimizers made of a model's own parameters, which a sharded module has taken over since: their steps would train nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoshard.errors import AutoshardError

_MARK = "_autoshard_left"


def leave(parameters: Iterable[torch.Tensor]) -> None:
    """Know that these parameters of the user's model have successors in a sharded module."""
    _watch()
    for p in parameters:
        setattr(p, _MARK, True)


@functools.cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a step of which no parameter has a gradient, where some were left; the user may well train his own model."""
    if len(args) > 1 or kwargs.get("closure") is not None:  # it makes the gradients
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if all(p.grad is None for p in parameters) and any(hasattr(p, _MARK) for p in parameters):
        raise AutoshardError(
            "this optimizer was made of the parameters of a model before autoshard.compile took them over, and none of them "
            "has a gradient: its step would train nothing. Make it of the sharded module's: Optimizer(sharded.parameters())."
        )

"""Functions that a model keeps in attributes, and what they hold of it: ``copy.deepcopy`` leaves them as they are."""

from __future__ import annotations

from collections.abc import Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn


def rebind(model: nn.Module, memo: Mapping[int, Any]) -> None:
    """Let the functions in attributes of ``model``, a copy, hold its modules and tensors instead of the original's.

    ``memo``: that of the copy, id of an original → its copy. A lambda over ``self`` would read the original's parameters.
    """
    for module in model.modules():
        _rebind_in(vars(module), memo, {})


def _rebind_in(holder: Any, memo: Mapping[int, Any], seen: dict[int, Any]) -> None:
    for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
        if isinstance(value, FunctionType):
            if (made := _rebound(value, memo, seen)) is not value:
                holder[key] = made
        elif type(value) in (dict, list) or (isinstance(value, dict) and str(key).endswith("_hooks")):
            _rebind_in(value, memo, seen)


def _rebound(function: FunctionType, memo: Mapping[int, Any], seen: dict[int, Any]) -> FunctionType:
    """The function over copies; itself where it holds nothing that was copied."""
    if id(function) in seen:
        return seen[id(function)]  # type: ignore[no-any-return]
    seen[id(function)] = function
    cells = function.__closure__ or ()
    held = (*map(_content, cells), *(function.__defaults__ or ()))
    now = [copied(x, memo, seen) for x in held]
    if all(a is b for a, b in zip(now, held, strict=True)):
        return function
    closure = tuple(cell if new is old else CellType(new) for cell, old, new in zip(cells, held, now, strict=False))
    made = FunctionType(function.__code__, function.__globals__, function.__name__, tuple(now[len(cells) :]), closure)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    seen[id(function)] = made
    return made


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it yet
        return None


def copied(x: Any, memo: Mapping[int, Any], seen: dict[int, Any]) -> Any:
    """What a function holds, or the copy of it."""
    if isinstance(x, nn.Module | torch.Tensor):
        return memo.get(id(x), x)
    if isinstance(x, MethodType):
        return MethodType(x.__func__, memo[id(x.__self__)]) if id(x.__self__) in memo else x
    return _rebound(x, memo, seen) if isinstance(x, FunctionType) else x

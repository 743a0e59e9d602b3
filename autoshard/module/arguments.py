"""What is given to ``compile`` and ``plan``, checked before anything is done with it: a value of another kind would be read
as something, such as a word as True."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import nn

from autoshard.errors import AutoshardError, CaptureError, HintError, PlanError
from autoshard.mesh import Mesh
from autoshard.module.base import ShardedModule
from autoshard.passes.capture.refusals.checks import check_kinds
from autoshard.plans.plan import Plan

T = TypeVar("T")
_HINTS = "{pattern: Shard(d) | 'colwise' | 'rowwise' | 'replicate' | {axis: placement}}"
_KINDS: dict[str, tuple[tuple[type, ...], str, type[AutoshardError]]] = {
    "hints": ((Mapping, type(None)), _HINTS, HintError),
    "plan": ((Plan, type(None)), "a Plan, from autoshard.plan or Plan.from_json", PlanError),
    "training": ((bool, type(None)), "True, False or None", PlanError),
    "gather_outputs": ((bool, type(None)), "True, False or None", PlanError),
    "strict": ((bool,), "True or False", PlanError),
    "dynamic": ((bool, Mapping), "True, False or {input: {dim: name}}, such as {'input_ids': {0: 'batch'}}", HintError),
}
"""argument → the kinds of values that it takes, in words, and the error for another"""


def check_arguments(model: Any, args: Any, kwargs: Any, **given: Any) -> None:
    """Raise a subclass of :class:`autoshard.AutoshardError` for what is of no kind that the argument takes.

    ``args``, ``kwargs``: the example's; ``given``: arguments of :func:`autoshard.compile` by name, all in the table above.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"the model is an nn.Module, got {_described(model)}")
    check_kinds(model)
    for name, part in model.named_modules():
        if isinstance(part, ShardedModule):
            what = f"its module {name!r}" if name else "the model"
            raise CaptureError(f"{what} is sharded already, by autoshard.compile: compile what that was made of")
    if _is_mesh(args):
        raise CaptureError(
            f"example_args is a mesh, {args!r:.60}: the model comes first, then the mesh, then the arguments"
        )
    if isinstance(args, torch.Tensor) or not isinstance(args, Sequence):
        named = "; of arguments by name: example_kwargs={…}" if isinstance(args, Mapping) else ""
        raise CaptureError(
            f"example_args is a tuple of the arguments, got one {type(args).__name__}: write (x,){named}"
        )
    if not (kwargs is None or isinstance(kwargs, Mapping)):
        raise CaptureError(f"example_kwargs is a dict of the arguments by name, got {type(kwargs).__name__}")
    for name, value in given.items():
        kinds, meant, error = _KINDS[name]
        if not isinstance(value, kinds):
            raise error(f"{name}={value!r:.60}: give {meant}")


def _described(x: Any) -> str:
    """What somebody gave as a model, whatever its own methods answer."""
    if isinstance(x, type):
        return f"the class {x.__name__}: make one, {x.__name__}(…)"
    if isinstance(x, torch.export.ExportedProgram):
        return "an ExportedProgram: give the module that was exported, or its .module()"
    return f"{x!r:.60}" if x is None or type(x) in (str, int, float, FunctionType) else object.__repr__(x)


def _is_mesh(x: Any) -> bool:
    sizes = isinstance(x, Mapping) and bool(x) and all(type(n) is int for n in x.values())
    return sizes or isinstance(x, Mesh) or hasattr(x, "mesh_dim_names")


def own(given: T) -> T:
    """``given``, a dict or a tuple of such, with copies of the dicts in it: the user may change his own later."""
    found: Any = given
    if type(found) is dict:
        found = {name: own(value) for name, value in found.items()}
    elif type(found) is tuple:
        found = tuple(map(own, found))
    return found  # type: ignore[no-any-return]

"""Argument checks of ``compile`` and ``plan``: a wrong type would be misread, a str as True."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import nn

from autoshard.errors import AutoshardError, CaptureError, HintError, PlanError
from autoshard.mesh import Mesh
from autoshard.module.parts.between import matches_part
from autoshard.module.sharded_module import ShardedModule
from autoshard.passes.capture.refusals.checks import check_module_classes
from autoshard.plans.plan import Plan

CopyableT = TypeVar("CopyableT")
_HINTS = "{pattern: Shard(d) | 'colwise' | 'rowwise' | 'replicate' | {axis: placement}}"
_ARGUMENT_TYPES: dict[str, tuple[tuple[type, ...], str, type[AutoshardError]]] = {
    "hints": ((Mapping, type(None)), _HINTS, HintError),
    "plan": ((Plan, type(None)), "a Plan, from autoshard.plan or Plan.from_json", PlanError),
    "training": ((bool, type(None)), "True, False or None", PlanError),
    "gather_outputs": ((bool, type(None)), "True, False or None", PlanError),
    "strict": ((bool,), "True or False", PlanError),
    "dynamic": ((bool, Mapping), "True, False or {input: {dim: name}}, such as {'input_ids': {0: 'batch'}}", HintError),
}
"""argument → accepted types, their description, and the error for other types"""


def check_arguments(model: Any, args: Any, kwargs: Any, **given: Any) -> None:
    """Raise a subclass of :class:`autoshard.AutoshardError` for an argument of the wrong type.
    ``args``, ``kwargs``: the example's; ``given``: further arguments of ``compile`` by name."""
    if not isinstance(model, nn.Module):
        raise CaptureError(f"the model is an nn.Module, got {_model_in_words(model)}")
    check_module_classes(model)
    for name, part in model.named_modules():
        if isinstance(part, ShardedModule):
            what = f"its module {name!r}" if name else "the model"
            raise CaptureError(f"{what} is sharded already, by autoshard.compile. Compile the original model")
    if _is_mesh(args):
        raise CaptureError(
            f"example_args is a mesh, {args!r:.60}: the model comes first, then the mesh, then the arguments"
        )
    if isinstance(args, torch.Tensor) or not isinstance(args, Sequence):
        named = "; pass arguments by name in example_kwargs={…}" if isinstance(args, Mapping) else ""
        raise CaptureError(
            f"example_args is a tuple of the arguments, got one {type(args).__name__}: write (x,){named}"
        )
    if not (kwargs is None or isinstance(kwargs, Mapping)):
        raise CaptureError(f"example_kwargs is a dict of the arguments by name, got {type(kwargs).__name__}")
    for name, value in given.items():
        kinds, meant, error = _ARGUMENT_TYPES[name]
        if not isinstance(value, kinds):
            raise error(f"{name}={value!r:.60}: give {meant}")


def _model_in_words(x: Any) -> str:
    """Text for an object given as a model; calls no method of user classes."""
    if isinstance(x, type):
        return f"the class {x.__name__}: make one, {x.__name__}(…)"
    if isinstance(x, torch.export.ExportedProgram):
        return "an ExportedProgram: give the module that was exported, or its .module()"
    return f"{x!r:.60}" if x is None or type(x) in (str, int, float, FunctionType) else object.__repr__(x)


def check_parts(model: nn.Module, parts: Any) -> Any:
    """``parts`` of ``compile``; :class:`CaptureError` for other types and unmatched patterns."""
    if parts is None or parts == "auto":
        return parts
    if isinstance(parts, str) or not isinstance(parts, Sequence) or not all(isinstance(p, str) for p in parts):
        raise CaptureError(f"parts={parts!r:.60}: give 'auto', None, or a list of patterns of module names")
    names = [path for path, _ in model.named_modules() if path]
    for pattern in parts:
        if not any(matches_part(path, pattern) for path in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
            raise CaptureError(f"parts: {pattern!r} matches no module. Nearest: {', '.join(near)}")
    return tuple(parts)


def _is_mesh(x: Any) -> bool:
    sizes = isinstance(x, Mapping) and bool(x) and all(type(n) is int for n in x.values())
    return sizes or isinstance(x, Mesh) or hasattr(x, "mesh_dim_names")


def copy_containers(given: CopyableT) -> CopyableT:
    """A copy of ``given`` (nested dicts, tuples): the user may change the originals later."""
    found: Any = given
    if type(found) is dict:
        found = {name: copy_containers(value) for name, value in found.items()}
    elif type(found) is tuple:
        found = tuple(map(copy_containers, found))
    return found

"""Checks of a call's inputs: refused in a sentence before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.errors import CaptureError
from autoshard.module.model.state import default_device
from autoshard.module.programs.carried import is_left
from autoshard.module.programs.executable import Executable
from autoshard.passes.capture.exported.arguments import argument_paths
from autoshard.passes.capture.refusals.checks import check_dense


def check_leaves(model: nn.Module, leaves: Sequence[Any], spec: Any, device: str | None) -> None:
    """Raise :class:`CaptureError` for inputs without data, on another device, or not dense.

    ``leaves``, ``spec``: of the arguments. ``device``: type of the module's; None if inputs are
    moved.
    """
    if default_device().type == "meta":
        raise CaptureError(
            "the default device is meta, which has no data: call the module outside of torch.device('meta')"
        )

    def name(i: int) -> str:
        return argument_paths(model, pytree.tree_unflatten(leaves, spec))[i]

    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor) or is_left(leaf):
            continue
        x = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
        kind = x.device.type
        if kind == "meta" or (device not in (None, kind) and (x.dim() or kind != "cpu")):
            what = "it has no data" if kind == "meta" else f"the module's tensors lie on {device}"
            raise CaptureError(
                f"input {name(i)!r} of {type(model).__name__} comes on device {kind}, and {what}. Move it to the device of "
                "the module."
            )
        check_dense(x, partial(name, i))


def check_trained(outside: Iterable[torch.Tensor]) -> None:
    """Raise :class:`CaptureError` if a tensor read ``outside`` of the model requires a gradient.

    For calls that record none although grad mode is on: eager would record it.
    """
    for x in outside:
        if x.requires_grad:
            raise CaptureError(
                f"the forward reads a tensor of shape {list(x.shape)} that requires a gradient and is no parameter of the "
                "model: its program would not give it one. Make it an nn.Parameter of the model, read its .detach(), or call "
                "under torch.no_grad()."
            )


def beside(error: CaptureError, programs: Sequence[Executable], leaves: Sequence[Any]) -> CaptureError:
    """``error``, extended by inputs whose dtype differs from earlier compilations."""
    if not programs or len(programs[0].graph.flat_inputs) != len(leaves):
        return error
    graph, before = programs[0].graph, programs[0].inputs
    fqns = {i.name: i.fqn for i in graph.inputs}
    changed = []
    for name, leaf in zip(graph.flat_inputs, leaves, strict=True):
        if name is not None and isinstance(leaf, torch.Tensor):
            dtype = str(leaf.dtype).removeprefix("torch.")
            if dtype != before[name]["dtype"]:
                changed.append(f"{fqns[name]!r} with {before[name]['dtype']} and comes with {dtype}")
    if not changed:
        return error
    return CaptureError(f"{str(error).rstrip('.')}. The module was compiled for input {', '.join(changed)}.")

"""Guards of a call other than its arguments: torch's global modes, and the module's state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from zlib import crc32

import torch
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module

from autoshard.errors import CaptureError
from autoshard.module.model.hooks import Hook
from autoshard.passes.capture.answers.eager import autograd_modes


@dataclass(frozen=True)
class State:
    """What a program is specialized for beside the arguments; equal states compute alike."""

    recorded: bool
    """gradients are recorded: the program has a backward"""
    grad: bool
    """grad mode, which a forward may query even if nothing requires a gradient"""
    inference: bool
    """inference mode, which a forward may query"""
    modes: tuple[bool, ...]
    """train or eval, of every module"""
    trained: tuple[bool, ...]
    """requires_grad of each parameter, which a forward may query even if nothing is recorded"""
    tensors: tuple[Any, ...]
    """shape, dtype, device and placements of every parameter and buffer"""
    autocast: tuple[tuple[str, torch.dtype, bool], ...]
    """per device type under autocast: (device type, dtype, cache enabled)"""
    defaults: tuple[Any, ...]
    """default dtype and device, determinism, autograd modes that a forward may query"""
    hooks: tuple[Hook, ...] = ()
    """forward hooks of submodules"""

    def __hash__(self) -> int:
        return self.number

    @cached_property
    def number(self) -> int:
        """32-bit hash, equal in every process."""
        return crc32(repr(self).encode())


def default_device() -> torch.device:
    """:func:`torch.get_default_device` without its per-call search, unless a mode is active."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else _CPU


_GLOBAL = "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks"
_CPU = torch.device("cpu")


def defaults() -> tuple[Any, ...]:
    """The present ``State.defaults``."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return torch.get_default_dtype(), str(default_device()), deterministic, *autograd_modes()


def requires_grad(*tensors: Iterable[Any]) -> bool:
    """Whether any of these is a tensor that requires a gradient."""
    return any(isinstance(x, torch.Tensor) and x.requires_grad for group in tensors for x in group)


def is_usual() -> bool:
    """Whether the context of a call has nothing that :func:`check_call` would inspect."""
    hooks = any(vars(torch_module)[name] for name in _GLOBAL)
    inside = torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None
    return not (inside or hooks or forward_ad._current_level >= 0 or torch.compiler.is_compiling())


def _is_dual(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None


def check_call(leaves: Sequence[Any], held: Callable[[], Sequence[torch.Tensor]]) -> None:
    """Refuse contexts that programs cannot follow. ``held()``: parameters and buffers."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise CaptureError(
            "a sharded module is called inside a torch.func transform (vmap, grad, jvp, functionalize), which its programs "
            "cannot follow. Use torch.autograd outside of it, or transform the model before autoshard.compile."
        )
    if forward_ad._current_level >= 0 and any(map(_is_dual, (*leaves, *held()))):
        raise CaptureError(
            "a sharded module is called with dual tensors: its programs have no forward-mode derivative. "
            "Use backward(), or torch.autograd.grad."
        )
    if torch.compiler.is_exporting():
        raise CaptureError(
            "a sharded module cannot be exported by torch.export: it is a program of every rank already. Export the model "
            "before autoshard.compile, with sharded.full_state_dict(); sharded.save(directory) writes the ranks' programs."
        )
    if torch._C._get_tracing_state() is not None:
        raise CaptureError(
            "a sharded module cannot be traced by torch.jit. sharded.save(directory) writes its program."
        )
    for name in _GLOBAL:
        for hook in vars(torch_module)[name].values():
            if not getattr(hook, "__module__", "").startswith("torch."):
                raise CaptureError(
                    f"a global module hook is registered ({getattr(hook, '__qualname__', hook)}): a sharded module's programs "
                    "do not call the model's modules. Remove it, or use hooks of the sharded module itself."
                )

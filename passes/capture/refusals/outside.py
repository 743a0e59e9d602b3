"""Tensors that a forward reads from outside the attributes of the model's modules.

Registered parameters and buffers read through a list, dict or closure are replaced by their traced
tensors. Others (a global, a module hidden in a list) become constants. With training, a
constant that requires a gradient is refused: only eager would compute it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autoshard.frames import is_ours, stack
from autoshard.passes.capture.observer import Call, Forward, Observer, Refusals
from autoshard.passes.capture.refusals.explain import IN_TRANSFORM

_read: ContextVar[dict[int, tuple[torch.Tensor, int]]] = ContextVar("read")


@contextlib.contextmanager
def reading_outside() -> Iterator[Mapping[int, tuple[torch.Tensor, int]]]:
    """Yields id → (tensor with data that a trace inside has read, its version counter)."""
    found: dict[int, tuple[torch.Tensor, int]] = {}
    token = _read.set(found)
    try:
        yield found
    finally:
        _read.reset(token)


class ReadsOutside(Observer):
    """Records outside tensors. With ``training``, refuses those that would get a gradient."""

    def __init__(self, training: bool, refuse: Refusals) -> None:
        self.training, self.refuse = training, refuse
        self.own: dict[int, torch.Tensor] = {}

    def begin(self, forward: Forward) -> None:
        self.own = {i: x for i, x in forward.own.items() if id(x) != i}

    def before(self, call: Call) -> Call | None:
        """The call with the model's own tensors replaced by traced ones."""
        if self.own.keys().isdisjoint(map(id, call.operands)):
            return None
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: self.own.get(id(x), x), (call.args, call.kwargs))
        return replace(call, args=args, kwargs=kwargs)

    def after(self, call: Call, result: Any) -> Any:
        """Refuse a result that propagates a gradient to an outside tensor."""
        outside = [x for x in call.operands if _is_outside(x)]
        read = _read.get()
        for x in outside:
            read.setdefault(id(x), (x, x._version))
        trained = next((x for x in outside if x.requires_grad), None)
        if not self.training or trained is None:
            return result
        if any(isinstance(x, torch.Tensor) and x.requires_grad for x in pytree.tree_leaves(result)):
            if torch._C._functorch.is_functorch_wrapped_tensor(trained):
                raise self.refuse(IN_TRANSFORM)
            raise self.refuse(
                f"the forward reads {_name(trained)} {list(trained.shape)}, which requires a gradient and is no parameter of "
                "the model: its program would not give it one. Make it an nn.Parameter of the model, or its module a part "
                "of it, or read its .detach()."
            )
        return result


def _is_outside(x: torch.Tensor) -> bool:
    """Whether ``x`` has data: traced tensors, the model's among them, have none."""
    return type(x) in (torch.Tensor, nn.Parameter) and not x.is_meta and not x.is_inference()


def _name(x: torch.Tensor) -> str:
    """Description of ``x`` by its name in the running user code, for errors."""
    for f in stack():
        if is_ours(f.f_code.co_filename):
            continue
        for own in [value for value in list(f.f_locals.values()) if isinstance(value, nn.Module)]:
            if name := next((n for n, p in (*own._parameters.items(), *vars(own).items()) if p is x), ""):
                return f"{name!r} of a {type(own).__name__}"
        if name := next((n for n in f.f_code.co_freevars if f.f_locals.get(n) is x), ""):
            return f"{name!r} of an enclosing function"
        if name := next((n for n, value in list(f.f_globals.items()) if value is x), ""):
            return f"the global {name!r}"
    return "a tensor"

"""Side effects on autograd that a trace loses: hooks, ``backward()``, ``.data``, ``set_()``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autoshard.frames import is_users
from autoshard.passes.capture.observer import Answer, Call, Forward, Observer, Patch, Refusals

_DATA_GET, _DATA_SET = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]
_SET = torch.Tensor.set_
_REQUIRES = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_ADVICE = "Do it on the compiled module's outputs or gradients, or remove it."
_LOST: dict[Any, str] = {
    torch.Tensor.register_hook: "a tensor hook (register_hook)",
    torch.Tensor.register_post_accumulate_grad_hook: "a tensor hook (register_post_accumulate_grad_hook)",
    torch.Tensor.retain_grad: "retain_grad()",
    torch.Tensor.backward: "backward()",
    torch.autograd.backward: "torch.autograd.backward()",
    torch.autograd.grad: "torch.autograd.grad()",
}


class Gradients(Observer):
    """Refuses them if ``training``; assignments to ``.data`` and ``set_()`` always."""

    def __init__(self, training: bool, refuse: Refusals) -> None:
        self.training, self.refuse = training, refuse
        self.inputs: list[Any] = []
        self.held: list[torch.Tensor] = []

    def patches(self) -> Iterable[Patch]:
        yield torch.Tensor, "set_", lambda x, *sources, **named: self._set(x, *sources, **named)
        if self.training:
            yield torch.autograd.graph.saved_tensors_hooks, "__enter__", lambda hooks: self._saved_tensors(hooks)

    def begin(self, forward: Forward) -> None:
        self.inputs = forward.inputs
        self.held = [*forward.parameters, *(buffer for buffer, _ in forward.buffers)]

    def before(self, call: Call) -> Answer | None:
        func, args = call.func, call.args
        if func == _DATA_GET:
            return Answer(args[0].detach(), "what .data reads is a detached alias, of which export loses track")
        if func == _DATA_SET:
            raise self.refuse("the forward assigns to .data of a tensor. Compute a new tensor instead.")
        if self.training and (name := _LOST.get(func)) is not None:
            raise self.refuse(f"{name} is called in the forward; the compiled module would lose it. {_ADVICE}")
        turned_on = self.training and func in _REQUIRES and not args[0].requires_grad
        # intermediate gradients are invisible; those of outputs are compared after the trace
        if turned_on and (*args[1:], *call.kwargs.values(), True)[0] and any(args[0] is x for x in self.inputs):
            raise self.refuse(
                "the forward turns requires_grad on for its input, whose gradient the compiled module would not give. "
                "Pass it with requires_grad=True."
            )
        return None

    def _set(self, x: torch.Tensor, *sources: Any, **named: Any) -> torch.Tensor:
        """``set_()``, which bypasses function modes: only on a traced tensor, from one tensor."""
        users = is_users(sys._getframe(2).f_code.co_filename)  # export itself calls set_()
        known = any(x is other for other in (*self.inputs, *self.held)) or not isinstance(x, FakeTensor)
        given = (*sources, *named.values())
        if users and (known or len(given) != 1 or not isinstance(given[0], torch.Tensor)):
            raise self.refuse(
                "the forward calls set_() with a storage, or of an input or a tensor of the model, whose memory a program does "
                "not replace. Assign the new tensor (self.x = new), or write by copy_()."
            )
        return _SET(x, *sources, **named)

    def _saved_tensors(self, hooks: Any) -> None:
        raise self.refuse(
            "saved-tensor hooks are used in the forward; the compiled module would lose them. Remove them."
        )

"""What a forward does to gradients and a trace would lose: hooks, backwards, ``.data``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from autoshard.passes.capture.observer import Answer, Call, Forward, Observer, Patch, Refusals

_DATA_GET, _DATA_SET = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]
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
    """Refuses them where gradients are wanted (``training``); an assignment to ``.data`` always."""

    def __init__(self, training: bool, refuse: Refusals) -> None:
        self.training, self.refuse = training, refuse
        self.inputs: list[Any] = []

    def patches(self) -> Iterable[Patch]:
        if self.training:
            yield torch.autograd.graph.saved_tensors_hooks, "__enter__", lambda hooks: self._saved_tensors(hooks)

    def begin(self, forward: Forward) -> None:
        self.inputs = forward.inputs

    def before(self, call: Call) -> Answer | None:
        func, args = call.func, call.args
        if func == _DATA_GET:
            return Answer(args[0].detach(), "what .data reads is a detached alias, of which export loses track")
        if func == _DATA_SET:
            raise self.refuse("the forward assigns to .data of a tensor. Compute a new tensor instead.")
        if self.training and (name := _LOST.get(func)) is not None:
            raise self.refuse(f"{name} is called in the forward; the compiled module would lose it. {_ADVICE}")
        turned_on = self.training and func in _REQUIRES and not args[0].requires_grad
        # nobody sees the gradient of an intermediate tensor, and what outputs have is compared
        if turned_on and (*args[1:], *call.kwargs.values(), True)[0] and any(args[0] is x for x in self.inputs):
            raise self.refuse(
                "the forward turns requires_grad on for its input, whose gradient the compiled module would not give. "
                "Pass it with requires_grad=True."
            )
        return None

    def _saved_tensors(self, hooks: Any) -> None:
        raise self.refuse(
            "saved-tensor hooks are used in the forward; the compiled module would lose them. Remove them."
        )

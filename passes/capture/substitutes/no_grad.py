"""Gradients off in a forward: nodes are marked; inference_mode is traced as no_grad."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from autoshard.frames import is_ours, is_torchs
from autoshard.passes.capture.answers.eager import inference
from autoshard.passes.capture.exported.provenance import NO_GRAD, marking
from autoshard.passes.capture.observer import Answer, Call, Forward, Observer, Patch, replacing

_MADE = {
    getattr(torch.Tensor, name).__get__: answer
    for name, answer in (("requires_grad", False), ("is_leaf", True), ("grad_fn", None))
}
"""attributes of tensors made in inference mode, even with gradients turned on"""


class NoGrad(Observer):
    """Marks nodes with :data:`NO_GRAD`."""

    in_inference = False
    """whether the caller is in inference mode"""

    def patches(self) -> Iterable[Patch]:
        yield replacing(torch.fx.Graph, "create_node", marking(NO_GRAD, lambda: not torch.is_grad_enabled()))
        yield torch.inference_mode, "__enter__", _enter
        yield torch.inference_mode, "__exit__", _exit

    def begin(self, forward: Forward) -> None:
        self.in_inference = inference.get()

    def before(self, call: Call) -> Answer | None:
        if call.func is torch._C._set_grad_enabled and inference.get() and not self.in_inference:
            return Answer(None, "nothing is recorded in inference mode, whether gradients are on or not")
        if not self.in_inference or call.func not in _MADE or not inference.get() or call.frame is None:
            return None
        own = is_torchs(call.frame) or is_ours(call.frame.f_code.co_filename)
        return None if own or call.args[0].grad_fn is None else Answer(_MADE[call.func], "")


def _enter(self: Any) -> None:
    token = inference.set(False)
    self._traced_as = torch.set_grad_enabled(not self.mode), token
    self._traced_as[0].__enter__()
    inference.set(self.mode)


def _exit(self: Any, *error: Any) -> None:
    grad, token = self._traced_as
    inference.set(False)
    grad.__exit__(*error)
    inference.reset(token)

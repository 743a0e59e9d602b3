"""Queries about a tensor's history or memory (``grad_fn``, ``data_ptr()``), wrong in a trace."""

from __future__ import annotations

from typing import Any

import torch

from autoshard.frames import is_ours, is_torchs
from autoshard.passes.capture.observer import Answer, Call, Forward, Observer, Refusals

_OF_INPUTS = {getattr(torch.Tensor, name).__get__: name for name in ("is_leaf", "grad_fn")}
_OF_ALL = {
    **{getattr(torch.Tensor, name).__get__: name for name in ("_version", "_cdata")},
    **{getattr(torch.Tensor, name): f"{name}()" for name in ("data_ptr", "is_inference", "is_set_to")},
    torch.is_inference: "is_inference()",
}
_REQUIRES = getattr(torch.Tensor, "requires_grad").__get__  # noqa: B009


class Asked(Observer):
    """Refuses identity queries; ``requires_grad`` of an input is the caller's."""

    def __init__(self, refuse: Refusals) -> None:
        self.refuse = refuse
        self.trained: dict[int, bool] = {}
        """id of an input → whether the caller's requires a gradient"""

    def begin(self, forward: Forward) -> None:
        self.trained = {id(x): trained for x, trained in zip(forward.inputs, forward.trained, strict=True)}

    def before(self, call: Call) -> Answer | None:
        func: Any = call.func
        frame = call.frame
        if frame is None or not call.args or is_torchs(frame) or is_ours(frame.f_code.co_filename):
            return None
        trained = self.trained.get(id(call.args[0]))
        if func == _REQUIRES and trained is not None and trained != call.args[0].requires_grad:
            return Answer(trained, "the input requires a gradient as the caller's does")
        asked = _OF_ALL.get(func) or (_OF_INPUTS.get(func) if trained else None)
        if asked is not None:
            raise self.refuse(
                f"the forward asks {asked} of a tensor: the answer depends on how the tensor came to be or lies in memory, and "
                "would be a constant of the program. Ask outside of the forward, and pass the answer as an argument."
            )
        return None

"""``module.to(...)`` in a forward: every call converts, as export cannot replace parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch
from torch import nn

from autoshard.passes.capture.observer import Observer, Patch

log = logging.getLogger("autoshard")


class Conversions(Observer):
    """Converts parameters and buffers per call. Tensor conversions are traced as usual."""

    def patches(self) -> Iterable[Patch]:
        yield nn.Module, "_apply", _apply_per_call


def _apply_per_call(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    for module in self.modules() if recurse else (self,):
        for tensors in (module._parameters, module._buffers):
            for name, before in [(n, t) for n, t in tensors.items() if t is not None]:
                after = fn(before)
                if (before.dtype, before.device) == (after.dtype, after.device):
                    continue
                log.warning(
                    "the forward converts %r of a %s to %s; the compiled module does so in every call and keeps it in "
                    "%s. Convert the module before compiling to store it so.", name, type(module).__name__,
                    after.dtype, before.dtype,
                )  # fmt: skip
                tensors[name] = after  # type: ignore[assignment]
    return self

"""Gradients off in a forward: ops are marked, and inference_mode is no_grad, which export keeps: with the same values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from autoshard.passes.capture.answers.eager import inference
from autoshard.passes.capture.exported.provenance import NO_GRAD, marking
from autoshard.passes.capture.observer import Observer, Patch, replacing


class NoGrad(Observer):
    """Marks nodes with :data:`NO_GRAD`."""

    def patches(self) -> Iterable[Patch]:
        yield replacing(torch.fx.Graph, "create_node", marking(NO_GRAD, lambda: not torch.is_grad_enabled()))
        yield torch.inference_mode, "__enter__", _enter
        yield torch.inference_mode, "__exit__", _exit


def _enter(self: Any) -> None:
    self._traced_as = torch.set_grad_enabled(not self.mode), inference.set(self.mode)
    self._traced_as[0].__enter__()


def _exit(self: Any, *error: Any) -> None:
    grad, token = self._traced_as
    grad.__exit__(*error)
    inference.reset(token)

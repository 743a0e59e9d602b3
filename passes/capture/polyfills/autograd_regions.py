"""Marks on traced nodes: gradients off, and activation checkpoints to recompute.
``inference_mode`` is traced as ``no_grad``, which export keeps and which computes the same
values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
import torch.utils.checkpoint as checkpoint
from torch import Tensor, fx
from torch.fx.traceback import annotate, preserve_node_meta

from autoshard.frames import is_autoshard_file, is_torch_frame
from autoshard.passes.capture.exported.provenance import CHECKPOINT_KEY, NO_GRAD_KEY, marking_nodes
from autoshard.passes.capture.observer import (
    ObservedCall,
    Observer,
    ObserverAnswer,
    Patch,
    RefusalLog,
    TracedForward,
    replacement_patch,
)
from autoshard.passes.capture.specialization.eager_semantics import eager_inference_mode
from autoshard.torch_private.autograd import set_grad_enabled
from autoshard.torch_private.capture import CHECKPOINT_GENERATOR

_INFERENCE_ATTRIBUTES = {
    getattr(Tensor, name).__get__: answer
    for name, answer in (("requires_grad", False), ("is_leaf", True), ("grad_fn", None))
}
"""attributes of tensors made in inference mode, even with gradients turned on"""


class GradModeMarks(Observer):
    """Marks nodes with :data:`NO_GRAD_KEY`."""

    in_inference = False
    """whether the caller is in inference mode"""

    def patches(self) -> Iterable[Patch]:
        yield replacement_patch(
            torch.fx.Graph, "create_node", marking_nodes(NO_GRAD_KEY, lambda: not torch.is_grad_enabled())
        )
        yield torch.inference_mode, "__enter__", _enter_as_no_grad
        yield torch.inference_mode, "__exit__", _exit_as_no_grad

    def begin(self, forward: TracedForward) -> None:
        self.in_inference = eager_inference_mode.get()

    def before(self, call: ObservedCall) -> ObserverAnswer | None:
        if call.func is set_grad_enabled and eager_inference_mode.get() and not self.in_inference:
            return ObserverAnswer(None, "inference mode records no gradients, whether they are on or off")
        if (
            not self.in_inference
            or call.func not in _INFERENCE_ATTRIBUTES
            or not eager_inference_mode.get()
            or call.frame is None
        ):
            return None
        own = is_torch_frame(call.frame) or is_autoshard_file(call.frame.f_code.co_filename)
        return None if own or call.args[0].grad_fn is None else ObserverAnswer(_INFERENCE_ATTRIBUTES[call.func], "")


def _enter_as_no_grad(self: Any) -> None:
    token = eager_inference_mode.set(False)
    self._traced_as = torch.set_grad_enabled(not self.mode), token
    self._traced_as[0].__enter__()
    eager_inference_mode.set(self.mode)


def _exit_as_no_grad(self: Any, *error: Any) -> None:
    grad, token = self._traced_as
    eager_inference_mode.set(False)
    grad.__exit__(*error)
    eager_inference_mode.reset(token)


class ActivationCheckpoints(Observer):
    """With ``training``, marks nodes in checkpoints by number, nested ones as the outermost."""

    def __init__(self, training: bool, refuse: RefusalLog) -> None:
        self.training, self.refuse = training, refuse
        self.count = 0
        self.inside = False

    def patches(self) -> Iterable[Patch]:
        if self.training:
            yield checkpoint, CHECKPOINT_GENERATOR, self._around
            yield checkpoint.CheckpointFunction, "apply", staticmethod(self._reentrant)

    @contextlib.contextmanager
    def _marked(self) -> Iterator[None]:
        if self.inside:
            yield
            return
        self.count, self.inside = self.count + 1, True
        try:
            with preserve_node_meta(), annotate({CHECKPOINT_KEY: self.count}):
                yield
        finally:
            self.inside = False

    def _around(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Generator that ``checkpoint`` advances before and after the call."""
        with self._marked():
            yield

    def _reentrant(self, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        found = [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]
        if torch.is_grad_enabled() and not any(x.requires_grad for x in found):
            raise self.refuse(
                "torch.utils.checkpoint with use_reentrant=True gets no input that requires a gradient, so "
                "eager computes no gradients inside it. Use use_reentrant=False (Hugging Face: "
                "gradient_checkpointing_kwargs={'use_reentrant': False}), or let the inputs require gradients."
            )
        with self._marked():
            return function(*args)


def checkpoint_of(node: fx.Node) -> int:
    """Number of the checkpoint of ``node``; 0: none."""
    return int((node.meta.get("custom") or {}).get(CHECKPOINT_KEY, 0))

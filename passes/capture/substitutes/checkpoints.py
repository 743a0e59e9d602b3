"""Activation checkpointing (``torch.utils.checkpoint``): traced nodes are marked for recompute."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
import torch.utils.checkpoint as checkpoint
from torch import fx
from torch.fx.traceback import annotate, preserve_node_meta

from autoshard.passes.capture.exported.provenance import CHECKPOINT
from autoshard.passes.capture.observer import Observer, Patch, Refusals

_GENERATOR = "_checkpoint_without_reentrant_generator"
if hasattr(checkpoint, f"{_GENERATOR}_impl"):  # torch >= 2.14
    _GENERATOR += "_impl"


class Checkpoints(Observer):
    """With ``training``, marks nodes in checkpoints by number, nested ones as the outermost."""

    def __init__(self, training: bool, refuse: Refusals) -> None:
        self.training, self.refuse = training, refuse
        self.count = 0
        self.inside = False

    def patches(self) -> Iterable[Patch]:
        if self.training:
            yield checkpoint, _GENERATOR, self._around
            yield checkpoint.CheckpointFunction, "apply", staticmethod(self._reentrant)

    @contextlib.contextmanager
    def _marked(self) -> Iterator[None]:
        if self.inside:
            yield
            return
        self.count, self.inside = self.count + 1, True
        try:
            with preserve_node_meta(), annotate({CHECKPOINT: self.count}):
                yield
        finally:
            self.inside = False

    def _around(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Generator that ``checkpoint`` advances before and after the call."""
        with self._marked():
            yield

    def _reentrant(self, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        found = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
        if torch.is_grad_enabled() and not any(x.requires_grad for x in found):
            raise self.refuse(
                "torch.utils.checkpoint with use_reentrant=True gets no input that requires a gradient, so eager computes "
                "no gradients of what is inside. Use use_reentrant=False (Hugging Face: "
                "gradient_checkpointing_kwargs={'use_reentrant': False}), or have the inputs require gradients."
            )
        with self._marked():
            return function(*args)


def checkpoint_of(node: fx.Node) -> int:
    """Number of the checkpoint of ``node``; 0: none."""
    return int((node.meta.get("custom") or {}).get(CHECKPOINT, 0))

"""Backward of custom ops on unsharded tensors by recomputing a differentiable forward."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any

import torch

from autoshard.runtime.transport.handed_on import register


def differentiate(op: Any, forward: Callable[..., torch.Tensor], of: Collection[int] | None = None) -> None:
    """Register a backward for custom op ``op`` that recomputes ``forward`` of the same arguments.

    ``of``: numbers of the arguments that get gradients; None: all tensors."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.form = [None if isinstance(x, torch.Tensor) else x for x in inputs]
        ctx.save_for_backward(*(x if isinstance(x, torch.Tensor) else None for x in inputs))

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        again = torch.is_grad_enabled()  # create_graph
        wanting = [n and (of is None or i in of) for i, n in enumerate(ctx.needs_input_grad)]
        saved = zip(ctx.saved_tensors, itertools.chain(wanting, itertools.repeat(False)), strict=False)
        given = [t if t is None or (again and n) else t.detach().requires_grad_(n) for t, n in saved]
        with torch.enable_grad():
            out = forward(*(x if t is None else t for t, x in zip(given, ctx.form, strict=True)))
        wanted = [t for t, n in zip(given, wanting, strict=False) if n]
        found = iter(torch.autograd.grad(out, wanted, grad, create_graph=again))
        return tuple(next(found) if n else None for n in wanting)

    register(op, backward, save)

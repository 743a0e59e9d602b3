"""Grouped matrix products as one op, for the dtypes that ``F.grouped_mm`` runs on and cannot be traced with."""

from __future__ import annotations

import itertools
from typing import Any

import torch


@torch.library.custom_op("autoshard::grouped_mm", mutates_args=())
def grouped_mm(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows [s, k] in consecutive groups that end at ``ends`` [e], each times its matrix of [e, k, n] → [s, n].

    Rows after the last group are zero.
    """
    bounds = _bounds(ends)
    out = x.new_zeros(x.shape[0], weight.shape[2])
    for a, b, matrix in zip(bounds, bounds[1:], weight, strict=False):
        out[a:b] = x[a:b] @ matrix
    return out


@grouped_mm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


def _bounds(ends: torch.Tensor) -> list[int]:
    return [0, *ends.tolist()]


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    x, weight, ends = inputs  # the products keep each other where they are differentiated
    of_x, of_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if of_weight else None, weight if of_x else None, ends)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight, ends = ctx.saved_tensors
    bounds = _bounds(ends)
    of_x = grouped_mm(grad, weight.mT, ends) if ctx.needs_input_grad[0] else None
    if not ctx.needs_input_grad[1]:
        return of_x, None, None
    return of_x, torch.stack([x[a:b].mT @ grad[a:b] for a, b in itertools.pairwise(bounds)]), None


grouped_mm.register_autograd(_backward, setup_context=_save)

"""Expert MLPs: activations, gating, and both grouped products as one autograd node."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from autoshard.aten import aten
from autoshard.runtime.operations.grouped import matrices, parts, pieces, product
from autoshard.runtime.transport.handed_on import HandingOn

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}


def activation_of(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """One of :data:`ACTIVATIONS`, or x · sigmoid(1.702 · x) as "swish 1.702"."""
    if not name.startswith("swish "):
        return ACTIVATIONS[name]
    slope = float(name.removeprefix("swish "))
    return lambda x: x * torch.sigmoid(x * slope)


def gated_by(
    activation: Callable[[torch.Tensor], torch.Tensor],
    made: list[torch.Tensor],
    limit: float | None = None,
    shift: float = 0.0,
    interleaved: bool = False,
) -> torch.Tensor:
    """Input of the second product; ``made``: gate and up features, in one or two tensors."""
    if len(made) == 1:
        gate, up = (made[0][..., 0::2], made[0][..., 1::2]) if interleaved else made[0].chunk(2, -1)
    else:
        gate, up = made
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return activation(gate) * (up + shift if shift else up)


DERIVATIVES: dict[str, Callable[..., Any]] = {
    "silu": aten.silu_backward.grad_input,
    "gelu": aten.gelu_backward.grad_input,
    "gelu_tanh": partial(aten.gelu_backward.grad_input, approximate="tanh"),
}
"""backward kernels of the activations that :func:`gated_products` supports"""


def gated_products(
    x: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    ends: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """``(activation(gate) * up) @ second``, with [gate, up] = ``x @ first`` per group of rows.

    ``x`` [s, w] in groups ending at ``ends`` [e], ``first`` [e, w, 2h], ``second`` [e, h, v]."""
    if not ends.shape[0]:
        return _plainly(x, first, second, ends, activation)
    found: torch.Tensor = _GatedProducts.apply(x, first, second, ends, activation)
    return found


class _GatedProducts(HandingOn):
    """Both products in one node: blocks of groups stay in CPU caches, gradients need no cat."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor,
        ends: torch.Tensor,
        activation: str,
    ) -> torch.Tensor:
        work = pieces(x, ends, first.shape[2])
        out = x.new_empty(x.shape[0], second.shape[2]) if work[0].lengths else None
        places = [None] if out is None else parts(work, out)
        firsts, seconds, kept = matrices(work, first), matrices(work, second), list[torch.Tensor]()
        for n, (piece, rows, to_mid, to_out) in enumerate(zip(work, parts(work, x), firsts, seconds, strict=True)):
            made = piece.times(rows, to_mid)
            gate, up = made.chunk(2, -1)
            active = ACTIVATIONS[activation](gate)
            mid = active * up
            of_piece = piece.times(mid, to_out, places[n])
            kept += [made, active, mid]
        ctx.pieces, ctx.activation = work, activation
        ctx.save_for_backward(x, first, second, ends, *kept)
        return of_piece if out is None else out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, first, second, ends, *kept = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # create_graph
            out = _plainly(x, first, second, ends, ctx.activation)
            inputs = [t for t, n in zip((x, first, second), wanted, strict=True) if n]
            found = iter(torch.autograd.grad(out, inputs, gradient, create_graph=True))
            return *(next(found) if n else None for n in wanted), None, None
        work = ctx.pieces
        of_x = torch.empty_like(x) if wanted[0] and len(work) > 1 else None
        places = None if of_x is None else parts(work, of_x)
        of_first, of_second = (
            torch.empty_like(w) if n and work[0].lengths else None
            for w, n in zip((first, second), wanted[1:], strict=True)
        )
        given = parts(work, x), parts(work, gradient), kept[::3], kept[1::3], kept[2::3]
        through = matrices(work, first.mT) if wanted[0] else (), matrices(work, second.mT)
        rooms = [matrices(work, w if g is None else g) for w, g in ((first, of_first), (second, of_second))]
        for n, (piece, rows, mine, made, active, mid) in enumerate(zip(work, *given, strict=True)):
            (gate, up), of_made = made.chunk(2, -1), torch.empty_like(made)
            of_gate, of_up = of_made.chunk(2, -1)
            if wanted[2]:
                summed = piece.outer(mid, mine, rooms[1][n])
                of_second = summed if of_second is None else of_second
            of_mid = piece.times(mine, through[1][n])
            torch.mul(of_mid, active, out=of_up)
            torch.mul(of_mid, up, out=of_gate)
            DERIVATIVES[ctx.activation](of_gate, gate, grad_input=of_gate)
            if wanted[1]:
                summed = piece.outer(rows, of_made, rooms[0][n])
                of_first = summed if of_first is None else of_first
            if wanted[0]:
                of_piece = piece.times(of_made, through[0][n], places and places[n])
        if wanted[0]:
            of_x = of_piece if of_x is None else of_x
        return of_x, of_first, of_second, None, None


def _plainly(
    x: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    ends: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """:func:`gated_products` composed of differentiable operations."""
    return product(gated_by(ACTIVATIONS[activation], [product(x, first, ends)]), second, ends)

"""What experts make of their rows between the two products: activations, and gates times what they gate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from autoshard.runtime.operations.grouped import pieces, product
from autoshard.runtime.operations.slots import Order, ordered
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
    """What goes into the second product; ``made``: gates and what they gate, in one or two tensors."""
    if len(made) == 1:
        gate, up = (made[0][..., 0::2], made[0][..., 1::2]) if interleaved else made[0].chunk(2, -1)
    else:
        gate, up = made
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return activation(gate) * (up + shift if shift else up)


_aten = torch.ops.aten
DERIVATIVES: dict[str, Callable[..., Any]] = {
    "silu": _aten.silu_backward.grad_input,
    "gelu": _aten.gelu_backward.grad_input,
    "gelu_tanh": partial(_aten.gelu_backward.grad_input, approximate="tanh"),
}
"""of the activations that :func:`gated_products` takes"""


def gated_products(
    x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, ends: torch.Tensor, order: Order | None, activation: str
) -> torch.Tensor:
    """Rows ``x`` [s, w], which in this order are groups that end at ``ends`` [e]: ``activation(gate) * up`` of the products
    [gate, up] with ``first`` [e, w, 2h], times ``second`` [e, h, v] → [s, v], in the order of ``x``."""
    rows, back = order or (None, None)
    found: torch.Tensor = _GatedProducts.apply(x, first, second, ends, rows, back, activation)
    return found


class _GatedProducts(HandingOn):
    """As one node: on a CPU what some groups made is used while the caches hold it, and gradients of gates, and of what
    they gate, are written where they belong, not put together."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor,
        ends: torch.Tensor,
        rows: torch.Tensor | None,
        back: torch.Tensor | None,
        activation: str,
    ) -> torch.Tensor:
        ctx.pieces, ctx.activation, kept = pieces(x, ends, first.shape[2]), activation, []
        out = x.new_empty(x.shape[0], second.shape[2]) if len(ctx.pieces) > 1 else None
        for piece in ctx.pieces:
            made = piece.times(_picked(x, rows, piece.rows), first)
            gate, up = made.chunk(2, -1)
            active = ACTIVATIONS[activation](gate)
            mid = active * up
            of_piece = piece.times(mid, second, out)
            kept += [made, active, mid]
        ctx.save_for_backward(x, first, second, ends, rows, back, *kept)
        out = of_piece if out is None else out
        return out if back is None else out.index_select(0, back)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, first, second, ends, rows, back, *kept = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # it is to be differentiated
            out = _plainly(x, first, second, ends, None if rows is None else Order(rows, back), ctx.activation)
            inputs = [t for t, n in zip((x, first, second), wanted, strict=True) if n]
            found = iter(torch.autograd.grad(out, inputs, gradient, create_graph=True))
            return *(next(found) if n else None for n in wanted), None, None, None, None
        several = len(ctx.pieces) > 1
        of_x, of_first, of_second = (
            torch.empty_like(t) if n and several else None for t, n in zip((x, first, second), wanted, strict=True)
        )
        for piece, made, active, mid in zip(ctx.pieces, kept[::3], kept[1::3], kept[2::3], strict=True):
            mine = _picked(gradient, rows, piece.rows)
            (gate, up), of_made = made.chunk(2, -1), torch.empty_like(made)
            of_gate, of_up = of_made.chunk(2, -1)
            if wanted[2]:
                of_second = piece.outer(mid, mine, second, of_second)
            of_mid = piece.times(mine, second.mT)
            torch.mul(of_mid, active, out=of_up)
            torch.mul(of_mid, up, out=of_gate)
            DERIVATIVES[ctx.activation](of_gate, gate, grad_input=of_gate)
            if wanted[1]:
                of_first = piece.outer(_picked(x, rows, piece.rows), of_made, first, of_first)
            if wanted[0]:
                of_piece = piece.times(of_made, first.mT, of_x)
        if wanted[0]:
            of_x = of_piece if of_x is None else of_x
            of_x = of_x if back is None else of_x.index_select(0, back)
        return of_x, of_first, of_second, None, None, None, None


def _picked(x: torch.Tensor, order: torch.Tensor | None, rows: slice) -> torch.Tensor:
    return x[rows] if order is None else x.index_select(0, order[rows])


def _plainly(
    x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, ends: torch.Tensor, order: Order | None, activation: str
) -> torch.Tensor:
    """As :func:`gated_products`, of what autograd knows."""
    x = x if order is None else ordered(x, order)
    out = product(gated_by(ACTIVATIONS[activation], [product(x, first, ends)]), second, ends)
    return out if order is None else ordered(out, order.turned())

"""Moves of one process as autograd nodes."""

from __future__ import annotations

from typing import Any

import torch

from autoshard.runtime.transport.handed_on import HandingOn
from autoshard.runtime.transport.move import Move


class Differentiable(HandingOn):
    """A move of this rank as an autograd node; its backward is the dual move.

    A gradient is None on all ranks or on none, since they run the same program."""

    @staticmethod
    def forward(ctx: Any, comm: Any, move: Move, phase: str, x: torch.Tensor) -> torch.Tensor:
        ctx.comm, ctx.move = comm, move
        out: torch.Tensor = comm.execute(move, x, phase)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        move = ctx.move.backward()
        if torch.is_grad_enabled():
            return None, None, None, Differentiable.apply(ctx.comm, move, "backward", gradient)
        return None, None, None, ctx.comm.execute(move, gradient, "backward")

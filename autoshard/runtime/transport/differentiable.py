"""What one process moves, as a node of the autograd graph."""

from __future__ import annotations

from typing import Any

import torch

from autoshard.runtime.transport.move import Move
from autoshard.runtime.transport.node import Node


class Differentiable(Node):
    """A move of this rank as a node of the autograd graph; its backward is the dual move."""

    @staticmethod
    def forward(ctx: Any, comm: Any, move: Move, phase: str, x: torch.Tensor) -> torch.Tensor:
        ctx.comm, ctx.move = comm, move
        ctx.set_materialize_grads(False)
        out: torch.Tensor = comm.execute(move, x, phase)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        # None on all ranks: they run the same program, and nothing that was computed from it is asked for
        if gradient is None:
            return None, None, None, None
        move = ctx.move.backward()
        if torch.is_grad_enabled():
            return None, None, None, Differentiable.apply(ctx.comm, move, "backward", gradient)
        return None, None, None, ctx.comm.execute(move, gradient, "backward")

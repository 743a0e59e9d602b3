"""DTensor parameters and their local tensors, with gradients in between."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def local_tensors(parameters: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The local tensors of DTensors; their gradients come back as DTensors of the same placements."""
    found: tuple[torch.Tensor, ...] = _Locals.apply(*parameters)  # type: ignore[no-untyped-call]
    return found


class _Locals(torch.autograd.Function):
    """DTensor parameters → their local tensors; the backward makes DTensor gradients of the same placements."""

    @staticmethod
    def forward(ctx: Any, *parameters: Any) -> tuple[torch.Tensor, ...]:
        ctx.specs = [p._spec for p in parameters]
        ctx.set_materialize_grads(False)
        return tuple(p._local_tensor.view_as(p._local_tensor) for p in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        given = [(g, spec) for g, spec in zip(gradients, ctx.specs, strict=True) if g is not None]
        made = iter(_Globals.apply([spec for _, spec in given], *(g for g, _ in given)))  # type: ignore[no-untyped-call]
        return tuple(None if g is None else next(made) for g in gradients)


class _Globals(torch.autograd.Function):
    """Local gradients → DTensors, as a node of the graph: where it is recorded (create_graph), it has a derivative."""

    @staticmethod
    def forward(ctx: Any, specs: list[Any], *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.specs = specs
        ctx.set_materialize_grads(False)
        return tuple(DTensor(g.detach(), s, requires_grad=False) for g, s in zip(gradients, specs, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *(
            None if g is None else g.redistribute(spec.mesh, spec.placements).to_local()
            for g, spec in zip(gradients, ctx.specs, strict=True)
        )

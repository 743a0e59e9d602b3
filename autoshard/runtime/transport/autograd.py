"""Base classes of autograd functions: cheap ``apply``; None gradients stay None
(:class:`NoneGradFunction`), as in torch's own operations. A user's Function gets zeros instead,
and the optimizer would move a parameter behind it. :class:`Differentiable` is one move of this
rank."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from autoshard.errors import CaptureError
from autoshard.runtime.transport.move import Move
from autoshard.torch_private.autograd import inside_transforms, is_batchedtensor, is_legacy_batchedtensor


class LeanFunction(torch.autograd.Function):
    """``autograd.Function`` whose ``apply`` skips the search for dead functorch wrappers: three
    Python calls per argument."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """See :meth:`torch.autograd.Function.apply`."""
        if inside_transforms():
            return super().apply(*args)  # type: ignore[no-untyped-call]
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


class NoneGradFunction(LeanFunction):
    """Base of Functions with one result; ``backward`` is not called without a gradient."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        forward, backward = cls.forward, cls.backward

        @functools.wraps(forward)
        def remembered(ctx: Any, *args: Any) -> Any:
            ctx.set_materialize_grads(False)
            return forward(ctx, *args)

        cls.forward, cls.backward = staticmethod(remembered), staticmethod(skip_none_gradient(backward))  # type: ignore[method-assign]


def skip_none_gradient(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``backward`` of one result so that a None gradient gives None gradients."""

    @functools.wraps(backward)
    def handed_on(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is not None:
            refuse_batched(is_batched(gradient))
            return backward(ctx, gradient)
        return tuple([None] * len(n) if isinstance(n, list | tuple) else None for n in ctx.needs_input_grad)

    return handed_on


def is_batched(gradient: Tensor) -> bool:
    """Whether ``gradient`` is a batch of gradients under vmap."""
    return is_batchedtensor(gradient) or is_legacy_batchedtensor(gradient)


def refuse_batched(batched: bool) -> None:
    """Raise :class:`CaptureError` if ``batched``: collectives of a program move one gradient."""
    if batched:
        raise CaptureError(
            "a backward through a sharded module runs under vmap (vectorize=True, "
            "is_grads_batched=True, torch.func.vmap), but its programs take one gradient at a "
            "time. Leave vectorize out, or call torch.autograd.grad once for each."
        )


def register_backward(op: Any, backward: Callable[..., Any], save: Callable[..., None]) -> None:
    """Make a custom op of one result differentiable, as :class:`NoneGradFunction` does a Function.
    ``save`` gets the context, arguments and result, and keyword-only arguments if there are
    any."""

    def remembered(ctx: Any, inputs: tuple[Any, ...], output: Any, **named: Any) -> None:
        ctx.set_materialize_grads(False)
        save(ctx, inputs, output, *named.values())

    op.register_autograd(skip_none_gradient(backward), setup_context=remembered)


def register_recomputed_backward(op: Any, forward: Callable[..., Tensor], of: Collection[int] | None = None) -> None:
    """Register a backward for custom op ``op`` that recomputes ``forward`` of the same arguments.
    ``of``: numbers of the arguments that get gradients; None: all tensors."""

    def save(
        ctx: Any, inputs: tuple[Any, ...], output: Tensor, named: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        ctx.named = named
        ctx.form = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs))

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        again = torch.is_grad_enabled()  # create_graph
        wanting = [n and (of is None or i in of) for i, n in enumerate(ctx.needs_input_grad)]
        saved = zip(ctx.saved_tensors, itertools.chain(wanting, itertools.repeat(False)), strict=False)
        given = [t if t is None or (again and n) else t.detach().requires_grad_(n) for t, n in saved]
        with torch.enable_grad():
            out = forward(*(x if t is None else t for t, x in zip(given, ctx.form, strict=True)), **ctx.named)
        wanted = [t for t, n in zip(given, wanting, strict=False) if n]
        found = iter(torch.autograd.grad(out, wanted, grad, create_graph=again))
        return tuple(next(found) if n else None for n in wanting)

    register_backward(op, backward, save)


class Differentiable(NoneGradFunction):
    """A move of this rank as an autograd node; its backward is the dual move. A gradient is None on
    all ranks or on none, since they run the same program."""

    @staticmethod
    def forward(ctx: Any, comm: Any, move: Move, phase: str, x: Tensor) -> Tensor:
        ctx.comm, ctx.move = comm, move
        return comm.execute(move, x, phase)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        move = ctx.move.backward()
        if torch.is_grad_enabled():
            return None, None, None, Differentiable.apply(ctx.comm, move, "backward", gradient)
        return None, None, None, ctx.comm.execute(move, gradient, "backward")

"""Custom ``autograd.Function`` in a traced forward: tracing keeps the forward and drops the backward.

Where the backward is nothing but the derivative of the forward, as in many hand-written activations, nothing is lost:
autograd finds the same one. So the function is tried out on random numbers, and traced through where both agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

LARGEST = 1 << 22
"""elements of an operand up to which a function is tried out"""


class _Context:
    """What a Function's forward gets as ``ctx`` where autograd itself keeps what the backward needs."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.needs_input_grad = tuple(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)

    def save_for_backward(self, *tensors: Any) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


def inline(function: Any, forward: Callable[..., Any], args: Sequence[Any]) -> Any:
    """The result of ``function.apply(*args)`` out of differentiable ops. ``forward``: the function's own."""
    if function.setup_context is not torch.autograd.Function.setup_context:
        return forward(*args)
    return forward(_Context(args), *args)


def is_derivative(function: Any, forward: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether autograd through ``forward`` gives the values and gradients of ``function``, on random float64 numbers."""
    if any(isinstance(a, torch.Tensor) and a.numel() > LARGEST for a in args):
        return False
    own = function.__dict__.get("forward")
    patched_apply = function.__dict__.get("apply")
    with unset_fake_temporarily(), disable_proxy_modes_tracing(), torch._C.DisableTorchFunction(), torch.enable_grad():
        try:
            function.forward = staticmethod(forward)
            numbers = _numbers(args)
            theirs = _gradients(torch.autograd.Function.apply.__func__(function, *numbers), numbers)  # type: ignore[attr-defined]
            ours = _gradients(inline(function, forward, numbers), numbers)
        except Exception:  # whatever a user's function cannot do with these numbers
            return False
        finally:
            function.forward = own
            if patched_apply is not None:
                function.apply = patched_apply
        return len(ours) == len(theirs) and all(map(_equal, ours, theirs))


def _numbers(args: Sequence[Any]) -> list[Any]:
    """``args`` with random tensors in place of those that are traced; the global generator is left alone."""
    generator = torch.Generator().manual_seed(0)

    def number(a: Any) -> Any:
        if not isinstance(a, torch.Tensor):
            return a
        if not a.is_floating_point():
            return torch.zeros(tuple(a.shape), dtype=a.dtype)
        x = torch.randn(tuple(a.shape), dtype=torch.float64, generator=generator)
        return x.requires_grad_(a.requires_grad)

    return [number(a) for a in args]


def _gradients(results: Any, operands: Sequence[Any]) -> list[torch.Tensor | None]:
    """The results, and the gradients of a random combination of them."""
    results = list(results) if isinstance(results, tuple | list) else [results]
    generator = torch.Generator().manual_seed(1)
    wanted = [a for a in operands if isinstance(a, torch.Tensor) and a.requires_grad]
    ends = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    seeds = [torch.randn(tuple(r.shape), dtype=r.dtype, generator=generator) for r in ends]
    found = torch.autograd.grad(ends, wanted, seeds, allow_unused=True) if ends and wanted else ()
    return [*(r.detach() for r in results if isinstance(r, torch.Tensor)), *found]


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return (a is None or not a.any()) and (b is None or not b.any())
    # Constants such as 0.79788456 stand for sqrt(2/π) in hand-written derivatives.
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-6, atol=1e-8)

"""A library's ``autograd.Function`` as an op, so that its own backward runs."""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch


class Context:
    """What a Function's forward gets as ``ctx`` where nothing has to be kept for its backward."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.needs_input_grad = tuple(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)

    def save_for_backward(self, *tensors: Any) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass

    def mark_non_differentiable(self, *tensors: Any) -> None:
        pass


@torch.library.custom_op("autoshard::function", mutates_args=())
def function(name: str, tensors: Sequence[torch.Tensor], others: str) -> list[torch.Tensor]:
    """``apply`` of the Function ``name`` ("module:class") on whole tensors.

    ``others``: its arguments as a Python literal, with None where the next of ``tensors`` stands in a pair
    ``(True, None)``; an argument that is no tensor is ``(False, value)``.
    """
    return [result.clone() for result in _results(find(name).apply(*arguments(tensors, others)))]


@function.register_fake
def _(name: str, tensors: Sequence[torch.Tensor], others: str) -> list[torch.Tensor]:
    args = arguments(tensors, others)
    kind = find(name)
    split = kind.setup_context is not torch.autograd.Function.setup_context
    return [torch.empty_like(r) for r in _results(kind.forward(*args) if split else kind.forward(Context(args), *args))]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.name, tensors, ctx.others = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grads: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Runs the forward again: what it keeps for its backward stays inside the op."""
    with torch.enable_grad():
        tensors = [t.detach().requires_grad_(t.is_floating_point()) for t in ctx.saved_tensors]
        results = _results(find(ctx.name).apply(*arguments(tensors, ctx.others)))
        ends = [(r, g) for r, g in zip(results, grads, strict=True) if r.requires_grad]
        wanted = [t for t in tensors if t.requires_grad]
        found = iter(torch.autograd.grad([r for r, _ in ends], wanted, [g for _, g in ends], allow_unused=True))
    return None, [next(found) if t.requires_grad else None for t in tensors], None


function.register_autograd(_backward, setup_context=_save)


def describe(args: Sequence[Any]) -> tuple[list[torch.Tensor], str]:
    """``args`` as the op takes them: (tensors, others)."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    return tensors, repr([(True, None) if isinstance(a, torch.Tensor) else (False, a) for a in args])


def arguments(tensors: Sequence[torch.Tensor], others: str) -> list[Any]:
    """The arguments that :func:`describe` was given."""
    remaining = iter(tensors)
    return [next(remaining) if is_tensor else value for is_tensor, value in ast.literal_eval(others)]


@functools.cache
def find(name: str) -> Any:
    """The class that ``name`` says."""
    module, _, path = name.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))


def _results(found: Any) -> list[torch.Tensor]:
    return list(found) if isinstance(found, tuple | list) else [found]

"""Custom ops with their own backward: ``function_op`` runs a user's ``autograd.Function`` inside a
traced graph; ``fan_out`` copies a value for several readers and adds their gradients in a fixed
order."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.aten import result_list
from autoshard.runtime.transport.torch_state import autocast_state, without_autocast
from autoshard.torch_private.dispatch import above_autograd


class ForwardOnlyContext:
    """``ctx`` of a Function's forward where nothing is saved for the backward."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.needs_input_grad = tuple(isinstance(t, Tensor) and t.requires_grad for t in tensors)

    def save_for_backward(self, *tensors: Any) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass

    def mark_non_differentiable(self, *tensors: Any) -> None:
        pass


@torch.library.custom_op("autoshard::function", mutates_args=())
def function_op(name: str, tensors: Sequence[Tensor], others: str, autocast: str) -> list[Tensor]:
    """``apply`` of the Function ``name`` ("module:class") on unsharded tensors. ``others``: a
    Python literal of pairs, ``(True, None)`` for the next of ``tensors``, ``(False, value)`` for
    another argument. ``autocast``: see :func:`autocast_as_text`."""
    with _autocast_from_text(autocast), above_autograd():
        return [result.clone() for result in result_list(find_function(name).apply(*unpack_arguments(tensors, others)))]


@function_op.register_fake
def _fake_function(name: str, tensors: Sequence[Tensor], others: str, autocast: str) -> list[Tensor]:
    args = unpack_arguments(tensors, others)
    kind = find_function(name)
    with _autocast_from_text(autocast), above_autograd():
        results = kind.forward(*args) if has_setup_context(kind) else kind.forward(ForwardOnlyContext(args), *args)
    return [torch.empty_like(r) for r in result_list(results)]


def _save_function(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.name, tensors, ctx.others, ctx.autocast = inputs
    ctx.save_for_backward(*tensors)


def _function_backward(ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, ...]:
    """Recompute the forward: what it saves for its backward stays inside the op."""
    again = torch.is_grad_enabled()  # create_graph
    with torch.enable_grad():
        tensors = [
            t if again and t.requires_grad else t.detach().requires_grad_(not again and t.is_floating_point())
            for t in ctx.saved_tensors
        ]
        with _autocast_from_text(ctx.autocast):
            results = result_list(find_function(ctx.name).apply(*unpack_arguments(tensors, ctx.others)))
        ends = [(r, g) for r, g in zip(results, grads, strict=True) if r.requires_grad]
        wanted = [t for t in tensors if t.requires_grad]
        given = [r for r, _ in ends], wanted, [g for _, g in ends]
        found = iter(torch.autograd.grad(*given, allow_unused=True, create_graph=again))
    return None, [next(found) if t.requires_grad else None for t in tensors], None, None


function_op.register_autograd(_function_backward, setup_context=_save_function)


def pack_arguments(args: Sequence[Any]) -> tuple[list[Tensor], str]:
    """``args`` as the op takes them: (tensors, others)."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    return tensors, repr([(True, None) if isinstance(a, Tensor) else (False, a) for a in args])


def is_literal(others: str) -> bool:
    """Whether :func:`unpack_arguments` can parse ``others``."""
    try:
        ast.literal_eval(others)
    except (ValueError, SyntaxError):
        return False
    return True


def unpack_arguments(tensors: Sequence[Tensor], others: str) -> list[Any]:
    """The arguments that :func:`pack_arguments` was given."""
    remaining = iter(tensors)
    return [next(remaining) if is_tensor else value for is_tensor, value in ast.literal_eval(others)]


def autocast_as_text() -> str:
    """The current autocast state, as the op takes it: device types and dtypes."""
    return " ".join(f"{kind}={str(dtype).removeprefix('torch.')}" for kind, dtype, _ in autocast_state())


@contextlib.contextmanager
def _autocast_from_text(autocast: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_autocast())
        for kind, _, dtype in (part.partition("=") for part in autocast.split()):
            stack.enter_context(torch.autocast(kind, getattr(torch, dtype)))
        yield


_unimportable: dict[str, Any] = {}
"""classes that cannot be imported by name, for example those defined in functions"""


def function_path(function: type) -> str:
    """The name by which :func:`find_function` finds the class, also in other processes."""
    name, number = f"{function.__module__}:{function.__qualname__}", 1
    while _function_at(name) is not function:
        if name not in _unimportable and ("<locals>" in name or _function_at(name) is None or number > 1):
            _unimportable[name] = function
            break
        number += 1
        name = f"{function.__module__}:{function.__qualname__}#{number}"
    return name


def find_function(name: str) -> Any:
    """The class called ``name``. Raises :class:`ImportError` if there is none."""
    found = _function_at(name)
    if found is None:
        raise ImportError(f"the autograd.Function {name!r} cannot be imported: define it at the top of a module")
    return found


def _function_at(name: str) -> Any:
    if name in _unimportable:
        return _unimportable[name]
    module, _, path = name.partition(":")
    try:
        return functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        return None


def has_setup_context(function: Any) -> bool:
    """Whether its forward takes no context, and ``setup_context`` gets the context later."""
    return function.setup_context is not torch.autograd.Function.setup_context

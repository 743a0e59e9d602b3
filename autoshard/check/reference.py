"""The unsharded reference of checks: copies of a model, float64, loss, differences of tensors."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autoshard.module.model.original import computed_attributes
from autoshard.runtime.transport import torch_state
from autoshard.torch_private.dispatch import TorchDispatchMode


def largest_magnitude(t: Tensor) -> float:
    """Largest finite absolute value; 0 for integers and empty tensors."""
    if not t.numel() or not (t.is_floating_point() or t.is_complex()):
        return 0.0
    return float(torch.nan_to_num(t.detach(), 0.0, 0.0, 0.0).abs().max())


def largest_difference(got: Tensor, want: Tensor) -> float:
    """Largest absolute difference; equal infinities and NaN in the same place count as 0."""
    if not want.numel():
        return 0.0
    same = (got == want) | (got.isnan() & want.isnan())
    return float((got - want).abs().masked_fill(same, 0.0).max())


def in_float64(tree: Any) -> Any:
    """``tree`` with its floating-point tensors in float64."""
    return pytree.tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, tree)


class SameRandomNumbers(TorchDispatchMode):
    """Dispatch mode that draws float64 random numbers in ``dtype``: generators differ by dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        before = torch_state.generator_states()
        result = func(*args, **kwargs)
        if all(map(torch.equal, before, torch_state.generator_states())):  # as attention without dropout
            return result
        torch_state.set_generator_states(before)
        drawn = func(*self._narrow(args), **self._narrow(kwargs))
        if func._schema.is_mutable:
            return args[0].copy_(drawn)
        return pytree.tree_map_only(Tensor, lambda x: x.double() if x.dtype == self.dtype else x, drawn)

    def _narrow(self, tree: Any) -> Any:
        def narrow(x: Any) -> Any:
            if isinstance(x, Tensor) and x.dtype == torch.float64:
                return x.to(self.dtype)
            return self.dtype if x is torch.float64 else x

        return pytree.tree_map(narrow, tree)


_WIDE_DTYPES = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class _WideUpcasts(TorchFunctionMode):
    """Function mode that asks for float64 where a model asks for float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.view:  # of the bits
            return func(*args, **kwargs)
        func = Tensor.double if func is Tensor.float else func
        return func(*map(self._wide, args), **{name: self._wide(x) for name, x in kwargs.items()})

    def _wide(self, x: Any) -> Any:
        return _WIDE_DTYPES.get(x, x) if isinstance(x, torch.dtype) else x


@contextlib.contextmanager
def upcasts_in_float64() -> Iterator[None]:
    """Inside, float32 islands (upcasts) of a float64 model run, and are captured, in float64:
    float32 sums round by their order, which would hide the digits that checks compare."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _WideUpcasts():
            yield
    finally:
        torch.set_default_dtype(default)


def copied_model(model: nn.Module) -> nn.Module:
    """A deep copy of ``model``; its non-leaf tensors are copied as leaves."""
    return copy.deepcopy(model, {id(t): t.detach().clone() for t in computed_attributes(model)})


def fresh_inputs(tree: Any) -> Any:
    """``tree`` with its tensors copied as leaves that keep ``requires_grad``."""
    return pytree.tree_map_only(Tensor, lambda x: x.detach().clone().requires_grad_(x.requires_grad), tree)


def full_tensor_of(x: Tensor) -> Tensor:
    """The full tensor of a DTensor; a plain tensor as it is."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def loss_of(output: Any, leaves: Sequence[Tensor]) -> Tensor:
    """:func:`scalar_loss` the output, else the sum of mean squares of tensors with gradients."""
    scalar = scalar_loss(output)
    if scalar is not None:
        return scalar
    return torch.stack([x.square().mean() for x in leaves if x.is_floating_point() and x.requires_grad]).sum()


def scalar_loss(output: Any) -> Tensor | None:
    """The loss of an output: the scalar with gradient named "loss", else the first scalar."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    ends = [x for x in (named, *pytree.tree_leaves(output)) if isinstance(x, Tensor)]
    return next((x for x in ends if x.requires_grad and not x.shape), None)

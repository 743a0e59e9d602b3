"""Gradients that autograd's engine does not accumulate: sparse rows, and parameters without gradient.

Sparse gradients are DTensors whose local shard is a COO tensor. torch's optimizers read the row
numbers, compute with the rows, and add a sparse tensor to the parameter and its states. All of that
is local: a rank has the rows of its shard, numbered from the start of the shard. One node is the
backward of all parameters, so hooks of a parameter without gradient are silenced here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import adagrad

from autoshard.module.dtensors.table_wise import local_tensor_of
from autoshard.torch_private.dispatch import stored_indices, stored_values


class _GradientFlag:
    """A hook that records whether the last gradient was there."""

    known = False

    def __call__(self, gradient: Any) -> None:
        self.known = gradient is not None


class _GradientHook:
    """A tensor hook that skips None."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def __call__(self, gradient: Any) -> Any:
        return None if gradient is None else self.hook(gradient)


class _AccumulatedHook:
    """A post-accumulate hook that skips parameters without gradient."""

    def __init__(self, hook: Any, came: _GradientFlag) -> None:
        self.hook, self.came = hook, came

    def __call__(self, p: Any) -> None:
        if self.came.known:
            self.hook(p)


def silence_without_gradient(p: Any) -> None:
    """Stop hooks of ``p`` from running where the engine brings no gradient."""
    if after := p._post_accumulate_grad_hooks:
        came = next((h for h in (p._backward_hooks or {}).values() if isinstance(h, _GradientFlag)), None)
        if came is None:
            came = _GradientFlag()
            p.register_hook(came)
        after.update({n: _AccumulatedHook(h, came) for n, h in after.items() if not isinstance(h, _AccumulatedHook)})
    if before := p._backward_hooks:
        before.update(
            {n: _GradientHook(h) for n, h in before.items() if not isinstance(h, _GradientFlag | _GradientHook)}
        )


class SparseGradient(DTensor):
    """The gradient of a DTensor parameter with a COO local shard; optimizers see local rows."""

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """This rank's rows, a COO tensor."""
        return self._local_tensor

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The full dense gradient. Collective."""
        dense: torch.Tensor = DTensor(self._local_tensor.to_dense(), self._spec, requires_grad=False).full_tensor()
        return dense

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        own = next(x for x in args if isinstance(x, SparseGradient))
        if (answer := _SPARSE_HANDLERS.get(func)) is not None:
            return answer(*args, **(kwargs or {}))
        with torch.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if type(result) is DTensor and result._local_tensor.is_sparse and result._spec == own._spec:
                result.__class__ = SparseGradient
            return result


def accumulate_sparse(p: Any, local: torch.Tensor, spec: Any) -> None:
    """Add a sparse gradient to ``p.grad`` and run hooks of ``p``, instead of the engine."""
    silence_without_gradient(p)
    gradient = _sparse_dtensor(local.to(p.device), spec)  # ranks without rows: an empty CPU tensor
    for hook in tuple((p._backward_hooks or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    p.grad = gradient if p.grad is None else p.grad + gradient
    for hook in tuple((p._post_accumulate_grad_hooks or {}).values()):
        hook(p)


def _sparse_dtensor(local: torch.Tensor, spec: Any) -> Any:
    found = DTensor(local, spec, requires_grad=False)
    found.__class__ = SparseGradient
    return found


def _sparse_like(x: SparseGradient, local: torch.Tensor) -> SparseGradient:
    found: SparseGradient = _sparse_dtensor(local, x._spec)
    return found


def _from_row_numbers(x: SparseGradient, numbers: torch.Tensor, rows: torch.Tensor, size: Any) -> SparseGradient:
    """Other rows at these row numbers, as optimizers make them; ``size``: the global size."""
    return _sparse_like(x, torch.sparse_coo_tensor(numbers, rows, x._local_tensor.shape, check_invariants=False))


def _rows_of_mask(x: DTensor, mask: SparseGradient) -> SparseGradient:
    return _sparse_like(mask, local_tensor_of(x).sparse_mask(mask._local_tensor.coalesce()))


def _add_sparse(x: Any, y: Any, **kwargs: Any) -> Any:
    if isinstance(x, SparseGradient) and isinstance(y, SparseGradient):
        return _sparse_like(x, torch.add(x._local_tensor, y._local_tensor, **kwargs))
    with torch.DisableTorchFunctionSubclass():
        return torch.add(x, y, **kwargs)


_SPARSE_HANDLERS: dict[Any, Any] = {
    torch.add: _add_sparse,
    torch.Tensor.add: _add_sparse,
    torch.Tensor.to_dense: lambda x: DTensor(x._local_tensor.to_dense(), x._spec, requires_grad=False),
    torch.Tensor.clone: lambda x, **kwargs: _sparse_like(x, x._local_tensor.clone()),
    torch.Tensor.detach: lambda x: _sparse_like(x, x._local_tensor.detach()),
    torch.Tensor.coalesce: lambda x: _sparse_like(x, x._local_tensor.coalesce()),
    stored_indices: lambda x: x._local_tensor._indices(),
    stored_values: lambda x: x._local_tensor._values(),
    torch.Tensor.new: _from_row_numbers,
    torch.Tensor.sparse_mask: _rows_of_mask,
}


_original_make_sparse: Any = adagrad._make_sparse


def _make_sparse(gradient: Any, numbers: torch.Tensor, rows: torch.Tensor) -> Any:
    """What Adagrad adds to its state, made as :class:`torch.optim.SparseAdam` makes it."""
    if isinstance(gradient, SparseGradient):
        return _from_row_numbers(gradient, numbers, rows, gradient.size())
    return _original_make_sparse(gradient, numbers, rows)


adagrad._make_sparse = _make_sparse

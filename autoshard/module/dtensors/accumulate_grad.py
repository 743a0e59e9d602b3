"""Gradients that autograd's engine does not accumulate: sparse rows, and parameters without
gradient. Sparse gradients are DTensors with a COO shard: a rank has its shard's rows, so torch's
optimizers update them locally. One node is the backward of all parameters, so hooks of those
without gradient are silenced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoshard.aten import aten
from autoshard.module.dtensors.dispatch import run_as_dtensor
from autoshard.module.dtensors.module_dtensor import ModuleDTensor, handles, local_shard, module_dtensor, new_dtensor
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


class SparseGradient(ModuleDTensor):
    """The gradient of a DTensor parameter with a COO local shard; optimizers see local rows."""

    def to_local(self, **kwargs: Any) -> Tensor:
        """This rank's rows, a COO tensor."""
        return self._local_tensor

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The full dense gradient. Collective."""
        return _dense(self).full_tensor()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        own = next(x for x in args if isinstance(x, SparseGradient))
        if (answer := _SPARSE_HANDLERS.get(func)) is not None:
            return answer(*args, **(kwargs or {}))
        with torch.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if type(result) is ModuleDTensor and result._local_tensor.is_sparse and result._spec == own._spec:
                result.__class__ = SparseGradient
            return result


def accumulate_sparse(p: Any, local: Tensor, spec: Any) -> None:
    """Add a sparse gradient to ``p.grad`` and run hooks of ``p``, instead of the engine."""
    silence_without_gradient(p)
    gradient = _sparse_dtensor(local.to(p.device), spec)  # ranks without rows: an empty CPU tensor
    for hook in tuple((p._backward_hooks or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    p.grad = gradient if p.grad is None else p.grad + gradient
    for hook in tuple((p._post_accumulate_grad_hooks or {}).values()):
        hook(p)


def _sparse_dtensor(local: Tensor, spec: Any) -> Any:
    return new_dtensor(SparseGradient, local, spec, requires_grad=False)


def _dense(x: SparseGradient) -> DTensor:
    return module_dtensor(x._local_tensor.to_dense(), x._spec)


def _sparse_like(x: SparseGradient, local: Tensor) -> SparseGradient:
    return _sparse_dtensor(local, x._spec)


def _from_row_numbers(x: SparseGradient, numbers: Tensor, rows: Tensor, size: Any) -> SparseGradient:
    """Other rows at these row numbers, as optimizers make them; ``size``: the global size."""
    return _sparse_like(x, torch.sparse_coo_tensor(numbers, rows, x._local_tensor.shape, check_invariants=False))


def _rows_of_mask(x: DTensor, mask: SparseGradient) -> SparseGradient:
    return _sparse_like(mask, local_shard(x).sparse_mask(mask._local_tensor.coalesce()))


def _coalesce(x: SparseGradient) -> SparseGradient:
    found = _sparse_like(x, x._local_tensor.coalesce())
    found.__dict__["_of_rows"] = True
    return found


def _size(x: SparseGradient) -> torch.Size:
    """The global size; of coalesced rows this rank's, of which Adagrad makes sparse tensors."""
    return x._local_tensor.shape if "_of_rows" in x.__dict__ else x._spec.shape


@handles(aten.add_.Tensor)
def _add_rows(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x.add_(rows)`` of a sparse tensor made of this rank's rows, as Adagrad makes it."""
    x, rows = args
    if type(rows) is Tensor and rows.is_sparse and isinstance(x, DTensor):
        local_shard(x).add_(rows, **kwargs)
        return x
    return run_as_dtensor(op, args, kwargs)


def _add_sparse(x: Any, y: Any, **kwargs: Any) -> Any:
    if isinstance(x, SparseGradient) and isinstance(y, SparseGradient):
        return _sparse_like(x, torch.add(x._local_tensor, y._local_tensor, **kwargs))
    with torch.DisableTorchFunctionSubclass():
        return torch.add(x, y, **kwargs)


_SPARSE_HANDLERS: dict[Any, Any] = {
    torch.add: _add_sparse,
    Tensor.add: _add_sparse,
    Tensor.to_dense: _dense,
    Tensor.clone: lambda x, **kwargs: _sparse_like(x, x._local_tensor.clone()),
    Tensor.detach: lambda x: _sparse_like(x, x._local_tensor.detach()),
    Tensor.coalesce: _coalesce,
    Tensor.size: lambda x, *dim: torch.empty(_size(x), device="meta").size(*dim),
    stored_indices: lambda x: x._local_tensor._indices(),
    stored_values: lambda x: x._local_tensor._values(),
    Tensor.new: _from_row_numbers,
    Tensor.sparse_mask: _rows_of_mask,
}

"""Sparse gradients: DTensors whose local shard is a COO tensor, and what optimizers do with them.

torch's optimizers read row numbers, compute with the rows, and add a sparse tensor to parameter and
states. All of that is local: row numbers count from the start of the rank's shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import adagrad

from autoshard.module.dtensors.owned import local_of
from autoshard.module.parameter_hooks import unheard


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
        if (answer := _ANSWERS.get(func)) is not None:
            return answer(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if type(result) is DTensor and result._local_tensor.is_sparse and result._spec == own._spec:
                result.__class__ = SparseGradient
            return result


def accumulate(p: Any, local: torch.Tensor, spec: Any) -> None:
    """Add a sparse gradient to ``p.grad`` and run hooks of ``p``, instead of the engine."""
    unheard(p)
    gradient = _made(local.to(p.device), spec)  # ranks without rows: an empty CPU tensor
    for hook in tuple((p._backward_hooks or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    p.grad = gradient if p.grad is None else p.grad + gradient
    for hook in tuple((p._post_accumulate_grad_hooks or {}).values()):
        hook(p)


def _made(local: torch.Tensor, spec: Any) -> Any:
    found = DTensor(local, spec, requires_grad=False)
    found.__class__ = SparseGradient
    return found


def _like(x: SparseGradient, local: torch.Tensor) -> SparseGradient:
    found: SparseGradient = _made(local, x._spec)
    return found


def _new(x: SparseGradient, numbers: torch.Tensor, rows: torch.Tensor, size: Any) -> SparseGradient:
    """Other rows at these row numbers, as optimizers make them; ``size``: the global size."""
    return _like(x, torch.sparse_coo_tensor(numbers, rows, x._local_tensor.shape, check_invariants=False))


def _masked(x: DTensor, mask: SparseGradient) -> SparseGradient:
    return _like(mask, local_of(x).sparse_mask(mask._local_tensor.coalesce()))


def _sum(x: Any, y: Any, **kwargs: Any) -> Any:
    if isinstance(x, SparseGradient) and isinstance(y, SparseGradient):
        return _like(x, torch.add(x._local_tensor, y._local_tensor, **kwargs))
    with torch._C.DisableTorchFunctionSubclass():
        return torch.add(x, y, **kwargs)


_ANSWERS: dict[Any, Any] = {
    torch.add: _sum,
    torch.Tensor.add: _sum,
    torch.Tensor.to_dense: lambda x: DTensor(x._local_tensor.to_dense(), x._spec, requires_grad=False),
    torch.Tensor.clone: lambda x, **kwargs: _like(x, x._local_tensor.clone()),
    torch.Tensor.detach: lambda x: _like(x, x._local_tensor.detach()),
    torch.Tensor.coalesce: lambda x: _like(x, x._local_tensor.coalesce()),
    torch.Tensor._indices: lambda x: x._local_tensor._indices(),
    torch.Tensor._values: lambda x: x._local_tensor._values(),
    torch.Tensor.new: _new,
    torch.Tensor.sparse_mask: _masked,
}


_plain: Any = adagrad._make_sparse


def _make_sparse(gradient: Any, numbers: torch.Tensor, rows: torch.Tensor) -> Any:
    """What Adagrad adds to its state, made as :class:`torch.optim.SparseAdam` makes it."""
    if isinstance(gradient, SparseGradient):
        return _new(gradient, numbers, rows, gradient.size())
    return _plain(gradient, numbers, rows)


adagrad._make_sparse = _make_sparse

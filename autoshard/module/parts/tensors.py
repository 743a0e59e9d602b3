"""Parameters and buffers as plain code sees them: under torch.distributed local tensors, not DTensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


class PlainTensors:
    """What plain code reads of the model's tensors, as dicts in place of those of its modules.

    A tensor that plain code reads in the first call stays replicated. Plain code and parts get one local
    tensor of it per call. A tensor that it first reads in a later call may be sharded, and stays a DTensor.
    """

    def __init__(self, sharded: Any) -> None:
        self.sharded = sharded
        self.read: set[str] = set()
        """names of tensors that plain code read"""
        self.laid_out: set[str] = set()
        """names of tensors whose layouts parts have chosen"""
        self.rehearses = False
        """whether this is the first call, of which no trace is left"""
        self.late = False
        """whether plain code read, in the first call, a tensor that it had not read before"""
        self._of_call: dict[int, tuple[Any, torch.Tensor]] = {}
        """id of a tensor → the tensor, and the local one"""

    def renew(self) -> None:
        """Begin a call."""
        self.settle()
        self._of_call.clear()

    def settle(self) -> None:
        """Write local tensors back whose ``.data`` plain code has replaced."""
        for x, local in self._of_call.values():
            if local.data_ptr() != x._local_tensor.data_ptr():
                with torch.no_grad():
                    x._local_tensor.copy_(local.detach())

    def are_replaced(self, path: str) -> bool:
        """Whether code has put other tensors into the module at ``path``, as ``torch.func.functional_call`` does."""
        of, below = self.sharded._original_model, f"{path}."
        names = [name for name in of.parameters if name.startswith(below)] if self.sharded.has_local_tensors else ()
        return any(not isinstance(of.tensor(name), DTensor) for name in names)

    def read_within(self, path: str, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Local tensors of a part's parameters that plain code reads, by the names of the part."""
        of, found = self.sharded._original_model, {}
        for name in names:
            fqn = f"{path}.{name}"
            local = self.local(of.tensor(fqn)) if fqn in self.read else None
            if local is not None:
                found[name] = local
        return found

    def view(self, path: str, tensors: dict[str, Any]) -> dict[str, Any]:
        """``tensors`` of the module at ``path``, as plain code sees them."""
        return _View(self, path, tensors) if self.sharded.has_local_tensors else tensors

    def of(self, path: str, name: str, x: Any) -> Any:
        """``x`` of the module at ``path``."""
        fqn = f"{path}.{name}" if path else name
        if fqn not in self.sharded._original_model.slots:  # None, or registered by the forward
            return x
        self.late = self.late or fqn not in self.read
        self.read.add(fqn)
        if not isinstance(x, DTensor):
            return x
        found = self.local(x)
        if found is None and self.rehearses:
            return self.sharded._full(x.detach()).requires_grad_(x.requires_grad)
        return x if found is None else found

    def owner_of(self, x: Any) -> Any:
        """The tensor of which ``x`` is the local one; else ``x``: ``functional_call`` puts back what it found."""
        return next((owner for owner, local in self._of_call.values() if local is x), x)

    def local(self, x: Any) -> torch.Tensor | None:
        """The local tensor of a replicated DTensor; None if it is sharded, or none."""
        if not isinstance(x, DTensor) or any(p.is_shard() for p in x.placements):
            return None
        if id(x) not in self._of_call:
            with torch.enable_grad():  # parts read it, too, where gradients are recorded
                self._of_call[id(x)] = x, x.to_local()
        return self._of_call[id(x)][1]


class _View(dict[str, Any]):
    """A dict of a module's tensors; values are those of :meth:`PlainTensors.of`."""

    def __init__(self, plain: PlainTensors, path: str, tensors: dict[str, Any]) -> None:
        super().__init__()
        self._plain, self._path, self._tensors = plain, path, tensors

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        """Tensors of a copy of the module, which is none of the sharded model's: new ones."""
        for name, x in self.items():
            owner = self._tensors[name]
            if owner is not None and id(owner) not in memo:
                made = x.detach().clone()
                kept = nn.Parameter(made, x.requires_grad) if isinstance(owner, nn.Parameter) else made
                memo[id(owner)] = memo[id(x)] = kept
        return {name: owner if owner is None else memo[id(owner)] for name, owner in self._tensors.items()}

    def __getitem__(self, name: str) -> Any:
        return self._plain.of(self._path, name, self._tensors[name])

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self._tensors else default

    def __setitem__(self, name: str, x: Any) -> None:
        self._tensors[name] = self._plain.owner_of(x)

    def __delitem__(self, name: str) -> None:
        del self._tensors[name]

    def pop(self, name: str, *default: Any) -> Any:
        found = self.get(name, *default)
        self._tensors.pop(name, *default)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Any:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __bool__(self) -> bool:
        return bool(self._tensors)

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def keys(self) -> Any:
        return self._tensors.keys()

    def values(self) -> Any:
        return {name: self[name] for name in self._tensors}.values()

    def items(self) -> Any:
        return {name: self[name] for name in self._tensors}.items()

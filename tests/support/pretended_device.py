"""A device that is not the CPU, on a machine that has no other: its tensors hold CPU tensors, and every operation is watched.

What an accelerator refuses, or would have to wait for, raises: operands on two devices, a value that the host reads
(``item``, ``cpu``, ``numpy``, a condition), a shape that depends on values. ``DEVICE`` exists after :func:`install`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import backend_registration
from torch.utils._python_dispatch import return_and_correct_aliasing

DEVICE = "pretended"

_READS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}
_MOVES = {"_to_copy", "copy_", "copy"}
_reading = False


class Pretended(torch.Tensor):
    """A tensor of the device; ``inside`` has its values."""

    inside: torch.Tensor

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> Pretended:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inside.shape, inside.stride(), inside.storage_offset(), dtype=inside.dtype, device=f"{DEVICE}:0"
        )
        made.inside = inside
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Pretended({self.inside})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        where = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        to_host = name in _MOVES and ((where is not None and where.type == "cpu") or not isinstance(args[0], Pretended))
        if (name in _READS or (to_host and isinstance(tensors[-1], Pretended))) and not _reading:
            raise RuntimeError(f"the host waits for the device: {func}")
        if name not in _MOVES and any(x.ndim and not isinstance(x, Pretended) for x in tensors):
            raise RuntimeError(f"operands on two devices: {func}")
        out = _run(func, args, kwargs)
        if to_host or name.endswith("_local_scalar_dense"):
            return out
        made = pytree.tree_map_only(torch.Tensor, Pretended, out)
        return made if func.namespace == "c10d" else return_and_correct_aliasing(func, args, kwargs, made)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """``func`` on the CPU, on the values."""
    args, kwargs = pytree.tree_map_only(Pretended, lambda x: x.inside, (args, kwargs))
    args, kwargs = pytree.tree_map_only(torch.device, lambda d: torch.device("cpu"), (args, kwargs))
    return func(*args, **kwargs)


def _made(func: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation of which no operand says the device: one that makes a tensor there, or moves one there."""
    return pytree.tree_map_only(torch.Tensor, Pretended, _run(func, args, kwargs))


_libraries: list[torch.library.Library] = []


def install() -> None:
    """Have torch know the device. For a process that ends soon: it cannot be taken back."""
    backend_registration._setup_privateuseone_for_python_backend(DEVICE)
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(_made, "PrivateUse1")
    for overload in ("default", "start", "start_step"):  # torch's own resizes its result
        op = getattr(torch.ops.aten.arange, overload)
        aten.impl(op.name(), functools.partial(_made, op), "PrivateUse1")
    _libraries.extend((every, aten))
    dist.Backend.backend_capability[dist.Backend.FAKE].append(DEVICE)


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """The host may read values inside."""
    global _reading
    before, _reading = _reading, True
    try:
        yield
    finally:
        _reading = before


@contextlib.contextmanager
def fake_world(ranks: int, rank: int = 0) -> Iterator[None]:
    """torch.distributed with that many ranks of which only this one exists: collectives have shapes and no values."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()

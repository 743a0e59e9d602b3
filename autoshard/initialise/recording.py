"""A recorded initialisation: operations on storages, and replay of the slice of a tensor.

A tensor is an area of a storage; an operation reads, writes or makes storages. So views, ``.data``
and tied tensors need no special case.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autoshard.errors import InitialiseError

Storages = dict[int, torch.UntypedStorage]


@dataclass(frozen=True, slots=True)
class Area:
    """A tensor as an area of storage number ``storage``. ``stride`` and ``offset`` count elements."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def fills(self, nbytes: int) -> bool:
        """Whether the area covers a storage of ``nbytes`` bytes, each element once."""
        dense = 1
        for stride, size in sorted((s, n) for s, n in zip(self.stride, self.size, strict=True) if n != 1):
            if stride != dense:
                return False
            dense *= size
        return math.prod(self.size) * self.dtype.itemsize == nbytes and self.offset == 0

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor, on a real or meta storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


def area_of(tensor: Tensor, storage: int) -> Area:
    """The area of ``tensor`` in its storage, which has the number ``storage``."""
    return Area(storage, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


@dataclass(frozen=True, slots=True)
class Op:
    """One recorded call; an :class:`Area` in its arguments stands for a recorded tensor."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Area | None, ...]
    """per returned tensor its area, if in a storage that this call made"""
    reads: frozenset[int]
    writes: frozenset[int]
    covers: frozenset[int]
    """storages that this call overwrites entirely"""
    random: bool
    where: str
    """file:line of the user's code"""

    def __str__(self) -> str:
        return f"{getattr(self.call, '__name__', self.call)} ({self.where})"


@dataclass
class Recording:
    """All recorded operations. ``tensors``: name → (meta tensor in the model, its area)."""

    ops: list[Op] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    """bytes of every storage"""
    writers: list[list[int]] = field(default_factory=list)
    """per storage the indices of ops that write it, ascending"""
    tensors: dict[str, tuple[Tensor, Area]] = field(default_factory=dict)

    def add_storage(self, nbytes: int) -> int:
        self.nbytes.append(nbytes)
        self.writers.append([])
        return len(self.nbytes) - 1

    def add_op(self, op: Op) -> None:
        for storage in op.writes:
            self.writers[storage].append(len(self.ops))
        self.ops.append(op)

    def needed(self, storages: Iterable[int], before: int | None = None) -> list[int]:
        """Backward slice: indices of ops that determine ``storages`` before op ``before``."""
        end = len(self.ops) if before is None else before
        todo = [(storage, end) for storage in storages]
        seen: set[tuple[int, int]] = set()
        while todo:
            storage, limit = todo.pop()
            for i in reversed(self.writers[storage]):
                if i >= limit:
                    continue
                if (i, storage) in seen:
                    break
                seen.add((i, storage))
                todo += [(read, i) for read in self.ops[i].reads]
                if storage in self.ops[i].covers:
                    break
        return sorted({i for i, _ in seen})

    def needed_by(self, i: int) -> list[int]:
        """Op ``i`` and the ops that its inputs depend on."""
        return [*self.needed(self.ops[i].reads, before=i), i]

    def run(self, indices: Iterable[int], states: Mapping[int, Tensor]) -> Storages:
        """Run ops on new storages; a random op i draws from the generator state ``states[i]``."""
        storages: Storages = {}
        with torch.no_grad():
            for i in indices:
                op = self.ops[i]
                if op.random:
                    torch.set_rng_state(states[i])
                try:
                    self._run_op(op, storages)
                except InitialiseError:
                    raise
                except Exception as error:
                    raise InitialiseError(f"cannot replay {op}: {error}") from error
        return storages

    def _run_op(self, op: Op, storages: Storages) -> None:
        args, kwargs = pytree.tree_map_only(Area, lambda area: self.tensor(area, storages), (op.args, op.kwargs))
        outputs = [x for x in pytree.tree_leaves(op.call(*args, **kwargs)) if isinstance(x, Tensor)]
        constants = {
            x.untyped_storage()._cdata for x in pytree.tree_leaves((op.args, op.kwargs)) if isinstance(x, Tensor)
        }
        adopted: set[int] = set()
        for area, output in zip(op.results, outputs, strict=True):
            if area is None or area.storage in adopted:
                continue
            made = output.untyped_storage()
            fits = area == area_of(output, area.storage) and made.nbytes() == self.nbytes[area.storage]
            if fits and made._cdata not in constants:
                storages[area.storage] = made
                adopted.add(area.storage)
            else:
                # A constant must not be written to, and later areas refer to the recorded strides.
                self.tensor(area, storages).copy_(output)

    def tensor(self, area: Area, storages: Storages) -> Tensor:
        """``area`` on real storages; a missing storage is allocated."""
        if area.storage not in storages:
            storages[area.storage] = _allocate(self.nbytes[area.storage])
        return area.on(storages[area.storage])

    def replay(self, storages: Iterable[int]) -> Iterator[tuple[int, Storages]]:
        """Yield (number, real storages) for each of ``storages``, one at a time.

        Random ops draw in program order from the default generator, which ends as ``fn`` would
        leave it. A storage is computed at the last random op that it depends on, when the generator
        states of the earlier ones are known. So usually each op runs once.
        """
        slices = {storage: self.needed([storage]) for storage in storages}
        due: dict[int, list[int]] = {}
        for storage, ops in slices.items():
            due.setdefault(max((i for i in ops if self.ops[i].random), default=-1), []).append(storage)
        states: dict[int, Tensor] = {}
        for storage in due.get(-1, ()):
            yield storage, self.run(slices[storage], states)
        for i, op in enumerate(self.ops):
            if not op.random:
                continue
            states[i] = torch.get_rng_state()
            if i not in due:
                self.run(self.needed_by(i), states)
            for storage in due.get(i, ()):
                real = self.run(slices[storage], states)
                after = torch.get_rng_state()
                yield storage, real
                del real
                # The caller may have drawn random numbers itself.
                torch.set_rng_state(after)


def _allocate(nbytes: int) -> torch.UntypedStorage:
    """Memory that returns to the system when freed (mmap for 1 MiB and more).

    With malloc small tensors fragment the holes of large ones, and the process grows to the size of
    the unsharded model.
    """
    if nbytes < 1 << 20:
        return torch.UntypedStorage(nbytes, device="cpu")
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).untyped_storage()

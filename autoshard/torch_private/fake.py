"""Tensors without data (fake tensors), and the order in memory that torch gives a result."""

from __future__ import annotations

import io
from typing import Any

import torch

from autoshard.torch_private import by_name

with by_name:
    from torch._prims_common import compute_elementwise_output_logical_to_physical_perm as order_in_memory
    from torch._prims_common import suggest_memory_format
    from torch._subclasses import fake_utils, meta_utils
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        unset_fake_temporarily,
    )

STORAGE_CLONES = tuple(
    (meta_utils, name, vars(meta_utils)[name])
    for name in ("_clone_real_storage_from_tensor",)
    if name in vars(meta_utils)  # torch >= 2.14
)
"""(owner, name, function): what copies the storage of a real tensor that becomes fake"""


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: io.FileIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def readinto(self, into: Any) -> int:
        self._file.seek(self._offset + self._at)
        count: int = self._file.readinto(memoryview(into)[: max(0, self._length - self._at)])
        self._at += count
        return count


def saved_tensor_place(file: io.FileIO, offset: int, length: int) -> tuple[int, tuple[int, ...]]:
    """First byte and strides (elements) of a torch.save'd tensor in a file, unread."""
    found = torch.load(_Window(file, offset, length), map_location="meta", weights_only=True)  # type: ignore[arg-type]
    begin = found.untyped_storage()._checkpoint_offset + found.storage_offset() * found.element_size()
    return offset + begin, found.stride()

"""Tensors without data (fake tensors), and the order in memory that torch gives a result."""

from __future__ import annotations

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

"""Torch's dispatcher: keys, kernels, modes, users. Light: generated code imports it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autoshard.torch_private import by_name

with by_name:
    from torch._C import _DisablePythonDispatcher as WithoutPythonDispatcher
    from torch._C import _dispatch_get_all_op_names as all_op_names
    from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel
    from torch._C import _dispatch_key_for_device as dispatch_key_of_device
    from torch._C import _dispatch_tls_local_exclude_set as excluded_keys
    from torch._C import _dispatch_tls_local_include_set as included_keys
    from torch._C import _ExcludeDispatchKeyGuard as ExcludedKeys
    from torch._C import _ForceDispatchKeyGuard as ForcedKeys
    from torch._C import _get_dispatch_mode as active_dispatch_mode
    from torch._C import _get_tracing_state as jit_tracing_state
    from torch._C import _len_torch_dispatch_stack as count_dispatch_modes
    from torch._C import _len_torch_function_stack as count_function_modes
    from torch._C import _storage_Use_Count as storage_use_count
    from torch._C import _TorchDispatchModeKey as DispatchModeKey
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes

    tensor_use_count: Any = Tensor._use_count  # type: ignore[attr-defined]
    stored_indices: Any = Tensor._indices
    stored_values: Any = Tensor._values
    make_wrapper_subclass = Tensor._make_wrapper_subclass

_AUTOGRAD = (
    torch.DispatchKey.AutogradFunctionality,
    torch.DispatchKey.AutogradOther,
    torch.DispatchKey.ADInplaceOrView,
)


@contextlib.contextmanager
def above_autograd() -> Iterator[None]:
    """Inside an op's kernel, restore autograd dispatch: a forward may enable and take gradients.
    Disables a trace's Python dispatcher, too, which keeps ops like cross_entropy without
    derivative."""
    excluded = excluded_keys()
    for key in _AUTOGRAD:
        excluded = excluded.remove(key)
    with WithoutPythonDispatcher():
        included = included_keys()
        with ForcedKeys(included, excluded), torch.no_grad():
            yield


def storage_id(x: Tensor) -> int:
    """The identity of the storage of ``x``, while that is alive."""
    return int(x.untyped_storage()._cdata)

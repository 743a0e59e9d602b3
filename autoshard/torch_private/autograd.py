"""Autograd's engine, saved tensors, ``torch.func``. Light: generated code imports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from autoshard.torch_private import by_name

with by_name:
    from torch._C import _are_functorch_transforms_active as inside_transforms
    from torch._C import _current_graph_task_id as current_backward
    from torch._C import _set_grad_enabled as set_grad_enabled
    from torch._C import _will_engine_execute_node as engine_will_run
    from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensors_hooks
    from torch._C._functorch import (
        get_unwrapped,
        is_batchedtensor,
        is_functorch_wrapped_tensor,
        is_legacy_batchedtensor,
        peek_interpreter_stack,
    )
    from torch.autograd.graph import _engine_run_backward as run_backward

    queue_callback: Callable[[Callable[[], Any]], None] = torch.autograd.Variable._execution_engine.queue_callback
    """has the running backward call a function at its end"""


def forward_level() -> int:
    """The number of open levels of forward-mode AD, less one."""
    return forward_ad._current_level

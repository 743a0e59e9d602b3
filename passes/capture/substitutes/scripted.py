"""TorchScript functions in a trace: run as written, without TorchScript's optimiser.

After a few calls TorchScript runs a function with its own backward on detached operands, which a
trace would record. Export would use the Python function, but only if ``is_exporting()`` is True.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.jit._fuser import optimized_execution
from torch.jit._state import _try_get_jit_cached_function

from autoshard.passes.capture.observer import Observer, Patch


class Scripted(Observer):
    """Runs TorchScript functions unoptimised."""

    def patches(self) -> Iterable[Patch]:
        yield torch.jit.ScriptFunction, "__call__", _call


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)`` of a ``torch.jit.ScriptFunction``, unoptimised."""
    written = getattr(function, "_torchdynamo_inline", None)
    if written is not None and _try_get_jit_cached_function(written) is not None:
        return written(*args, **kwargs)
    recorded = torch._C._create_function_from_graph("recorded", function.inlined_graph)  # by torch.jit.trace
    with optimized_execution(False):
        return _original(recorded, *args, **kwargs)


_original = torch.jit.ScriptFunction.__call__

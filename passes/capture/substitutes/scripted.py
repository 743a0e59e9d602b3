"""Functions of TorchScript in a traced forward: their programs as written, not those its optimiser makes of them.

After a few calls TorchScript runs a function with a backward of its own, on detached operands, which a trace would
take for the program. Export itself turns to the Python function, but asks whether it is exporting in the model's name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.jit._fuser import optimized_execution
from torch.jit._state import _try_get_jit_cached_function

from autoshard.passes.capture.observer import Observer, Patch


class Scripted(Observer):
    """Those that the forward calls."""

    def patches(self) -> Iterable[Patch]:
        yield torch.jit.ScriptFunction, "__call__", _call


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)`` of a ``torch.jit.ScriptFunction``, which no optimiser has seen."""
    written = getattr(function, "_torchdynamo_inline", None)
    if written is not None and _try_get_jit_cached_function(written) is not None:
        return written(*args, **kwargs)
    recorded = torch._C._create_function_from_graph("recorded", function.inlined_graph)  # by torch.jit.trace
    with optimized_execution(False):
        return _original(recorded, *args, **kwargs)


_original = torch.jit.ScriptFunction.__call__

"""A default dtype set inside a forward: programs have only that of the call."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from autoshard.passes.capture.observer import Call, Observer, Refusals


class DefaultDtype(Observer):
    """Adds ``dtype=`` to factory calls; refuses calls that make floats of integers."""

    def __init__(self, refusals: Refusals) -> None:
        self.refusals, self.outside = refusals, torch.get_default_dtype()

    def before(self, call: Call) -> Call | None:
        """The call with an explicit dtype."""
        if torch.get_default_dtype() is self.outside or call.operands or call.kwargs.get("dtype") is not None:
            return None
        with contextlib.suppress(TypeError), _disable_current_modes():
            made = call.func(*call.args, **{**call.kwargs, "device": "meta"})
            if isinstance(made, torch.Tensor):
                return replace(call, kwargs={**call.kwargs, "dtype": made.dtype})
        return None

    def after(self, call: Call, result: Any) -> Any:
        """Refuse a float result of integer operands."""
        if torch.get_default_dtype() is self.outside or not call.operands:
            return result
        floats = any(x.dtype.is_floating_point or x.dtype.is_complex for x in call.operands)
        made = (x.dtype for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor))
        if not floats and torch.get_default_dtype() in made and call.kwargs.get("dtype") is None:
            raise self.refusals(
                f"the forward calls {getattr(call.func, '__name__', call.func)} on integers under a default dtype that it "
                f"sets itself ({torch.get_default_dtype()}), which its program would not know. Convert them: x.to(dtype)."
            )
        return result

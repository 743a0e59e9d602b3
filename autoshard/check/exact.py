"""A low-precision model run in float64 with equal random numbers, to measure rounding errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.runtime.transport import generators


def in_float64(tree: Any) -> Any:
    """``tree`` with its floating-point tensors in float64."""
    return pytree.tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, tree)


class SameDraws(TorchDispatchMode):
    """Dispatch mode that draws float64 random numbers in ``dtype``: generators differ by dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        before = generators.states()
        result = func(*args, **kwargs)
        if all(map(torch.equal, before, generators.states())):  # as attention without dropout
            return result
        generators.set_states(before)
        drawn = func(*self._narrow(args), **self._narrow(kwargs))
        if func._schema.is_mutable:
            return args[0].copy_(drawn)
        return pytree.tree_map_only(torch.Tensor, lambda x: x.double() if x.dtype == self.dtype else x, drawn)

    def _narrow(self, tree: Any) -> Any:
        def narrow(x: Any) -> Any:
            if isinstance(x, torch.Tensor) and x.dtype == torch.float64:
                return x.to(self.dtype)
            return self.dtype if x is torch.float64 else x

        return pytree.tree_map(narrow, tree)

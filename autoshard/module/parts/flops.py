"""FLOPs of products that plain code computes, by torch's own formulas."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from autoshard.torch_private.autograd import current_backward


@functools.cache
def _formulas() -> dict[Any, Callable[..., int]]:
    """Overload of an operation → its formula."""
    return {getattr(op, n): f for op, f in flop_registry.items() if hasattr(op, "overloads") for n in op.overloads()}


class FlopCount(TorchDispatchMode):
    """Counts while it is active and not :func:`paused`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, and count it."""
        found = func(*args, **(kwargs or {}))
        if current_backward() == -1 and (formula := _formulas().get(func)):  # a backward also runs that of parts
            with contextlib.suppress(Exception):  # a formula may not know this call
                self.flops += formula(*args, **(kwargs or {}), out_val=found)
        return found


@contextlib.contextmanager
def paused(count: FlopCount | None) -> Iterator[None]:
    """Inside, ``count`` is not active: parts are captured and run without it."""
    if count is None:
        yield
        return
    count.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        count.__enter__()  # type: ignore[no-untyped-call]

"""Control-flow specialization: branches, loops and sizes decided by integer and bool inputs.

Edges of a graph, sequence lengths and masks are structure: models branch on them. If a branch
cannot stay symbolic, the trace carries the example's integers and bools, and values computed from
them. Answers and sizes come from these values, each with a guard in the program. A call that fails
a guard gets its own program. Floating-point and random numbers never specialize.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch.utils._pytree as pytree
from torch._subclasses import fake_utils, meta_utils
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from autoshard.passes.capture.answers import checks
from autoshard.passes.capture.observer import Call, Forward, Observer, Patch, patched

_RANDOM = torch.Tag.nondeterministic_seeded

_CLONE = "_clone_real_storage_from_tensor"


@contextlib.contextmanager
def values_at_hand() -> Iterator[None]:
    """While inside, new fake tensors carry real values, unless these come from random numbers."""
    dispatch, defer = FakeTensorMode.dispatch, ShapeEnv.guard_or_defer_runtime_assert

    def without_draws(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = _forget_written(func, args, kwargs or {})
        before = self.propagate_real_tensors
        self.propagate_real_tensors = before and not _is_random(func)
        try:
            result = dispatch(self, func, types, args, kwargs)
        finally:
            self.propagate_real_tensors = before
        if not known:  # an op's parts may have left memory unwritten
            for x in pytree.tree_leaves(result):
                if isinstance(x, FakeTensor):
                    x.real_tensor = None
        return result

    def no_silent_answer(self: Any, expression: Any, message: str, *args: Any, **kwargs: Any) -> Any:
        if message.startswith("propagate_real_tensors"):
            raise self._make_data_dependent_error(expression, expression)
        return defer(self, expression, message, *args, **kwargs)

    patches: tuple[Patch, ...] = (
        (FakeTensorMode, "dispatch", without_draws),
        (ShapeEnv, "guard_or_defer_runtime_assert", no_silent_answer),
        (fake_utils, "_check_fake_real_tensors", lambda *args, **kwargs: None),  # guards offsets
    )
    if hasattr(meta_utils, _CLONE):  # torch >= 2.14
        patches += ((meta_utils, _CLONE, partial(_storage_beside, getattr(meta_utils, _CLONE))),)
    with patched(patches), functorch_config.patch(fake_tensor_propagate_real_tensors=True):
        yield


def _storage_beside(clone: Any, x: torch.Tensor) -> torch.UntypedStorage:
    """``clone`` of the storage of ``x``, uninitialised if ``x`` has no values yet (inputs)."""
    try:
        return clone(x)  # type: ignore[no-any-return]
    except AssertionError:
        return torch.UntypedStorage(x.untyped_storage().nbytes(), device=x.device)


class Steering(Observer):
    """Gives traced inputs the example's integers, and fixes sizes computed from them."""

    def __init__(self, example: Any) -> None:
        self.inputs: list[Any] = []
        self.values = [x.detach().clone() if _steers(x) else None for x in pytree.tree_leaves(example)]

    def around(self) -> AbstractContextManager[None]:
        return values_at_hand()

    def begin(self, forward: Forward) -> None:
        self.inputs = forward.inputs
        for x in (*forward.parameters, *(b for b, _ in forward.buffers)):
            if isinstance(x, FakeTensor):
                x.real_tensor = None
        for x, value in zip(self.inputs, self.values, strict=True):
            if isinstance(x, FakeTensor):
                x.real_tensor = value

    def after(self, call: Call, result: Any) -> Any:
        """``result`` with known data-dependent lengths made static.

        Results that share memory with an operand stay: the guard copies, and writes would be lost.
        """
        operands = {_storage(x) for x in call.operands}
        return pytree.tree_map_only(torch.Tensor, lambda x: x if _storage(x) in operands else _sized(x), result)

    def end(self, output: Any) -> None:
        """Stop propagating real values."""
        for x in self.inputs:
            if isinstance(x, FakeTensor):
                x.fake_mode.propagate_real_tensors = False


def value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The real value of a traced tensor, or None if unknown."""
    value: torch.Tensor | None = getattr(tensor, "real_tensor", None)
    return None if value is None or _storage(value) in _outdated(tensor) else value


def _forget_written(func: Any, args: Any, kwargs: Any) -> bool:
    """Invalidate values of tensors that share memory with one overwritten by unknown values.

    Returns whether the call's results can be computed from known values.
    """
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, FakeTensor)]
    for x in tensors:
        x.real_tensor = value_of(x)
    known = all(x.real_tensor is not None for x in tensors) and not (_is_random(func) or "empty" in func._schema.name)
    if not func._schema.is_mutable or known:
        return known
    named = [
        *zip(func._schema.arguments, args, strict=False),
        *((a, kwargs.get(a.name)) for a in func._schema.arguments),
    ]
    for argument, value in named:
        if argument.is_write:
            for x in pytree.tree_leaves(value):
                if isinstance(x, FakeTensor) and x.real_tensor is not None:
                    _outdated(x)[_storage(x.real_tensor)] = x.real_tensor
                    x.real_tensor = None
    return False


def _outdated(tensor: torch.Tensor) -> dict[int, torch.Tensor]:
    """Storage id → stale value, kept alive so that the id is not reused."""
    if not isinstance(tensor, FakeTensor):
        return {}
    found: dict[int, torch.Tensor] = tensor.fake_mode.__dict__.setdefault("_autoshard_outdated", {})
    return found


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_random(func: Any) -> bool:
    return _RANDOM in getattr(func, "tags", ())


def _sized(x: torch.Tensor) -> torch.Tensor:
    lengths = [_known(n) for n in x.shape]
    if None in lengths or all(isinstance(n, int) for n in x.shape):
        return x
    return checks.of_shape(x, lengths)


def _known(n: int | torch.SymInt) -> int | None:
    if isinstance(n, int) or not free_unbacked_symbols(n):
        return int(n)
    found = n.node.expr.xreplace(n.node.shape_env.real_tensor_prop_unbacked_vals)
    return None if found.free_symbols else int(found)


def _steers(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not (x.is_floating_point() or x.is_complex() or x.is_meta)

"""Tensor values known in a trace. *Constant folding*: a tensor made by a factory or from a small
buffer is computed when the forward asks for it (``if mask.any()``). *Integer specialization*: if
a size or branch depends on integer inputs (edges of a graph, sequence lengths), the trace takes
answers and sizes from the example's. Floating-point inputs and random values never specialize.
A guard checks each answer that rests on a buffer or an input; a call that fails one gets its own
program. The stores are separate: values of fake tensors do not record their origin, and are
computed even if unused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.utils.weak import WeakTensorKeyDictionary

from autoshard.frames import frame_location_text, users_frame
from autoshard.passes.capture.exported.snapshots import BUFFER_VALUES, MAX_GUARDED_ELEMENTS
from autoshard.passes.capture.observer import (
    ObservedCall,
    Observer,
    ObserverAnswer,
    Patch,
    TracedForward,
    guard_true,
    patched,
)
from autoshard.runtime.operations.checks import OTHER_BUFFERS, OTHER_VALUES, exactly
from autoshard.torch_private.capture import functorch_config
from autoshard.torch_private.dispatch import storage_id, without_dispatch_modes
from autoshard.torch_private.fake import STORAGE_CLONES, FakeTensor, FakeTensorMode, fake_utils

_RANDOM_TAG = torch.Tag.nondeterministic_seeded


@contextlib.contextmanager
def with_concrete_values() -> Iterator[None]:
    """While inside, new fake tensors carry real values, unless these come from random numbers."""
    dispatch, defer = FakeTensorMode.dispatch, ShapeEnv.guard_or_defer_runtime_assert

    def without_draws(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = _drop_stale_values(func, args, kwargs or {})
        before = self.propagate_real_tensors
        self.propagate_real_tensors = before and _RANDOM_TAG not in getattr(func, "tags", ())
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
    patches += tuple((owner, name, partial(_storage_for_values, clone)) for owner, name, clone in STORAGE_CLONES)
    with patched(patches), functorch_config.patch(fake_tensor_propagate_real_tensors=True):
        yield


def _storage_for_values(clone: Any, x: Tensor) -> torch.UntypedStorage:
    """``clone`` of the storage of ``x``, uninitialised if ``x`` has no values yet (inputs)."""
    try:
        return clone(x)
    except AssertionError:
        return torch.UntypedStorage(x.untyped_storage().nbytes(), device=x.device)


class IntegerSpecialization(Observer):
    """Gives traced inputs the example's integers, and fixes sizes computed from them."""

    def __init__(self, example: Any) -> None:
        self.inputs: list[Any] = []
        self.values = [x.detach().clone() if _has_integer_values(x) else None for x in pytree.tree_leaves(example)]

    def around(self) -> AbstractContextManager[None]:
        return with_concrete_values()

    def begin(self, forward: TracedForward) -> None:
        self.inputs = forward.inputs
        for x in (*forward.parameters, *(b for b, _ in forward.buffers)):
            if isinstance(x, FakeTensor):
                x.real_tensor = None
        for x, value in zip(self.inputs, self.values, strict=True):
            if isinstance(x, FakeTensor):
                x.real_tensor = value

    def after(self, call: ObservedCall, result: Any) -> Any:
        """``result`` with known data-dependent lengths made static, except results in an operand's
        memory: the guard copies, and writes would be lost."""
        operands = {storage_id(x) for x in call.operands}
        return pytree.tree_map_only(Tensor, lambda x: x if storage_id(x) in operands else _with_fixed_sizes(x), result)

    def end(self, output: Any) -> None:
        """Stop propagating real values."""
        for x in self.inputs:
            if isinstance(x, FakeTensor):
                x.fake_mode.propagate_real_tensors = False


def concrete_value(tensor: Tensor) -> Tensor | None:
    """The real value of a traced tensor, or None if unknown."""
    value: Tensor | None = getattr(tensor, "real_tensor", None)
    return None if value is None or storage_id(value) in _stale_storages(tensor) else value


def _drop_stale_values(func: Any, args: Any, kwargs: Any) -> bool:
    """Forget values in memory that unknown ones overwrote; whether the call's results are known."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, FakeTensor)]
    for x in tensors:
        x.real_tensor = concrete_value(x)
    known = all(x.real_tensor is not None for x in tensors) and not (
        _RANDOM_TAG in getattr(func, "tags", ()) or "empty" in func._schema.name
    )
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
                    _stale_storages(x)[storage_id(x.real_tensor)] = x.real_tensor
                    x.real_tensor = None
    return False


def _stale_storages(tensor: Tensor) -> dict[int, Tensor]:
    """Storage id → stale value, kept alive so that the id is not reused."""
    if not isinstance(tensor, FakeTensor):
        return {}
    return tensor.fake_mode.__dict__.setdefault("_autoshard_outdated", {})


def _with_fixed_sizes(x: Tensor) -> Tensor:
    lengths = [_concrete_length(n) for n in x.shape]
    if None in lengths or all(isinstance(n, int) for n in x.shape):
        return x
    return exactly(x, lengths, frame_location_text(users_frame()))


def _concrete_length(n: int | torch.SymInt) -> int | None:
    if isinstance(n, int) or not free_unbacked_symbols(n):
        return int(n)
    found = n.node.expr.xreplace(n.node.shape_env.real_tensor_prop_unbacked_vals)
    return None if found.free_symbols else int(found)


def _has_integer_values(x: Any) -> bool:
    return isinstance(x, Tensor) and not (x.is_floating_point() or x.is_complex() or x.is_meta)


_MAX_FOLDED_ELEMENTS = 2**20
"""largest tensor (elements) that is computed"""
_FOLDED_FACTORIES = frozenset(
    (torch.ones, torch.zeros, torch.full, torch.arange, torch.tensor, torch.eye, torch.linspace, torch.scalar_tensor)
)
_SHAPE_ONLY_FACTORIES = frozenset(
    (torch.ones_like, torch.zeros_like, torch.full_like, Tensor.new_ones, Tensor.new_zeros,
     Tensor.new_full, Tensor.new_tensor)
)  # fmt: skip
"""factories that read only shape and dtype of their tensor operand"""
_SCALAR_READS = frozenset((Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item))
_SIZE_CONSUMERS = (F.pad, Tensor.__getitem__, Tensor.__setitem__)
"""functions with number arguments that decide sizes"""


@dataclass(frozen=True)
class _FoldedValue:
    compute: Callable[[], Any]
    sources: frozenset[int]
    """ids of the factory results and buffers that it is computed from"""
    from_buffer: bool
    is_written_to: bool = False
    """whether the forward has written to the buffer, so that it differs from call to call"""


class ConstantFolding(Observer):
    """Records how constant tensors are made, and computes them when the forward reads values."""

    def __init__(self, specialized: bool = False) -> None:
        self.specialized = specialized
        """whether integer inputs count as known, too"""
        self.made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """traced tensor → its computation"""

    def begin(self, forward: TracedForward) -> None:
        for traced, buffer in forward.buffers:
            real = getattr(buffer, BUFFER_VALUES, buffer)
            if real is not None and real.numel() <= MAX_GUARDED_ELEMENTS and not real.is_meta:
                self.made[traced] = _FoldedValue(real.clone, frozenset((id(traced),)), True)

    def before(self, call: ObservedCall) -> ObserverAnswer | ObservedCall | None:
        if call.func in _SCALAR_READS:
            return self._read(call)
        if call.func not in _SIZE_CONSUMERS:
            return None
        first, others, pads = call.args[:1], call.args[1:], call.func == F.pad
        return replace(call, args=(*first, *self._plain(others, pads)), kwargs=self._plain(call.kwargs, pads))

    def after(self, call: ObservedCall, result: Any) -> Any:
        func, args, kwargs, operands = call.func, call.args, call.kwargs, call.operands
        if call.written:
            written = {x: self.made[x] for x in operands if x in self.made}
            self._forget(list(written.values()))
            if args and all(x in written for x in operands) and not {"inplace", "out"} & set(kwargs):
                self._note(args[0], _returning_first(func), args, kwargs, written, write=True)
        elif func in _SHAPE_ONLY_FACTORIES and _is_foldable(result):
            self._from(operands[1:], result, func, (_uninitialized_like(args[0]), *args[1:]), kwargs)
        elif operands or func in _FOLDED_FACTORIES:
            self._from(operands, result, func, args, kwargs)
        return result

    def _from(self, operands: list[Tensor], result: Any, func: Any, args: Any, kwargs: Any) -> None:
        if all(x in self.made for x in operands) and not _has_symbolic_number((args, kwargs)):
            self._note(result, func, args, kwargs, {x: self.made[x] for x in operands})

    def _note(
        self,
        result: Any,
        func: Any,
        args: Any,
        kwargs: Any,
        parts: dict[Tensor, _FoldedValue],
        write: bool = False,
    ) -> None:
        """Record ``result`` = ``func(*args, **kwargs)``. ``parts``: of its operands."""
        sources: frozenset[int]
        sources = frozenset().union(*(part.sources for part in parts.values())) if parts else frozenset((id(result),))
        from_buffer = any(part.from_buffer for part in parts.values())
        is_written_to = any(part.is_written_to for part in parts.values()) or (write and parts[args[0]].from_buffer)

        def compute() -> Any:
            values = pytree.tree_map_only(Tensor, lambda x: parts[x].compute() if x in parts else x, (args, kwargs))
            return func(*values[0], **values[1])

        if isinstance(result, Tensor):
            if _is_foldable(result):
                self.made[result] = _FoldedValue(compute, sources, from_buffer, is_written_to)
        elif isinstance(result, tuple | list):
            for i, x in enumerate(result):
                if isinstance(x, Tensor) and _is_foldable(x):
                    self.made[x] = _FoldedValue(lambda i=i: compute()[i], sources, from_buffer, is_written_to)  # type: ignore[misc]

    def _forget(self, written: list[_FoldedValue]) -> None:
        """Forget all values with a source of ``written``: they may share its memory."""
        sources = {source for made in written for source in made.sources}
        for x in [x for x, made in self.made.items() if made.sources & sources]:
            del self.made[x]

    def value(self, tensor: Tensor) -> ObserverAnswer | None:
        """The value of a one-element tensor; guarded if it comes from a buffer or input. From a
        buffer that the forward writes, only bools: each number would need its own program."""
        if (made := self.made.get(tensor)) is not None and not (made.is_written_to and tensor.dtype != torch.bool):
            with _untraced_eager():
                value = made.compute()
            reason = OTHER_BUFFERS if made.from_buffer else "its value does not depend on the input"
        elif self.specialized and (value := concrete_value(tensor)) is not None:
            reason = OTHER_VALUES
        else:
            return None
        if reason in (OTHER_BUFFERS, OTHER_VALUES):
            guard_true((tensor == _untraced_item(value)).all(), reason)
        return ObserverAnswer(value, reason)

    def _read(self, call: ObservedCall) -> ObserverAnswer | None:
        if call.args[0].numel() != 1 or (known := self.value(call.args[0])) is None:
            return None
        with _untraced_eager():
            return replace(known, value=call.func(known.value))

    def _plain(self, tree: Any, in_size: bool) -> Any:
        """``tree`` with known scalar integer tensors as numbers; those of inputs only if they
        decide a size: in slices, or all if ``in_size``."""

        def number(x: Any, in_slice: bool = in_size) -> Any:
            if isinstance(x, slice):
                return slice(number(x.start, True), number(x.stop, True), number(x.step, True))
            if not isinstance(x, Tensor) or x.dim() or x.is_floating_point() or x.dtype == torch.bool:
                return x
            if x not in self.made and not in_slice:
                return x
            known = self.value(x)
            return x if known is None else _untraced_item(known.value)

        return pytree.tree_map(number, tree)


def _returning_first(func: Callable[..., Any]) -> Callable[..., Any]:
    """``func``, but returning its first operand, into which it writes, as for ``__setitem__``."""

    def write(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        func(x, *args, **kwargs)
        return x

    return write


@contextlib.contextmanager
def _untraced_eager() -> Iterator[None]:
    """Compute with real tensors inside, untraced."""
    with torch.DisableTorchFunction(), without_dispatch_modes(), torch.no_grad():
        yield


def _untraced_item(scalar: Tensor) -> Any:
    with _untraced_eager():
        return scalar.item()


def _has_symbolic_number(tree: Any) -> bool:
    return any(isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool) for x in pytree.tree_leaves(tree))


def _is_foldable(tensor: Tensor) -> bool:
    """Whether a tensor is static, without gradient and :data:`_MAX_FOLDED_ELEMENTS` at most."""
    sizes = tensor.shape
    return (
        not tensor.requires_grad and all(isinstance(n, int) for n in sizes) and tensor.numel() <= _MAX_FOLDED_ELEMENTS
    )


def _uninitialized_like(tensor: Tensor) -> Tensor:
    """A real uninitialised tensor of the same dtype and shape, or () if the shape is symbolic."""
    with _untraced_eager():
        shape = tuple(tensor.shape) if all(isinstance(n, int) for n in tensor.shape) else ()
        return torch.empty(shape, dtype=tensor.dtype)

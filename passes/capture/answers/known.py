"""Constant folding: values of tensors made by factories (``torch.ones``) or from small buffers.

A forward may ask for them (``if mask.any()``, ``F.pad(x, (padding, 0))``); they are computed on
demand. Values from a buffer are guarded in every call, since a buffer may be loaded or changed.

Fake tensors of integer specialization carry values, too. A common store failed for three reasons:
their values do not record an origin, which decides about guards; they are computed even if unused
(10 times the capture time for a product of 4096 x 4096 masks); and only export knows the length of
``x[mask]``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from autoshard.passes.capture.answers import checks
from autoshard.passes.capture.answers.steering import value_of
from autoshard.passes.capture.exported.attributes import SMALL, VALUES
from autoshard.passes.capture.observer import Answer, Call, Forward, Observer

_LARGE = 2**20
"""largest tensor (elements) that is computed"""
_FACTORIES = frozenset(
    (torch.ones, torch.zeros, torch.full, torch.arange, torch.tensor, torch.eye, torch.linspace, torch.scalar_tensor)
)
_OF_A_SHAPE = frozenset(
    (torch.ones_like, torch.zeros_like, torch.full_like, torch.Tensor.new_ones, torch.Tensor.new_zeros,
     torch.Tensor.new_full, torch.Tensor.new_tensor)
)  # fmt: skip
"""factories that read only shape and dtype of their tensor operand"""
_READS = frozenset(
    (torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.item)
)
_SIZES = (F.pad, torch.Tensor.__getitem__, torch.Tensor.__setitem__)
"""functions with number arguments that decide sizes"""


@dataclass(frozen=True)
class _Made:
    compute: Callable[[], Any]
    sources: frozenset[int]
    """ids of the factory results and buffers that it is computed from"""
    from_buffer: bool
    counts: bool = False
    """whether the forward has written to the buffer, so that it differs from call to call"""


class Known(Observer):
    """Records how constant tensors are made, and computes them when the forward reads values."""

    def __init__(self, steered: bool = False) -> None:
        self.steered = steered
        """whether integer inputs count as known, too"""
        self.made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """traced tensor → its computation"""

    def begin(self, forward: Forward) -> None:
        for traced, buffer in forward.buffers:
            real = getattr(buffer, VALUES, buffer)
            if real is not None and real.numel() <= SMALL and not real.is_meta:
                self.made[traced] = _Made(real.clone, frozenset((id(traced),)), True)

    def before(self, call: Call) -> Answer | Call | None:
        if call.func in _READS:
            return self._read(call)
        if call.func not in _SIZES:
            return None
        first, others, pads = call.args[:1], call.args[1:], call.func == F.pad
        return replace(call, args=(*first, *self._plain(others, pads)), kwargs=self._plain(call.kwargs, pads))

    def after(self, call: Call, result: Any) -> Any:
        func, args, kwargs, operands = call.func, call.args, call.kwargs, call.operands
        if call.written:
            written = {x: self.made[x] for x in operands if x in self.made}
            self._forget(list(written.values()))
            if args and all(x in written for x in operands) and not {"inplace", "out"} & set(kwargs):
                self._note(args[0], _returning_first(func), args, kwargs, written, write=True)
        elif func in _OF_A_SHAPE and _is_fixed(result):
            self._from(operands[1:], result, func, (_blank(args[0]), *args[1:]), kwargs)
        elif operands or func in _FACTORIES:
            self._from(operands, result, func, args, kwargs)
        return result

    def _from(self, operands: list[torch.Tensor], result: Any, func: Any, args: Any, kwargs: Any) -> None:
        if all(x in self.made for x in operands) and not _is_open((args, kwargs)):
            self._note(result, func, args, kwargs, {x: self.made[x] for x in operands})

    def _note(
        self, result: Any, func: Any, args: Any, kwargs: Any, parts: dict[torch.Tensor, _Made], write: bool = False
    ) -> None:
        """Record ``result`` = ``func(*args, **kwargs)``. ``parts``: of its operands."""
        sources: frozenset[int]
        sources = frozenset().union(*(part.sources for part in parts.values())) if parts else frozenset((id(result),))
        from_buffer = any(part.from_buffer for part in parts.values())
        counts = any(part.counts for part in parts.values()) or (write and parts[args[0]].from_buffer)

        def compute() -> Any:
            values = pytree.tree_map_only(
                torch.Tensor, lambda x: parts[x].compute() if x in parts else x, (args, kwargs)
            )
            return func(*values[0], **values[1])

        if isinstance(result, torch.Tensor):
            if _is_fixed(result):
                self.made[result] = _Made(compute, sources, from_buffer, counts)
        elif isinstance(result, tuple | list):
            for i, x in enumerate(result):
                if isinstance(x, torch.Tensor) and _is_fixed(x):
                    self.made[x] = _Made(lambda i=i: compute()[i], sources, from_buffer, counts)  # type: ignore[misc]

    def _forget(self, written: list[_Made]) -> None:
        """Forget all values with a source of ``written``: they may share its memory."""
        sources = {source for made in written for source in made.sources}
        for x in [x for x, made in self.made.items() if made.sources & sources]:
            del self.made[x]

    def value(self, tensor: torch.Tensor) -> Answer | None:
        """The value of a one-element tensor; guarded if it comes from a buffer or input.

        From a buffer that the forward writes, only bools: each number would need its own program.
        """
        if (made := self.made.get(tensor)) is not None and not (made.counts and tensor.dtype != torch.bool):
            with _off():
                value = made.compute()
            because = checks.BUFFER if made.from_buffer else "its value does not depend on the input"
        elif self.steered and (value := value_of(tensor)) is not None:
            because = checks.INTEGERS
        else:
            return None
        if because in (checks.BUFFER, checks.INTEGERS):
            checks.equals(tensor, _number(value), because)
        return Answer(value, because)

    def _read(self, call: Call) -> Answer | None:
        if call.args[0].numel() != 1 or (known := self.value(call.args[0])) is None:
            return None
        with _off():
            return replace(known, value=call.func(known.value))

    def _plain(self, tree: Any, in_size: bool) -> Any:
        """``tree`` with known scalar integer tensors replaced by numbers.

        Integer inputs are replaced only if they decide a size: in slices, or all if ``in_size``.
        """

        def number(x: Any, in_slice: bool = in_size) -> Any:
            if isinstance(x, slice):
                return slice(number(x.start, True), number(x.stop, True), number(x.step, True))
            if not isinstance(x, torch.Tensor) or x.dim() or x.is_floating_point() or x.dtype == torch.bool:
                return x
            if x not in self.made and not in_slice:
                return x
            known = self.value(x)
            return x if known is None else _number(known.value)

        return pytree.tree_map(number, tree)


def _returning_first(func: Callable[..., Any]) -> Callable[..., Any]:
    """``func``, but returning its first operand, into which it writes, as for ``__setitem__``."""

    def write(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        func(x, *args, **kwargs)
        return x

    return write


@contextlib.contextmanager
def _off() -> Iterator[None]:
    """Compute with real tensors inside, untraced."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        yield


def _number(scalar: torch.Tensor) -> Any:
    with _off():
        return scalar.item()


def _is_open(tree: Any) -> bool:
    """Whether ``tree`` has a symbolic number."""
    return any(isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool) for x in pytree.tree_leaves(tree))


def _is_fixed(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a static shape, at most :data:`_LARGE` elements, and no gradient."""
    sizes = tensor.shape
    return not tensor.requires_grad and all(isinstance(n, int) for n in sizes) and tensor.numel() <= _LARGE


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    """A real uninitialised tensor of the same dtype and shape, or () if the shape is symbolic."""
    with _off():
        shape = tuple(tensor.shape) if all(isinstance(n, int) for n in tensor.shape) else ()
        return torch.empty(shape, dtype=tensor.dtype)

"""Outputs of the traced forward that lie in the memory of another output or input, or in an order
of their own. :class:`~autoshard.passes.ir.graph.OutputView` says where, since a program makes
every output anew."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from autoshard.errors import CaptureError
from autoshard.passes.ir.graph import OutputView

OUTPUT_VIEWS_KEY = "autoshard_output_views"
"""key of the views in an exported program's meta"""


def find_output_views(given: Sequence[Any], outputs: Sequence[Any]) -> tuple[OutputView, ...]:
    """The views among ``outputs``; lengths may be symbolic. ``given``: leaves of the arguments."""
    arguments, results = _by_memory(given), _by_memory(outputs)
    found = []
    for memory, members in results.items():
        owners = [(True, i, x) for i, x in arguments.get(memory, ())]
        owners += [(False, i, x) for i, x in sorted(members, key=_may_own_less)]
        taken: set[int] = set()
        for is_input, of, owner in owners:
            if not is_input and of in taken:
                continue
            others = [(i, x) for i, x in members if i not in taken and (is_input or i != of) and _shows(x, owner)]
            found += [_view(i, x, of, owner, is_input) for i, x in others]
            taken.update(i for i, _ in others)
            if others and not is_input:
                taken.add(of)  # what others are views of is no view itself
        alone = [(i, x) for i, x in members if i not in taken and _is_dense(x) and not x.is_contiguous()]
        found += [_view(i, x, i, x, False) for i, x in alone]  # view() of it may ask for this memory order
    return tuple(found)


def _may_own_less(member: tuple[int, Tensor]) -> tuple[bool, bool, bool]:
    """Sorts the tensor that others are views of before them."""
    _, x = member
    return not x.requires_grad, x._is_view(), not _is_dense(x)


def with_lengths(views: Iterable[OutputView], of: Callable[[Any], int]) -> Iterator[OutputView]:
    """``views`` with ``of(length)`` for their lengths; without those that depend on data."""
    for v in views:
        with contextlib.suppress(CaptureError):
            size, stride, memory = (tuple(map(of, lengths)) for lengths in (v.size, v.stride, v.memory))
            made = OutputView(v.number, v.of, v.is_input, v.same, size, stride, of(v.offset), memory)
            if v.same or all(isinstance(n, int) for n in (*size, *stride, *memory, made.offset)):
                yield made


def _by_memory(leaves: Sequence[Any]) -> dict[StorageWeakRef, list[tuple[int, Tensor]]]:
    found: dict[StorageWeakRef, list[tuple[int, Tensor]]] = {}
    for i, x in enumerate(leaves):
        if isinstance(x, Tensor) and x.layout == torch.strided and not (x.is_nested or x.is_conj() or x.is_neg()):
            found.setdefault(StorageWeakRef(x.untyped_storage()), []).append((i, x))
    return found


def _view(number: int, x: Tensor, of: int, owner: Tensor, is_input: bool) -> OutputView:
    offset: Any = x.storage_offset() - owner.storage_offset()
    return OutputView(number, of, is_input, x is owner, (*x.shape,), x.stride(), offset, owner.stride())


def _shows(x: Tensor, owner: Tensor) -> bool:
    """Whether ``x`` is part of ``owner`` in memory, and a view of it for autograd."""
    if x is owner:
        return True
    bases = [owner, *([] if owner._base is None else [owner._base])]
    based = any(x._base is base for base in bases)
    if x.dtype != owner.dtype or (x.requires_grad and not (based and owner.requires_grad)):
        return False
    places = [(*map(str, (*t.shape, *t.stride(), t.storage_offset())),) for t in (x, owner)]  # compared without guards
    return x._base is owner or places[0] == places[1] or _is_within(x, owner)


def _is_dense(x: Tensor) -> bool:
    """Whether ``x`` of known lengths occupies each place of its range once."""
    return (span := _span(x)) is not None and x.numel() == len(span)


def _span(x: Tensor) -> range | None:
    """The places in its storage between the first and the last element of ``x``."""
    lengths = *x.shape, *x.stride(), x.storage_offset()
    if not all(type(n) is int for n in lengths) or not x.numel():
        return None
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return range(x.storage_offset(), x.storage_offset() + last + 1)


def _is_within(x: Tensor, owner: Tensor) -> bool:
    mine, whole = _span(x), _span(owner)
    if mine is None or whole is None or not _is_dense(owner):
        return False
    return whole.start <= mine.start and mine.stop <= whole.stop

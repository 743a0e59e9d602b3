"""Dispatch and combine of mixture-of-experts rows: one pass over the rows each way, and backward.

A *slot* is one choice of one row: row · k + number of the choice. Dispatch and combine gather by
numbers known from the order of the slots: a row's slots are an embedding bag, so nothing is summed
into zeros."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from autoshard.aten import aten
from autoshard.runtime.transport.handed_on import HandingOn


class Slots(NamedTuple):
    """The computed slots."""

    rows: torch.Tensor
    """the row of each slot, in the order of computation"""
    places: torch.Tensor
    """for the slots row by row: their place in that order"""
    starts: torch.Tensor
    """where each row begins in ``places``"""
    present: torch.Tensor | None
    """slot numbers, row by row; None: all slots are computed"""


def slots_of(order: torch.Tensor, rows: int, top: int) -> Slots:
    """The slots in ``order``: all or some of the ``top`` slots of each of ``rows``."""
    starts = torch.arange(0, rows * top, top, device=order.device)
    if order.shape[0] == rows * top:
        return Slots(order.floor_divide(top), _inverse(order), starts, None)
    present, places = order.sort()
    return Slots(order.floor_divide(top), places, torch.searchsorted(present, starts), present)


def dealt(x: torch.Tensor, slots: Slots) -> torch.Tensor:
    """Dispatch: the row of ``x`` [t, w] for every computed slot."""
    if not x.requires_grad:
        return x.index_select(0, slots.rows)
    found: torch.Tensor = _Dealt.apply(x, *slots[:3])
    return found


def collected(x: torch.Tensor, weights: torch.Tensor, slots: Slots) -> torch.Tensor:
    """Combine: sums [t, v] of slots ``x`` [s, v] per row, times their ``weights`` [t · k]."""
    dtype = torch.result_type(x, weights)
    weights = weights if slots.present is None else weights.index_select(0, slots.present)
    found: torch.Tensor = _Collected.apply(x.to(dtype), weights.to(dtype), *slots[:3])
    return found


def _inverse(order: torch.Tensor) -> torch.Tensor:
    """The inverse permutation."""
    numbers = torch.arange(order.shape[0], device=order.device)
    return torch.empty_like(order).scatter_(0, order, numbers)


class _Dealt(HandingOn):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor, places: Any, starts: Any) -> torch.Tensor:
        ctx.save_for_backward(places, starts)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        places, starts = ctx.saved_tensors
        return _bags(places, gradient, starts), None, None, None


class _Collected(HandingOn):
    """``weights`` are those of the computed slots, row by row."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weights: torch.Tensor, rows: Any, places: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        of_x, of_weights = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if of_weights else None, weights if of_x else None, rows, places, starts)
        return _bags(places, x, starts, weights)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weights, rows, places, starts = ctx.saved_tensors
        again = torch.is_grad_enabled()  # create_graph
        of_x = of_weights = None
        if weights is not None:
            own = torch.empty_like(weights).scatter_(0, places, weights)
            if again:
                of_x = gradient.index_select(0, rows) * own.unsqueeze(1)
            else:  # bags of one row
                of_x = _bags(rows, gradient, torch.arange(rows.shape[0], device=rows.device), own)
        if x is not None:
            bags = rows.index_select(0, places)
            if again:
                of_weights = (gradient.index_select(0, bags) * x.index_select(0, places)).sum(1)
            elif _has_dots(gradient):
                of_weights = _dots(gradient, x, places, starts, bags, 0)
            else:
                dots = torch.bmm(gradient.index_select(0, rows).unsqueeze(1), x.unsqueeze(2))
                of_weights = dots.flatten().index_select(0, places)
        return of_x, of_weights, None, None, None


def _bags(
    rows: torch.Tensor, x: torch.Tensor, starts: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Sums of ``rows`` of ``x`` in bags from ``starts``; skips torch.nn.functional's checks."""
    found: torch.Tensor = torch.embedding_bag(x, rows, starts, False, 0, False, weights)[0]
    return found


_dots = aten._embedding_bag_per_sample_weights_backward
"""per element of the bags: the product of its row and of its bag's gradient"""


def _has_dots(x: torch.Tensor) -> bool:
    """Whether that kernel exists: on GPUs not for half precision."""
    return x.device.type == "cpu" or x.dtype.itemsize > 2

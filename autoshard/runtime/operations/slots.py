"""Rows on their way to the experts that were chosen for them, and back: each way one pass over the rows, in both directions.

A *slot* is one choice of one row: row · k + number of the choice. What goes there and back is gathered by numbers that are
known from the order of the slots, so that nothing is summed into zeros: sums of a row's slots are bags of an embedding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from autoshard.runtime.transport.handed_on import HandingOn


class Slots(NamedTuple):
    """The slots that are computed."""

    rows: torch.Tensor
    """whose they are, in the order in which they are computed"""
    places: torch.Tensor
    """row after row, where in this order its slots are"""
    starts: torch.Tensor
    """where each row's begin among these"""
    present: torch.Tensor | None
    """their numbers, row after row; None: all are computed"""


def slots_of(order: torch.Tensor, rows: int, top: int) -> Slots:
    """Of ``rows`` with ``top`` slots each those in ``order``, which are all or some of them."""
    starts = torch.arange(0, rows * top, top, device=order.device)
    if order.shape[0] == rows * top:
        numbers = torch.arange(rows * top, device=order.device)
        return Slots(order // top, torch.empty_like(order).scatter_(0, order, numbers), starts, None)
    present, places = order.sort()
    return Slots(order // top, places, torch.searchsorted(present, starts), present)


def dealt(x: torch.Tensor, slots: Slots) -> torch.Tensor:
    """For every slot that is computed its row of ``x`` [t, w]."""
    found: torch.Tensor = _Dealt.apply(x, *slots[:3])
    return found


def collected(x: torch.Tensor, weights: torch.Tensor, slots: Slots) -> torch.Tensor:
    """Of ``x`` [s, v], made for the slots, the sums [t, v] for their rows, each times its one of ``weights`` [t · k]."""
    dtype = torch.result_type(x, weights)
    weights = weights if slots.present is None else weights.index_select(0, slots.present)
    found: torch.Tensor = _Collected.apply(x.to(dtype), weights.to(dtype), *slots[:3])
    return found


def regrouped(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Rows ``x`` that lie in segments of ``lengths`` [a, b], one after another: in segments of its transpose [b, a]."""
    found: torch.Tensor = _Ordered.apply(x, _by_columns(lengths, len(x)), _by_columns(lengths.mT, len(x)))
    return found


def _by_columns(lengths: torch.Tensor, rows: int) -> torch.Tensor:
    """Where the rows of these segments lie, in the order of the columns."""
    flat, turned = lengths.reshape(-1), lengths.mT.reshape(-1)
    begin = (flat.cumsum(0) - flat).view(lengths.shape).mT.reshape(-1)
    shift = begin - (turned.cumsum(0) - turned)
    return shift.repeat_interleave(turned, output_size=rows) + torch.arange(rows, device=lengths.device)


class _Dealt(HandingOn):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor, places: Any, starts: Any) -> torch.Tensor:
        ctx.save_for_backward(places, starts)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        places, starts = ctx.saved_tensors
        return F.embedding_bag(places, gradient, starts, mode="sum"), None, None, None


class _Collected(HandingOn):
    """The weights are those of the slots that are computed, row after row."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weights: torch.Tensor, rows: Any, places: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        of_x, of_weights = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if of_weights else None, weights if of_x else None, rows, places, starts)
        return F.embedding_bag(places, x, starts, mode="sum", per_sample_weights=weights)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weights, rows, places, starts = ctx.saved_tensors
        again = torch.is_grad_enabled()  # the gradients are to be differentiated
        of_x = of_weights = None
        if weights is not None:
            own = torch.zeros_like(weights).scatter(0, places, weights).unsqueeze(1)
            if again:
                of_x = gradient.index_select(0, rows) * own
            else:  # every row is a bag
                of_x = F.embedding_bag(rows.unsqueeze(1), gradient, mode="sum", per_sample_weights=own)
        if x is not None:
            bags = rows.index_select(0, places)
            if again:
                of_weights = (gradient.index_select(0, bags) * x.index_select(0, places)).sum(1)
            else:
                of_weights = _dots(gradient, x, places, starts, bags, 0)
        return of_x, of_weights, None, None, None


_dots = torch.ops.aten._embedding_bag_per_sample_weights_backward
"""of every element of the bags the product of its row and of its bag's gradient"""


class _Ordered(HandingOn):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order, back)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        order, back = ctx.saved_tensors
        return _Ordered.apply(gradient, back, order), None, None

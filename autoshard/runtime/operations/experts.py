"""Mixture of experts: all-to-all dispatch, expert MLPs, combine; no capacity limit.

Where axes shard both the experts and the rows, rows go to their experts' ranks by an all-to-all.
Its sizes are exchanged first, and the host waits for them once (GShard, Lepikhin et al. 2020;
MegaBlocks, Gale et al. 2022).

A *slot* is one choice of one row: row * k + number of the choice. Dispatch and combine gather by
numbers known from the order of the slots: the slots of a row are a bag of an embedding, so nothing
is summed into zeros."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.aten import aten
from autoshard.runtime.operations.grouped import group_blocks, grouped_product, matrices_per_block, rows_per_block
from autoshard.runtime.operations.halo import split
from autoshard.runtime.transport.autograd import NoneGradFunction, register_recomputed_backward
from autoshard.runtime.transport.communicator import Axes, Communicator, current
from autoshard.runtime.transport.move import Move, Splits, transposed_segments

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}


def activation_of(name: str) -> Callable[[Tensor], Tensor]:
    """One of :data:`ACTIVATIONS`, or x · sigmoid(1.702 · x) as "swish 1.702"."""
    if not name.startswith("swish "):
        return ACTIVATIONS[name]
    slope = float(name.removeprefix("swish "))
    return lambda x: x * torch.sigmoid(x * slope)


@dataclass(frozen=True)
class ExpertForm:
    """An expert: ``activation(x @ first) @ second``; see :func:`experts_op`."""

    activation: str
    """see :func:`activation_of`"""
    gated: bool
    """whether ``first`` makes [gate, up]; ``activation(gate) * up`` goes into ``second``"""
    transposed: bool
    """whether matrices are ``first`` [e, w, h], ``second`` [e, h, v]; else [e, h, w], [e, v, h]"""
    limit: float | None = None
    """``activation(min(gate, limit)) * (clamp(up, -limit, limit) + shift)``"""
    shift: float = 0.0
    interleaved: bool = False
    """whether gate and up features alternate; else one lies after the other"""

    def activated(self, made: list[Tensor]) -> Tensor:
        """Input of the second product; ``made``: gate and up features, in one or two tensors."""
        activation = activation_of(self.activation)
        if not self.gated:
            return activation(made[0])
        if len(made) == 1:
            gate, up = (made[0][..., 0::2], made[0][..., 1::2]) if self.interleaved else made[0].chunk(2, -1)
        else:
            gate, up = made
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return activation(gate) * (up + self.shift if self.shift else up)


@dataclass(frozen=True)
class ExpertSharding:
    """How ranks share experts; axes are mesh axes."""

    count: int | None = None
    """experts of all ranks; None: those of the operand"""
    expert_axes: Axes = ()
    """they shard the experts"""
    exchange_axes: Axes = ()
    """some of ``expert_axes``: rows go through an all-to-all over them. Over the other axes each
    rank gives the summand of its own experts (P)"""
    hidden: int = 0
    """features between the products, of all ranks"""
    hidden_axes: Axes = ()
    """they shard the hidden features: results are P. There ``first`` is sharded as one dim, so most
    ranks have only gates or only ups. They exchange slices of the weights or, if rows are few,
    products."""


UNSHARDED = ExpertSharding()

DERIVATIVES: dict[str, Callable[..., Any]] = {
    "silu": aten.silu_backward.grad_input,
    "gelu": aten.gelu_backward.grad_input,
    "gelu_tanh": partial(aten.gelu_backward.grad_input, approximate="tanh"),
}
"""backward kernels of the activations that :func:`gated_products` supports"""


def gated_products(x: Tensor, first: Tensor, second: Tensor, ends: Tensor, activation: str) -> Tensor:
    """``(activation(gate) * up) @ second``, with [gate, up] = ``x @ first``, per group of the rows
    x [s, w] ending at ``ends`` [e]; ``first`` [e, w, 2h], ``second`` [e, h, v]."""
    if not ends.shape[0]:
        return _gated_products_unfused(x, first, second, ends, activation)
    return _GatedProducts.apply(x, first, second, ends, activation)


class _GatedProducts(NoneGradFunction):
    """Both products in one node: blocks of groups stay in CPU caches, gradients need no cat."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, second: Tensor, ends: Tensor, activation: str) -> Tensor:
        work = group_blocks(x, ends, first.shape[2])
        out = x.new_empty(x.shape[0], second.shape[2]) if work[0].lengths else None
        places = [None] if out is None else rows_per_block(work, out)
        firsts, seconds, kept = matrices_per_block(work, first), matrices_per_block(work, second), list[Tensor]()
        for n, (piece, rows, to_mid, to_out) in enumerate(
            zip(work, rows_per_block(work, x), firsts, seconds, strict=True)
        ):
            made = piece.times(rows, to_mid)
            gate, up = made.chunk(2, -1)
            active = ACTIVATIONS[activation](gate)
            mid = active * up
            of_piece = piece.times(mid, to_out, places[n])
            kept += [made, active, mid]
        ctx.pieces, ctx.activation = work, activation
        ctx.save_for_backward(x, first, second, ends, *kept)
        return of_piece if out is None else out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, first, second, ends, *kept = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # create_graph
            out = _gated_products_unfused(x, first, second, ends, ctx.activation)
            inputs = [t for t, n in zip((x, first, second), wanted, strict=True) if n]
            found = iter(torch.autograd.grad(out, inputs, gradient, create_graph=True))
            return *(next(found) if n else None for n in wanted), None, None
        work = ctx.pieces
        of_x = torch.empty_like(x) if wanted[0] and len(work) > 1 else None
        places = None if of_x is None else rows_per_block(work, of_x)
        of_first, of_second = (
            torch.empty_like(w) if n and work[0].lengths else None
            for w, n in zip((first, second), wanted[1:], strict=True)
        )
        given = rows_per_block(work, x), rows_per_block(work, gradient), kept[::3], kept[1::3], kept[2::3]
        through = matrices_per_block(work, first.mT) if wanted[0] else (), matrices_per_block(work, second.mT)
        rooms = [matrices_per_block(work, w if g is None else g) for w, g in ((first, of_first), (second, of_second))]
        for n, (piece, rows, mine, made, active, mid) in enumerate(zip(work, *given, strict=True)):
            (gate, up), of_made = made.chunk(2, -1), torch.empty_like(made)
            of_gate, of_up = of_made.chunk(2, -1)
            if wanted[2]:
                summed = piece.outer(mid, mine, rooms[1][n])
                of_second = summed if of_second is None else of_second
            of_mid = piece.times(mine, through[1][n])
            torch.mul(of_mid, active, out=of_up)
            torch.mul(of_mid, up, out=of_gate)
            DERIVATIVES[ctx.activation](of_gate, gate, grad_input=of_gate)
            if wanted[1]:
                summed = piece.outer(rows, of_made, rooms[0][n])
                of_first = summed if of_first is None else of_first
            if wanted[0]:
                of_piece = piece.times(of_made, through[0][n], places and places[n])
        if wanted[0]:
            of_x = of_piece if of_x is None else of_x
        return of_x, of_first, of_second, None, None


def _gated_products_unfused(x: Tensor, first: Tensor, second: Tensor, ends: Tensor, activation: str) -> Tensor:
    """:func:`gated_products` composed of differentiable operations."""
    gate, up = grouped_product(x, first, ends).chunk(2, -1)
    return grouped_product(ACTIVATIONS[activation](gate) * up, second, ends)


class Slots(NamedTuple):
    """The computed slots."""

    rows: Tensor
    """the row of each slot, in the order of computation"""
    places: Tensor
    """for the slots row by row: their place in that order"""
    starts: Tensor
    """where each row begins in ``places``"""
    present: Tensor | None
    """slot numbers, row by row; None: all slots are computed"""


def dispatch_slots(order: Tensor, rows: int, top: int) -> Slots:
    """The slots in ``order``: all or some of the ``top`` slots of each of ``rows``."""
    starts = torch.arange(0, rows * top, top, device=order.device)
    if order.shape[0] == rows * top:
        return Slots(order.floor_divide(top), _inverse_permutation(order), starts, None)
    present, places = order.sort()
    return Slots(order.floor_divide(top), places, torch.searchsorted(present, starts), present)


def dispatch_expert_rows(x: Tensor, slots: Slots) -> Tensor:
    """Dispatch: the row of ``x`` [t, w] for every computed slot."""
    if not x.requires_grad:
        return x.index_select(0, slots.rows)
    return _Dispatch.apply(x, *slots[:3])


def combine_expert_rows(x: Tensor, weights: Tensor, slots: Slots) -> Tensor:
    """Combine: sums [t, v] of slots ``x`` [s, v] per row, times their ``weights`` [t · k]."""
    dtype = torch.result_type(x, weights)
    weights = weights if slots.present is None else weights.index_select(0, slots.present)
    return _Combine.apply(x.to(dtype), weights.to(dtype), *slots[:3])


def _inverse_permutation(order: Tensor) -> Tensor:
    numbers = torch.arange(order.shape[0], device=order.device)
    return torch.empty_like(order).scatter_(0, order, numbers)


class _Dispatch(NoneGradFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, places: Any, starts: Any) -> Tensor:
        ctx.save_for_backward(places, starts)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        places, starts = ctx.saved_tensors
        return _weighted_bag_sums(places, gradient, starts), None, None, None


class _Combine(NoneGradFunction):
    """``weights`` are those of the computed slots, row by row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, rows: Any, places: Tensor, starts: Tensor) -> Tensor:
        of_x, of_weights = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if of_weights else None, weights if of_x else None, rows, places, starts)
        return _weighted_bag_sums(places, x, starts, weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weights, rows, places, starts = ctx.saved_tensors
        again = torch.is_grad_enabled()  # create_graph
        of_x = of_weights = None
        if weights is not None:
            own = torch.empty_like(weights).scatter_(0, places, weights)
            if again:
                of_x = gradient.index_select(0, rows) * own.unsqueeze(1)
            else:  # bags of one row
                of_x = _weighted_bag_sums(rows, gradient, torch.arange(rows.shape[0], device=rows.device), own)
        if x is not None:
            bags = rows.index_select(0, places)
            if again:
                of_weights = (gradient.index_select(0, bags) * x.index_select(0, places)).sum(1)
            elif _has_weight_gradient_kernel(gradient):
                of_weights = _per_sample_weight_gradient(gradient, x, places, starts, bags, 0)
            else:
                dots = torch.bmm(gradient.index_select(0, rows).unsqueeze(1), x.unsqueeze(2))
                of_weights = dots.flatten().index_select(0, places)
        return of_x, of_weights, None, None, None


def _weighted_bag_sums(rows: Tensor, x: Tensor, starts: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sums of ``rows`` of ``x`` in bags from ``starts``; skips torch.nn.functional's checks."""
    return torch.embedding_bag(x, rows, starts, False, 0, False, weights)[0]


_per_sample_weight_gradient = aten._embedding_bag_per_sample_weights_backward
"""per element of the bags: the product of its row and of its bag's gradient"""


def _has_weight_gradient_kernel(x: Tensor) -> bool:
    """Whether that kernel exists: on GPUs not for half precision."""
    return x.device.type == "cpu" or x.dtype.itemsize > 2


def routed_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    first: Tensor,
    second: Tensor,
    activation: str,
    gated: bool,
    transposed: bool,
    first_bias: Tensor | None = None,
    second_bias: Tensor | None = None,
    **gate: Any,
) -> Tensor:
    """``x`` [..., w] through experts ``ids`` [..., k], summed by ``weights`` [..., k] → [..., v].
    Experts are dim 0: ``first`` [e, h, w], ``second`` [e, v, h] as of linear layers; see
    :class:`ExpertForm`, whose other fields are ``gate``. Biases: [e, h], [e, v]. An id outside 0 …
    e - 1, for example -1, adds nothing."""
    form = ExpertForm(activation, gated, transposed, **gate)
    return experts(x, ids, weights, first, second, form, first_bias, second_bias)


experts_op = torch.library.custom_op(
    "autoshard::experts",
    routed_experts,
    mutates_args=(),
    schema="(Tensor x, Tensor ids, Tensor weights, Tensor first, Tensor second, str activation, "
    "bool gated, bool transposed, Tensor? first_bias=None, Tensor? second_bias=None, *, "
    "float? limit=None, float shift=0.0, bool interleaved=False) -> Tensor",
)


@experts_op.register_fake
def _fake_experts(x: Any, ids: Any, weights: Any, first: Any, second: Any, *form: Any, **named: Any) -> Any:
    transposed = named["transposed"] if "transposed" in named else form[2]
    return x.new_empty(*x.shape[:-1], second.shape[2 if transposed else 1])


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    first: Tensor,
    second: Tensor,
    form: ExpertForm,
    first_bias: Tensor | None = None,
    second_bias: Tensor | None = None,
    sharding: ExpertSharding = UNSHARDED,
) -> Tensor:
    """:func:`routed_experts` on this rank's rows, experts and features."""
    top, count, expert_axes = ids.shape[-1], sharding.count or first.shape[0], sharding.expert_axes
    if not expert_axes and not _is_host_readable(ids):  # zeros: no host sync for their count
        known = (ids >= 0) & (ids < count)
        ids, weights = ids.where(known, 0), weights.where(known, 0)
        x = x.masked_fill(~known.any(-1, keepdim=True), 0)
    held = _expert_placement(count, expert_axes, sharding.exchange_axes, ids.device)
    computed, found = _routes(ids.reshape(-1), held)
    flat = x.reshape(-1, x.shape[-1])
    slots = dispatch_slots(computed, flat.shape[0], top)
    rows = dispatch_expert_rows(flat, slots)
    routes = found()  # the sizes have had that time to arrive
    rows = _exchange_expert_rows(rows, held, routes.splits)
    back = None if routes.splits is None else routes.splits.backward()
    ends = routes.ends[: first.shape[0]]
    dim, apart = 2 if form.transposed else 1, form.gated and sharding.hidden_axes and not form.interleaved
    halves = (sharding.hidden, sharding.hidden), sharding.hidden_axes
    plain = first_bias is None and second_bias is None and form == ExpertForm(form.activation, True, form.transposed)
    if plain and not apart and form.activation in DERIVATIVES:
        matrices = (first, second) if form.transposed else (first.mT, second.mT)
        out = gated_products(rows, *matrices, ends, form.activation)
    else:
        of_rows = exchanges_rows(ids.numel(), first.numel() // max(1, first.shape[dim]))
        parts = split(first, dim, *halves) if apart and not of_rows else [first]
        made = [grouped_product(rows, part if form.transposed else part.mT, ends) for part in parts]
        if first_bias is not None:  # then the product is not split
            made = [made[0] + _expert_bias_of_rows(first_bias, ends, rows)]
        if apart and of_rows:
            made = split(made[0], 1, *halves)
        out = grouped_product(form.activated(made), second if form.transposed else second.mT, ends)
        if second_bias is not None:
            out = out + _expert_bias_of_rows(second_bias, ends, rows)
    out = _exchange_expert_rows(out, held, back)
    out = combine_expert_rows(out, weights.reshape(-1), slots).to(x.dtype)
    return out.view(*x.shape[:-1], out.shape[-1])


register_recomputed_backward(experts_op, routed_experts)


def exchanges_rows(rows: int, weights: int) -> bool:
    """Whether ranks exchange gate and up products: fewer ``rows`` than ``weights`` per feature."""
    return rows < weights


def _expert_bias_of_rows(bias: Tensor, ends: Tensor, rows: Tensor) -> Tensor:
    numbers = torch.arange(rows.shape[0], device=ends.device, dtype=ends.dtype)
    return bias.index_select(0, torch.searchsorted(ends, numbers, right=True))


def _is_host_readable(ids: Tensor) -> bool:
    """Whether the host reads ``ids`` without a device sync."""
    return ids.device.type in ("cpu", "meta")


class _ExpertPlacement(NamedTuple):
    """The experts of the ranks that exchange rows."""

    comm: Communicator | None
    axes: tuple[str, ...]
    ranks: int
    most: int
    """the most experts of one rank"""
    together: int
    """experts of all these ranks"""
    places: Tensor | None
    """expert → rank · most + number there; ranks · most if no rank has it. None: all local"""
    sizes: Move | None
    """the all-to-all of the number of rows per expert"""


def _expert_placement(count: int, expert_axes: Axes, exchange_axes: Axes, device: torch.device) -> _ExpertPlacement:
    if not expert_axes:
        return _ExpertPlacement(None, (), 1, count, count, None, None)
    comm = current()
    cut, axes = comm.active(expert_axes), comm.active(exchange_axes)
    known = ("experts", count, cut, axes, device)
    if known not in comm.memo:
        parts = comm.chunks(count, cut)
        ranks = comm.group(axes)
        most = parts[0][1]
        places = [len(ranks) * most] * (count + 1)
        for number, rank in enumerate(ranks):
            start, length = parts[comm.group(cut, rank).index(rank)]
            places[start : start + length] = range(number * most, number * most + length)
        together = sum(place < len(ranks) * most for place in places)
        row_each = Splits((1,) * len(ranks), (1,) * len(ranks), comm.index(axes))
        sizes = Move("S", "S", axes, 0, splits=row_each) if axes else None
        comm.memo[known] = len(ranks), most, together, torch.tensor(places, device=device), sizes
    return _ExpertPlacement(comm, axes, *comm.memo[known])


class _Routes(NamedTuple):
    """Where rows go, and how they lie there."""

    splits: Splits | None
    """the all-to-all: rows arrive by rank and stay by expert; None: no exchange"""
    ends: Tensor
    """where the rows of each local expert end; a rank may hold fewer experts than ``most``"""


def _routes(ids: Tensor, held: _ExpertPlacement) -> tuple[Tensor, Callable[[], _Routes]]:
    """Computed slots (flat ``ids``) by rank and expert; a call that waits for their routes."""
    if ids.is_meta:
        slots, balanced = _balanced_routes(ids, held)
        return slots, lambda: balanced
    # An id that is no expert gets the last place.
    if held.places is None:
        keys = ids.where((ids >= 0) & (ids < held.most), held.most)
    else:
        keys = held.places[ids.clamp(-1, held.places.shape[0] - 1)]
    cells = held.ranks * held.most
    slots = keys.argsort(stable=True)
    sent = torch.bincount(keys, minlength=cells)[:cells]
    if held.places is None or held.comm is None or held.sizes is None:
        ends = sent.cumsum(0, dtype=torch.int32)  # slots of other ranks' experts come last
        every = held.places is None and not _is_host_readable(ids)
        return slots if every else slots[: int(sent.sum())], lambda: _Routes(None, ends)
    comm, sent = held.comm, sent.view(held.ranks, -1)
    arrive = comm.start(held.sizes, sent, comm.phase)
    arrived = known = None
    if ids.device.type == "cpu":
        gone = sent.tolist()
    else:  # one host sync
        arrived = arrive()
        gone, known = torch.stack([sent, arrived]).tolist()

    def routes() -> _Routes:
        arriving = arrive() if arrived is None else arrived
        come = arriving.tolist() if known is None else known
        order = transposed_segments(come, ids.device)
        splits = Splits(tuple(map(sum, gone)), tuple(map(sum, come)), comm.index(held.axes), after=order)
        return _Routes(splits, arriving.sum(0).cumsum(0, dtype=torch.int32))

    return slots[: sum(map(sum, gone))], routes


def _balanced_routes(ids: Tensor, held: _ExpertPlacement) -> tuple[Tensor, _Routes]:
    """Routes on meta tensors: every expert gets as many rows, and their numbers are exchanged."""
    ends = torch.empty(held.most, dtype=torch.int32, device="meta")
    if held.places is None:
        return torch.empty_like(ids), _Routes(None, ends)
    kept = -(-ids.numel() * held.together // (len(held.places) - 1))
    slots = ids.new_empty(kept)
    if held.comm is None or not held.axes:
        return slots, _Routes(None, ends)
    if held.sizes is not None:
        held.comm.start(held.sizes, ids.new_empty(held.ranks, held.most, dtype=torch.int64), held.comm.phase)()
    each = -(-kept // held.ranks)
    sent = (each,) * (held.ranks - 1)
    sent = (kept - sum(sent), *sent)
    order = transposed_segments([[n, *[0] * (held.most - 1)] for n in sent], ids.device)
    return slots, _Routes(Splits(sent, sent, 0, after=order), ends)


def _exchange_expert_rows(x: Tensor, held: _ExpertPlacement, splits: Splits | None) -> Tensor:
    if held.comm is None or splits is None:
        return x
    return held.comm.apply(Move("S", "S", held.axes, 0, splits=splits), x)

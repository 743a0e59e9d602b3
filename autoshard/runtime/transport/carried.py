"""How the moves of one rank are carried out by collectives of torch.distributed, and which of them can be under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from autoshard.runtime.transport.float_order import floats, ordered
from autoshard.runtime.transport.move import Move, Splits, piece, together
from autoshard.runtime.transport.relay import Hop
from autoshard.runtime.transport.wire import behind, numel, outermost, padded, raw, with_length
from autoshard.runtime.transport.work import Group, Underway, all_gather_single, all_to_all_rows

if TYPE_CHECKING:
    from autoshard.runtime.transport.process_group import TorchCommunicator

_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def _all_reduce(comm: TorchCommunicator, move: Move, group: Group, x: torch.Tensor) -> torch.Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    if move.op != "sum" and x.is_floating_point():
        keys = ordered(out, move.op)
        comm.run(group, dist.all_reduce, keys, _REDUCE[move.op])
        return floats(keys, x.dtype)
    if move.op == "sum" and group.gloo:
        comm.all_reduce(group, out).wait()
    else:
        comm.run(group, dist.all_reduce, out, _REDUCE[move.op])
    return out


def all_gather(comm: TorchCommunicator, move: Move, group: Group, x: torch.Tensor) -> torch.Tensor:
    return _start_gather(comm, move, group, x, comm.run)()


def _start_gather(
    comm: TorchCommunicator, move: Move, group: Group, x: torch.Tensor, begin: Callable[..., Underway | None]
) -> Callable[[], torch.Tensor]:
    """``begin``: begins a collective, or runs it."""
    chunks = comm.chunks(move.size, move.axes)
    out_shape = with_length(x.shape, move.dim, move.size)
    if not numel(out_shape):
        return partial(x.new_empty, out_shape)
    lengths = [length for _, length in chunks]
    sent = padded(x, move.dim, lengths[0]).contiguous()
    in_place = lengths[0] == lengths[-1] and group.order is None and outermost(sent.shape, move.dim)
    out = x.new_empty(out_shape if in_place else [group.size, *sent.shape])
    parts = out.view(group.size, *sent.shape)
    work = begin(group, all_gather_single, raw(parts), raw(sent).unsqueeze(0))

    def arrive() -> torch.Tensor:
        if work is not None:
            work.wait()
        sent.numel()  # not freed before
        if in_place:
            return out
        pieces = _by_index(parts.unbind(0), group)
        return torch.cat([p.narrow(move.dim, 0, n) for p, n in zip(pieces, lengths, strict=True)], move.dim)

    return arrive


def _start_reduce_scatter(
    comm: TorchCommunicator, move: Move, group: Group, x: torch.Tensor
) -> Callable[[], torch.Tensor]:
    chunks = comm.chunks(move.size, move.axes)
    longest, mine = chunks[0][1], chunks[group.number][1]
    if not x.numel():
        return partial(x.new_empty, with_length(x.shape, move.dim, mine))
    if longest == chunks[-1][1] and group.order is None and outermost(x.shape, move.dim):
        parts = x.contiguous()
    else:
        pieces = [padded(x.narrow(move.dim, *c), move.dim, longest) for c in chunks]
        parts = behind(pieces if group.order is None else [pieces[k] for k in group.order])
    out = x.new_empty(with_length(x.shape, move.dim, longest))
    parts = parts.view(group.size * out.shape[0], *out.shape[1:])
    work = comm.reduce_scatter(group, out, parts)

    def arrive() -> torch.Tensor:
        work.wait()
        parts.numel()  # not freed before
        return out.narrow(move.dim, 0, mine).contiguous()

    return arrive


def _all_to_all(comm: TorchCommunicator, move: Move, group: Group, x: torch.Tensor) -> torch.Tensor:
    sent, gathered = comm.chunks(move.to_size, move.axes), comm.chunks(move.size, move.axes)
    members = range(group.size) if group.order is None else group.order
    pieces = [x.narrow(move.to_dim, *sent[k]) for k in members]
    shape = with_length(x.shape, move.to_dim, sent[group.number][1])
    shapes = [with_length(shape, move.dim, gathered[k][1]) for k in members]
    out = _exchanged(comm, pieces, [numel(s) for s in shapes], group)
    parts = [p.view(s) for p, s in zip(out, shapes, strict=True)]
    return torch.cat(_by_index(parts, group), move.dim)


def start_rows(comm: TorchCommunicator, splits: Splits, group: Group, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Rows go from where they lie to where they stay, unless an order of theirs or of the process group is another."""
    gives, gets = splits.sent, splits.received
    x = splits.going(x)
    if group.order is not None:
        pieces = x.split(gives)
        x = torch.cat([pieces[k] for k in group.order])
        gives, gets = (tuple(numbers[k] for k in group.order) for numbers in (gives, gets))
    sent, out = x.contiguous(), x.new_empty(sum(gets), *x.shape[1:])
    work = comm.begin(group, _exchange(group), raw(out), raw(sent), list(gets), list(gives))

    def arrive() -> torch.Tensor:
        work.wait()
        sent.numel()  # not freed before
        return splits.staying(out if group.order is None else torch.cat(_by_index(out.split(gets), group)))

    return arrive


def _halo(comm: TorchCommunicator, move: Move, group: Group, x: torch.Tensor) -> torch.Tensor:
    assert move.exchange is not None
    members = range(group.size) if group.order is None else group.order
    sent = [piece(move, group.number, k, x) for k in members]
    shapes = [with_length(x.shape, move.dim, move.exchange.piece(k, group.number)[1]) for k in members]
    out = _exchanged(comm, sent, [numel(s) for s in shapes], group)
    parts = [p.view(s) for p, s in zip(out, shapes, strict=True)]
    return together(move, group.number, _by_index(parts, group))


def _exchanged(
    comm: TorchCommunicator, sent: list[torch.Tensor], counts: list[int], group: Group
) -> tuple[torch.Tensor, ...]:
    """A tensor to every member, and from every member a flat one of ``counts`` elements, in the process group's order."""
    buffer = behind(sent)
    out = buffer.new_empty(sum(counts))
    comm.run(group, _exchange(group), raw(out), raw(buffer), counts, [s.numel() for s in sent])
    return torch.split(out, counts)


def _exchange(group: Group) -> Callable[..., Any]:
    return all_to_all_rows if group.gloo else dist.all_to_all_single


def _permute(comm: TorchCommunicator, move: Move, group: Group, x: torch.Tensor) -> torch.Tensor:
    after = comm.process_group(move.order)
    to = group.members.index(after.members[group.number])
    shape = (
        x.shape if move.dim < 0 else with_length(x.shape, move.dim, comm.chunks(move.size, move.axes)[after.number][1])
    )
    return comm.send(group, Hop(move, to, after.number, (x,), (tuple(shape),), 0.0))()[0]


STARTED: dict[str, Callable[..., Callable[[], torch.Tensor]]] = {
    "all_gather": lambda comm, move, group, x: _start_gather(comm, move, group, x, comm.begin),
    "reduce_scatter": _start_reduce_scatter,
}
COLLECTIVES = {
    "all_reduce": _all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": lambda *what: _start_reduce_scatter(*what)(),
    "all_to_all": _all_to_all,
    "permute": _permute,
    "halo": _halo,
}


def _by_index(parts: Sequence[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """Parts that lie in the process group's order, in the order of the axes."""
    if group.order is None:
        return list(parts)
    out = list(parts)
    for position, k in enumerate(group.order):
        out[k] = parts[position]
    return out

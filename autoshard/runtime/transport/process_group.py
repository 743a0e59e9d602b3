"""Ranks as processes: collectives on torch.distributed (NCCL, gloo), and pending work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autoshard.errors import MeshError
from autoshard.runtime.transport import sparse_gradients
from autoshard.runtime.transport.autograd import Differentiable
from autoshard.runtime.transport.buffer_pool import (
    BufferPool,
    BufferShapes,
    float_order_keys,
    floats_of_keys,
    is_outermost,
    numel,
    packed_flat,
    raw,
    with_length,
    zero_padded,
)
from autoshard.runtime.transport.communicator import Communicator
from autoshard.runtime.transport.groups import group_of
from autoshard.runtime.transport.move import (
    LOCAL,
    PAIR_EXCHANGE_BYTES,
    UNNAMED,
    Move,
    Splits,
    assemble_halo,
    halo_piece,
    sums_directly,
)
from autoshard.runtime.transport.peers import FailureNotes, collective_error, wait
from autoshard.runtime.transport.profiling import collective_name, profiled, with_module
from autoshard.runtime.transport.rank_coroutines import Arrival, Collective, Hop, Sending
from autoshard.runtime.transport.torch_state import SynchronisedGenerators

# Called all_gather_into_tensor and reduce_scatter_tensor before torch 2.13.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce_sum(x: Tensor, group: Any, async_op: bool = True) -> Any:
    """Begin ``dist.all_reduce(x, group=group)`` without its per-call checks."""
    return group.allreduce([torch.view_as_real(x) if x.is_complex() else x])


def all_to_all_rows(
    out: Tensor, x: Tensor, gets: list[int], gives: list[int], group: Any, async_op: bool = True
) -> Any:
    """Begin ``dist.all_to_all_single(out, x, gets, gives, group)`` without its checks."""
    if x.is_complex():
        out, x = torch.view_as_real(out), torch.view_as_real(x)
    return group.alltoall_base(out, x, gets, gives)


class AxesGroup(NamedTuple):
    """The process group of some axes."""

    handle: Any
    size: int
    number: int
    """this rank's number along the axes"""
    members: tuple[int, ...]
    """global ranks, in the order of the axes"""
    order: tuple[int, ...] | None
    """number along the axes of each member in the process group's order; None: the same order"""
    gloo: bool

    def in_order(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """``parts`` in the process group's order, put in the order of the axes."""
        if self.order is None:
            return list(parts)
        out = list(parts)
        for position, k in enumerate(self.order):
            out[k] = parts[position]
        return out


def exchange_buffers(group: AxesGroup, x: Tensor) -> tuple[Tensor, Tensor, list[int]] | None:
    """(receive buffer, sent tensor, elements per member or []) to exchange summands, else None. An
    exchange meets once, a ring 2 (n - 1) times: two ranks exchange unless the buffer would be
    large, more ranks few numbers (for one, their ring has a single segment)."""
    if not x.is_floating_point():
        return None
    if group.size == 2 and x.nbytes <= PAIR_EXCHANGE_BYTES:
        counts = [0 if m == group.members[group.number] else x.numel() for m in sorted(group.members)]
        return torch.empty_like(x).view(-1), x.view(-1), counts
    if group.size > 2 and x.numel() > 1 and sums_directly(x.nbytes, group.size):
        parts = x.view(-1).expand(group.size, -1).contiguous()
        return torch.empty_like(parts), parts, []
    return None


class PendingCollective(NamedTuple):
    """A collective that has begun."""

    work: Any
    notes: FailureNotes | None
    """of the rank, if gloo executes it"""
    what: Callable[[], str]
    """its name, for messages"""

    def wait(self) -> None:
        """Wait for its result, once. Raises :class:`CommunicationError` if gloo cannot get it."""
        if self.notes is None:
            self.work.wait()
        else:
            wait(self.work, self.notes, self.what)


class PendingSum(NamedTuple):
    """A pending sum by all-to-all: a reduce-scatter, a small all-reduce, or one of two ranks."""

    work: PendingCollective
    received: Tensor
    """all ranks' summands; if it is as large as ``out``, the other one's of two"""
    out: Tensor

    def wait(self) -> None:
        """Wait for the summands and add them up."""
        self.work.wait()
        ranks = self.received.numel() // max(1, self.out.numel())
        if ranks == 1:
            self.out.add_(self.received.view(self.out.shape))
            return
        torch.sum(self.received.view(ranks, *self.out.shape), 0, dtype=self.out.dtype, out=self.out)


_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class TorchCommunicator(Communicator):
    """The rank of this process. Groups are created, by all members together, when axes are first
    used, or shared. ``ranks``: the global rank of every mesh rank; ``scope``: of
    :class:`FailureNotes`. Raises :class:`MeshError` without an initialised torch.distributed, or
    with too few ranks."""

    def __init__(
        self, axes: Mapping[str, int], ranks: Sequence[int] | None = None, scope: tuple[int, ...] = ()
    ) -> None:
        if not dist.is_initialized():
            raise MeshError("torch.distributed is not initialised: call torch.distributed.init_process_group() first")
        self.ranks = tuple(ranks) if ranks is not None else tuple(range(dist.get_world_size()))
        me = dist.get_rank()
        super().__init__(axes, self.ranks.index(me) if me in self.ranks else -1)
        if self.world_size != len(self.ranks):
            raise MeshError(f"mesh {self.mesh} has {self.world_size} ranks, but {len(self.ranks)} processes run")
        self._groups: dict[tuple[str, ...], AxesGroup] = {}
        self._handles: dict[tuple[int, ...], Any] = {}
        self.generators: SynchronisedGenerators | None = None
        """set inside :func:`synchronised_rng`"""
        self._at: tuple[Move | None, str] = (None, "a collective")
        self.notes = FailureNotes(scope)
        self.spare = BufferPool()

    @classmethod
    def of(cls, mesh: Any, scope: tuple[int, ...] = ()) -> TorchCommunicator:
        """The communicator of a torch ``DeviceMesh``, on its process groups."""
        names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.mesh.ndim))
        comm = cls(dict(zip(names, mesh.mesh.shape, strict=True)), mesh.mesh.flatten().tolist(), scope)
        for i, name in enumerate(names):
            comm._handles[tuple(sorted(comm.ranks[r] for r in comm.group((name,))))] = mesh.get_group(i)
        return comm

    def process_group(self, axes: tuple[str, ...]) -> AxesGroup:
        """The process group of the flattened ``axes``. All members ask together at first."""
        if axes not in self._groups:
            members = tuple(self.ranks[r] for r in self.group(axes))
            ordered = tuple(sorted(members))
            if ordered not in self._handles:
                everyone = ordered == tuple(range(dist.get_world_size()))
                self._handles[ordered] = dist.group.WORLD if everyone else group_of(ordered, "axes")
            order = None if ordered == members else tuple(members.index(r) for r in ordered)
            handle = self._handles[ordered]
            gloo = dist.get_backend(handle) == "gloo"
            self._groups[axes] = AxesGroup(handle, len(members), self.index(axes), members, order, gloo)
        return self._groups[axes]

    def beside(self, axes: tuple[str, ...]) -> AxesGroup:
        """The process group for what overlaps with compute: parameters and gradients. NCCL runs a
        group's collectives in order, so what the next operation waits for would queue behind
        them. gloo has threads for several."""
        group = self.process_group(axes)
        return group if group.gloo else self._own(group)

    def _own(self, group: AxesGroup) -> AxesGroup:
        """``group`` with a communicator of its own. All members ask together at first."""
        return group._replace(handle=group_of(group.members, "beside"))

    def host_group(self) -> AxesGroup:
        """All ranks, for CPU tensors: a separate gloo group if the backend has none for CPUs, or
        has it besides another ("cpu:gloo,cuda:nccl" also saves checkpoints in the background, in
        random order)."""
        world = self.process_group(self.active(tuple(self.mesh)))
        config = dist.get_backend_config(world.handle)
        if world.gloo or ("cpu:" in config and "cpu:gloo" not in config):
            return world
        return world._replace(handle=group_of(self.ranks, "host", "gloo"), gloo=True)

    def buffer(self, like: Tensor, shapes: BufferShapes, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """A flat buffer on the device of ``like``, and views of ``shapes`` in it: for gradients."""
        return self.spare.take(like, shapes, dtype, self.notes.call - self.notes.meetings)

    def during(self, move: Move | None, phase: str) -> None:
        """Name the collectives that follow: a move in a phase, or (no move) ``phase``."""
        self._at = (move, phase)

    def begin(self, group: AxesGroup, collective: Callable[..., Any], *args: Any) -> PendingCollective:
        """Begin ``collective(*args)`` of torch.distributed on ``group``."""
        self.notes.settle()
        what = partial(self.name, group, *self._at)
        try:
            work = collective(*args, group=group.handle, async_op=True)
        except RuntimeError as error:
            raise collective_error(error, self.notes, what()) from error
        return PendingCollective(work, self.notes if group.gloo else None, what)

    def run(self, group: AxesGroup, collective: Callable[..., Any], *args: Any) -> None:
        """``collective(*args)`` on ``group``. Raises as :meth:`Underway.wait` does."""
        if group.gloo:
            self.begin(group, collective, *args).wait()
        else:
            self.notes.settle()
            collective(*args, group=group.handle)

    def reduce_scatter(self, group: AxesGroup, out: Tensor, parts: Tensor) -> PendingCollective | PendingSum:
        """Begin to sum ``parts``, one per rank, shaped as ``out``, into every rank's ``out``; with
        gloo, whose own sends twice as much, by an all-to-all and a local sum."""
        if not group.gloo:
            return self.begin(group, reduce_scatter_single, out, parts)
        received = torch.empty_like(parts)
        return PendingSum(self.begin(group, dist.all_to_all_single, received, parts), received, out)

    def all_reduce(self, group: AxesGroup, x: Tensor) -> PendingCollective | PendingSum:
        """Begin to sum contiguous ``x`` over the ranks, in place. See :func:`exchange_buffers` for
        gloo, whose ring wakes threads 2 (n - 1) times."""
        if group.gloo and (sent := exchange_buffers(group, x)) is not None:
            received, parts, counts = sent
            return PendingSum(self.begin(group, all_to_all_rows, received, parts, counts, counts), received, x)
        return self.begin(group, all_reduce_sum, x)

    def name(self, group: AxesGroup, move: Move | None, phase: str) -> str:
        """A collective's name in errors."""
        if move is not None:
            move = move if move.module != UNNAMED else with_module(move, always=True)  # same line as the begin
            phase = collective_name(move.kind, self.named(move.kind, move.axes), move.module, phase)
        return f"{phase} among ranks {', '.join(map(str, group.members))}"

    def apply(self, move: Move, x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            move = with_module(move, always=True)  # for the backward, in which no generated code runs
            return Differentiable.apply(self, move, self.phase, x)
        return self.execute(with_module(move), x, self.phase)

    def execute(self, move: Move, x: Tensor, phase: str) -> Tensor:
        """``move`` on this rank's ``x``, without autograd."""
        if move.splits is not None:
            return self.start(move, x, phase)()
        verb = move.verb
        if verb in LOCAL:
            return self.local(move, x)
        group = self.process_group(move.axes)
        if self.log is not None:
            self.record("all_gather" if x.is_sparse else move.kind, move.axes, phase, move.ring_bytes(x, group.size))
        self.during(move, phase)
        with profiled(self, move, phase):
            if x.is_sparse:
                parts = sparse_gradients.gather_sparse(
                    move, x, group.size, lambda m, part: _group_all_gather(self, m, group, part)
                )
                return sparse_gradients.join_sparse(move, parts, self.chunks, group.number)
            return _COLLECTIVES[verb](self, move, group, x)

    def start(self, move: Move, x: Tensor, phase: str) -> Callable[[], Tensor]:
        """See :meth:`Communicator.start`: row all-to-alls, all-gathers, reduce-scatters."""
        if move.splits is None and move.verb not in _ASYNC_COLLECTIVES:
            moved = self.execute(move, x, phase)
            return lambda: moved
        group = self.process_group(move.axes)
        if self.log is not None:
            self.record(move.kind, move.axes, phase, move.ring_bytes(x, group.size))
        self._at = move, phase
        with profiled(self, move, phase):
            if move.splits is not None:
                return _start_rows(self, move.splits, group, x)
            return _ASYNC_COLLECTIVES[move.verb](self, move, group, x)

    def exchange(self, hops: Sequence[Sending], phase: str) -> Sequence[Arrival]:
        """See :meth:`Communicator.exchange`."""
        (hop,) = hops
        if isinstance(hop, Collective):
            arrive = self.start(hop.move, hop.x, phase)
            return [lambda: (arrive(),)]
        self.record("permute", hop.move.axes, phase, hop.bytes)
        self.during(hop.move, phase)
        with profiled(self, hop.move, phase):
            return [self.send(self.process_group(hop.move.axes), hop)]

    def send(self, group: AxesGroup, hop: Hop) -> Arrival:
        """Begin to send and to receive."""
        receiver, sender = group.members[hop.to], group.members[hop.source]
        counts = [numel(shape) for shape in hop.shapes]
        sent = hop.tensors[0].reshape(-1) if len(hop.tensors) == 1 else packed_flat(hop.tensors)
        out = sent.new_empty(sum(counts)) if hop.into is None else hop.into.view(-1)
        works: Sequence[Any] = ()
        if group.gloo:  # a single message's wait ends the connection if it times out
            members = sorted(group.members)
            gets = [out.numel() if m == sender else 0 for m in members]
            gives = [sent.numel() if m == receiver else 0 for m in members]
            works = [self.begin(group, dist.all_to_all_single, raw(out), raw(sent), gets, gives)]
        elif hop.to == group.number and hop.into is None:
            out = sent
        else:
            ops = [dist.P2POp(dist.isend, raw(sent), receiver, group.handle)] if sent.numel() else []
            ops += [dist.P2POp(dist.irecv, raw(out), sender, group.handle)] if out.numel() else []
            works = dist.batch_isend_irecv(ops) if ops else ()

        def arrive() -> tuple[Tensor, ...]:
            for work in works:
                work.wait()
            sent.numel()  # keeps it alive until here
            return tuple(x.view(s) for x, s in zip(torch.split(out, counts), hop.shapes, strict=True))

        return arrive

    def random_states(self) -> list[Tensor]:
        """See :meth:`Communicator.random_states`; synchronised in :func:`synchronised_rng`."""
        if self.generators is not None:
            self.generators.agree()
        return super().random_states()

    def shared(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :meth:`Communicator.shared`: every rank draws, from synchronised generators."""
        if self.generators is not None:
            self.generators.agree()
        return fn(*args, **kwargs)


def _group_all_reduce(comm: TorchCommunicator, move: Move, group: AxesGroup, x: Tensor) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    if move.op != "sum" and x.is_floating_point():
        keys = float_order_keys(out, move.op)
        comm.run(group, dist.all_reduce, keys, _REDUCE[move.op])
        return floats_of_keys(keys, x.dtype)
    if move.op == "sum" and group.gloo:
        comm.all_reduce(group, out).wait()
    else:
        comm.run(group, dist.all_reduce, out, _REDUCE[move.op])
    return out


def _group_all_gather(comm: TorchCommunicator, move: Move, group: AxesGroup, x: Tensor) -> Tensor:
    return _start_gather(comm, move, group, x, comm.run)()


def _start_gather(
    comm: TorchCommunicator,
    move: Move,
    group: AxesGroup,
    x: Tensor,
    begin: Callable[..., PendingCollective | None],
) -> Callable[[], Tensor]:
    """``begin``: begins a collective, or runs it."""
    chunks = comm.chunks(move.size, move.axes)
    out_shape = with_length(x.shape, move.dim, move.size)
    if not numel(out_shape):
        return partial(x.new_empty, out_shape)
    lengths = [length for _, length in chunks]
    sent = zero_padded(x, move.dim, lengths[0]).contiguous()
    in_place = lengths[0] == lengths[-1] and group.order is None and is_outermost(sent.shape, move.dim)
    out = x.new_empty(out_shape if in_place else [group.size, *sent.shape])
    parts = out.view(group.size, *sent.shape)
    work = begin(group, all_gather_single, raw(parts), raw(sent).unsqueeze(0))

    def arrive() -> Tensor:
        if work is not None:
            work.wait()
        sent.numel()  # keeps it alive until here
        if in_place:
            return out
        pieces = group.in_order(parts.unbind(0))
        return torch.cat([p.narrow(move.dim, 0, n) for p, n in zip(pieces, lengths, strict=True)], move.dim)

    return arrive


def _start_reduce_scatter(comm: TorchCommunicator, move: Move, group: AxesGroup, x: Tensor) -> Callable[[], Tensor]:
    chunks = comm.chunks(move.size, move.axes)
    longest, mine = chunks[0][1], chunks[group.number][1]
    if not x.numel():
        return partial(x.new_empty, with_length(x.shape, move.dim, mine))
    if longest == chunks[-1][1] and group.order is None and is_outermost(x.shape, move.dim):
        parts = x.contiguous()
    else:
        pieces = [zero_padded(x.narrow(move.dim, *c), move.dim, longest) for c in chunks]
        parts = packed_flat(pieces if group.order is None else [pieces[k] for k in group.order])
    out = x.new_empty(with_length(x.shape, move.dim, longest))
    parts = parts.view(group.size * out.shape[0], *out.shape[1:])
    work = comm.reduce_scatter(group, out, parts)

    def arrive() -> Tensor:
        work.wait()
        parts.numel()  # keeps it alive until here
        return out.narrow(move.dim, 0, mine).contiguous()

    return arrive


def _group_all_to_all(comm: TorchCommunicator, move: Move, group: AxesGroup, x: Tensor) -> Tensor:
    sent, gathered = comm.chunks(move.to_size, move.axes), comm.chunks(move.size, move.axes)
    members = range(group.size) if group.order is None else group.order
    pieces = [x.narrow(move.to_dim, *sent[k]) for k in members]
    shape = with_length(x.shape, move.to_dim, sent[group.number][1])
    shapes = [with_length(shape, move.dim, gathered[k][1]) for k in members]
    out = _all_to_all_flat(comm, pieces, [numel(s) for s in shapes], group)
    parts = [p.view(s) for p, s in zip(out, shapes, strict=True)]
    return torch.cat(group.in_order(parts), move.dim)


def _start_rows(comm: TorchCommunicator, splits: Splits, group: AxesGroup, x: Tensor) -> Callable[[], Tensor]:
    """All-to-all of rows, reordered before and after by ``splits`` and the group's order."""
    gives, gets = splits.sent, splits.received
    x = splits.going(x)
    if group.order is not None:
        pieces = x.split(gives)
        x = torch.cat([pieces[k] for k in group.order])
        gives, gets = (tuple(numbers[k] for k in group.order) for numbers in (gives, gets))
    sent, out = x.contiguous(), x.new_empty(sum(gets), *x.shape[1:])
    work = comm.begin(group, _all_to_all_function(group), raw(out), raw(sent), list(gets), list(gives))

    def arrive() -> Tensor:
        work.wait()
        sent.numel()  # keeps it alive until here
        return splits.staying(out if group.order is None else torch.cat(group.in_order(out.split(gets))))

    return arrive


def _group_halo(comm: TorchCommunicator, move: Move, group: AxesGroup, x: Tensor) -> Tensor:
    assert move.exchange is not None
    members = range(group.size) if group.order is None else group.order
    sent = [halo_piece(move, group.number, k, x) for k in members]
    shapes = [with_length(x.shape, move.dim, move.exchange.piece(k, group.number)[1]) for k in members]
    out = _all_to_all_flat(comm, sent, [numel(s) for s in shapes], group)
    parts = [p.view(s) for p, s in zip(out, shapes, strict=True)]
    return assemble_halo(move, group.number, group.in_order(parts))


def _all_to_all_flat(
    comm: TorchCommunicator, sent: list[Tensor], counts: list[int], group: AxesGroup
) -> tuple[Tensor, ...]:
    """Send a tensor to every member; flat tensors of ``counts`` elements arrive, in group order."""
    buffer = packed_flat(sent)
    out = buffer.new_empty(sum(counts))
    comm.run(group, _all_to_all_function(group), raw(out), raw(buffer), counts, [s.numel() for s in sent])
    return torch.split(out, counts)


def _all_to_all_function(group: AxesGroup) -> Callable[..., Any]:
    return all_to_all_rows if group.gloo else dist.all_to_all_single


def _group_permute(comm: TorchCommunicator, move: Move, group: AxesGroup, x: Tensor) -> Tensor:
    after = comm.process_group(move.order)
    to = group.members.index(after.members[group.number])
    shape = (
        x.shape if move.dim < 0 else with_length(x.shape, move.dim, comm.chunks(move.size, move.axes)[after.number][1])
    )
    return comm.send(group, Hop(move, to, after.number, (x,), (tuple(shape),), 0.0))()[0]


_ASYNC_COLLECTIVES: dict[str, Callable[..., Callable[[], Tensor]]] = {
    "all_gather": lambda comm, move, group, x: _start_gather(comm, move, group, x, comm.begin),
    "reduce_scatter": _start_reduce_scatter,
}
_COLLECTIVES = {
    "all_reduce": _group_all_reduce,
    "all_gather": _group_all_gather,
    "reduce_scatter": lambda *what: _start_reduce_scatter(*what)(),
    "all_to_all": _group_all_to_all,
    "permute": _group_permute,
    "halo": _group_halo,
}

"""Buckets: several tensors moved by one collective per dtype, forward and backward. A bucket has a
*face* per rank whose tensors it sees: one under torch.distributed (:class:`FlatBucket`, flat
buffers), all in one process (:class:`JointBucket`). Tensors are one list, face after face."""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autoshard.errors import RuntimeMismatchError
from autoshard.runtime.operations.stacked import stacked_view
from autoshard.runtime.transport.buffer_pool import buffer_views, is_pooled, numel, raw
from autoshard.runtime.transport.communicator import Communicator, current
from autoshard.runtime.transport.in_process import InProcessCommunicator, World
from autoshard.runtime.transport.move import LOCAL, Move
from autoshard.runtime.transport.process_group import TorchCommunicator, all_gather_single
from autoshard.runtime.transport.profiling import profiled, with_module
from autoshard.torch_private.ops import flatten_dense_tensors, unflatten_dense_tensors

BucketTensors = tuple[Tensor, ...]
MemberGradients = Sequence[Tensor | None]
BeginWork = Callable[[], Any]


class Dtypes(NamedTuple):
    """Dtypes in which values and gradients are sent; None: their own."""

    forward: torch.dtype | None = None
    backward: torch.dtype | None = None
    """of gradients, which are also summed in it"""


OWN_DTYPES = Dtypes()


class Bucket(ABC):
    """``moves``: one per tensor and face, all of one verb; ``replicas``: HSDP's axes.
    ``listed``: the plan lists each member (parameters), so profiles state their number. ``dtypes``:
    mixed precision. ``deferred``: the sum over :attr:`awaited` may be left to a later backward."""

    def __init__(
        self,
        moves: Sequence[Move],
        replicas: tuple[str, ...] = (),
        listed: bool = False,
        dtypes: Dtypes = OWN_DTYPES,
        deferred: bool = False,
    ) -> None:
        self.moves, self.replicas, self.listed, self.dtypes = tuple(moves), replicas, listed, dtypes
        first = self.moves[0]
        self.awaited = replicas or (first.axes if first.verb == "enter" else ())
        """axes of the backward's last sum, which several backwards may share; () if none"""
        self.deferred = deferred and bool(self.awaited)

    @property
    @abstractmethod
    def first_rank(self) -> Communicator:
        """A rank whose tensors it sees."""

    @property
    def last_move(self) -> Move:
        """The all-reduce of the reduced shards over the replicas."""
        return Move("P", "I", self.replicas, module=self.moves[0].module)

    @abstractmethod
    def forward(self, xs: Sequence[Tensor], phase: str) -> list[Tensor]:
        """Every tensor moved."""

    @abstractmethod
    def of(self, moves: Sequence[Move], dtype: torch.dtype | None = None) -> Bucket:
        """A bucket of other moves on the same ranks, in ``dtype``."""

    def duals(self, present: Sequence[int]) -> list[Bucket]:
        """Buckets that gradients of the tensors ``present`` go through in turn."""
        back = self.of([self.moves[i].backward() for i in present], self.dtypes.backward)
        return [back, self.of([self.last_move] * len(present))] if self.replicas else [back]

    @abstractmethod
    def backward(
        self, gradients: MemberGradients, earlier: MemberGradients = (), keeps: bool = False
    ) -> tuple[Sequence[Tensor | None], list[Any], list[BeginWork]]:
        """(gradients, perhaps still under way; works to wait for; works to begin later).
        A gradient that is None on every rank stays None and is not communicated. ``keeps``: without
        the sum over :attr:`awaited`. ``earlier``: summands of earlier backwards to add, or None."""


def record_bucket(
    comm: Communicator, moves: Sequence[Move], xs: Sequence[Tensor], phase: str, dtype: torch.dtype | None = None
) -> None:
    """Log one collective for several tensors. ``dtype``: in which they are sent; default: their
    own."""
    if not comm.logs:
        return
    axes = moves[0].axes
    size = comm.size_of(axes)
    each = ((m.ring_bytes(x, size), x.dtype.itemsize) for m, x in zip(moves, xs, strict=True))
    ring = sum(n if dtype is None else n / itemsize * dtype.itemsize for n, itemsize in each)
    comm.record(moves[0].kind, axes, phase, ring)


def indices_by_dtype(xs: Sequence[Tensor | None]) -> list[list[int]]:
    """Indices of tensors that are not None by dtype, in order of first appearance."""
    there = [i for i, x in enumerate(xs) if x is not None]
    if len({xs[i].dtype for i in there}) < 2:  # type: ignore[union-attr]
        return [there] if there else []
    groups: dict[torch.dtype, list[int]] = {}
    for i, x in enumerate(xs):
        if x is not None:
            groups.setdefault(x.dtype, []).append(i)
    return list(groups.values())


def map_moves(moves: Sequence[Move], change: Callable[[Move], Move]) -> list[Move]:
    """``change`` of every move; equal moves are changed once."""
    if moves.count(moves[0]) == len(moves):
        return [change(moves[0])] * len(moves)
    known: dict[int, Move] = {}
    return [known.get(id(m)) or known.setdefault(id(m), change(m)) for m in moves]


class BucketKind(NamedTuple):
    """What buckets must have in common to be joined."""

    verb: str
    target: str
    axes: tuple[str, ...]
    replicas: tuple[str, ...]
    dtypes: Dtypes
    deferred: bool


class FlatBucket(Bucket):
    """One flat buffer per dtype. Uneven chunks are padded at the end of a rank's row."""

    def __init__(
        self,
        comm: TorchCommunicator,
        moves: Sequence[Move],
        replicas: tuple[str, ...] = (),
        listed: bool = False,
        dtypes: Dtypes = OWN_DTYPES,
    ) -> None:
        super().__init__(moves, replicas, listed, dtypes, comm.deferred)
        self.comm = comm
        self._joints: dict[tuple[FlatBucket, ...], FlatBucket] = {}
        """buckets behind this one → all of them as one"""

    @property
    def first_rank(self) -> Communicator:
        """See :attr:`Bucket.home`."""
        return self.comm

    @property
    def gathers(self) -> bool:
        return self.moves[0].verb == "all_gather"

    def forward(self, xs: Sequence[Tensor], phase: str) -> list[Tensor]:
        out: list[Any] = list(xs)
        verb = self.moves[0].verb
        if verb == "enter" and self.dtypes.forward is None:
            return [x.detach() for x in xs]  # cheaper than views, whose metadata autograd keeps
        if verb in LOCAL:
            xs = [x.view_as(x) for x in xs] if self.dtypes.forward is None else [x.to(self.dtypes.forward) for x in xs]
            return [self.comm.local(m, x) for m, x in zip(self.moves, xs, strict=True)]
        for members in indices_by_dtype(xs):
            moves, given = [self.moves[i] for i in members], [xs[i] for i in members]
            _, work, moved = self._begin(moves, given, phase, self.dtypes.forward)
            if work is not None:
                work.wait()
            for i, y in zip(members, moved, strict=True):
                out[i] = y
        return out

    @torch.no_grad()
    def begin(self, xs: Sequence[Tensor], phase: str) -> Callable[[], list[Tensor]]:
        """Begin an all-gather of ``xs``; call the result once to wait for the gathered tensors."""
        begun = []
        for members in indices_by_dtype(xs):
            moves, parts = [self.moves[i] for i in members], [xs[i] for i in members]
            self._announce(moves, parts, phase, self.dtypes.forward)
            with profiled(self.comm, moves[0], phase, len(moves) if self.listed else 1):
                begun.append((members, self._begin_gather(moves, parts, self.dtypes.forward or parts[0].dtype)))

        def arrived() -> list[Tensor]:
            out = list(xs)
            for members, arrive in begun:
                for i, y in zip(members, arrive(), strict=True):
                    out[i] = y
            return out

        return arrived

    def of(self, moves: Sequence[Move], dtype: torch.dtype | None = None) -> Bucket:
        return FlatBucket(self.comm, moves, dtypes=Dtypes(dtype))

    @functools.cached_property
    def kind(self) -> BucketKind:
        """Buckets of one kind may be joined."""
        first = self.moves[0]
        return BucketKind(first.verb, first.target, first.axes, self.replicas, self.dtypes, self.deferred)

    def joined(self, buckets: Sequence[FlatBucket]) -> FlatBucket:
        """This bucket and others of its kind as one."""
        if len(buckets) == 1:
            return self
        key = tuple(buckets[1:])
        if key not in self._joints:
            moves = [m for b in buckets for m in b.moves]
            self._joints[key] = FlatBucket(self.comm, moves, self.replicas, self.listed, self.dtypes)
            self._joints[key].deferred = self.deferred
        return self._joints[key]

    def backward(
        self, gradients: MemberGradients, earlier: MemberGradients = (), keeps: bool = False
    ) -> tuple[Sequence[Tensor | None], list[Any], list[BeginWork]]:
        """See :meth:`Bucket.backward`."""
        dtype = self.dtypes.backward
        if keeps and not self.replicas:
            how: dict[str, Any] = {"copy": True, "memory_format": torch.contiguous_format}
            return [None if g is None else g.to(dtype or g.dtype, **how) for g in gradients], [], []
        earlier = earlier or [None] * len(gradients)
        if not self.replicas:
            gradients = [g if g is None or e is None else g + e for g, e in zip(gradients, earlier, strict=True)]
        out = list(gradients)
        works: list[Any] = []
        later: list[BeginWork] = []
        for members in indices_by_dtype(gradients):
            moves = self._backs if len(members) == len(self._backs) else [self._backs[i] for i in members]
            present = [g for i in members if (g := gradients[i]) is not None]
            buffer, work, parts = self._begin(moves, present, "backward", dtype)
            if self.replicas and not keeps:
                later.append(self._then_all_reduce(work, buffer, parts, [earlier[i] for i in members]))
            elif work is not None:
                works.append(work)
            for i, part in zip(members, parts, strict=True):
                out[i] = part
        return out, works, later

    @functools.cached_property
    def _backs(self) -> list[Move]:
        return map_moves(self.moves, Move.backward)

    def _begin(
        self, moves: list[Move], xs: list[Tensor], phase: str, dtype: torch.dtype | None
    ) -> tuple[Tensor, Any | None, list[Tensor]]:
        """(flat buffer of ``dtype``, work that fills it, moved tensors: views of it)."""
        verb, dtype = moves[0].verb, dtype or xs[0].dtype
        if verb in LOCAL:
            parts = [self.comm.local(m, x) for m, x in zip(moves, xs, strict=True)]
            buffer, moved = self._flat(parts, dtype)
            return buffer, None, moved
        self._announce(moves, xs, phase, dtype)
        with profiled(self.comm, moves[0], phase, len(moves) if self.listed else 1):
            if verb == "all_reduce":
                buffer, moved = self._flat(xs, dtype)
                return buffer, self.comm.all_reduce(self.comm.beside(moves[0].axes), buffer), moved
            if (one := self._as_one(moves, xs)) is not None:
                buffer, work, moved = self._brought([_shifted_dims(moves[0])], [one], dtype)
                return buffer, work, list(moved[0].unbind())
            return self._brought(moves, xs, dtype)

    def _brought(
        self, moves: list[Move], xs: list[Tensor], dtype: torch.dtype
    ) -> tuple[Tensor, Any | None, list[Tensor]]:
        if moves[0].verb == "reduce_scatter":
            return self._reduce_scatter(moves, xs, dtype)
        gathers = moves[0].verb == "all_gather"
        moved = self._begin_gather(moves, xs, dtype)() if gathers else self._all_to_all(moves, xs)
        return moved[0], None, moved

    def _as_one(self, moves: list[Move], xs: list[Tensor]) -> Tensor | None:
        """Activations with equal moves at equal distances in memory, stacked into one tensor."""
        alike = len(xs) > 1 and not self.listed and moves.count(moves[0]) == len(moves)
        return stacked_view(xs) if alike else None

    def _announce(self, moves: list[Move], xs: list[Tensor], phase: str, dtype: torch.dtype | None) -> None:
        record_bucket(self.comm, moves, xs, phase, dtype)
        self.comm.during(moves[0], phase)

    def _then_all_reduce(
        self, before: Any | None, buffer: Tensor, parts: list[Tensor], earlier: MemberGradients
    ) -> BeginWork:
        def begin() -> Any:
            if before is not None:
                before.wait()  # once: gloo copies its result out in every wait
            for part, kept in zip(parts, earlier, strict=True):
                if kept is not None:
                    part.add_(kept)
            record_bucket(self.comm, [self.last_move] * len(parts), parts, "backward")
            self.comm.during(self.last_move, "backward")
            with profiled(self.comm, self.last_move, "backward", len(parts)):
                return self.comm.all_reduce(self.comm.beside(self.replicas), buffer)

        return begin

    def _flat(self, xs: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """``xs`` concatenated in a buffer, and the views of each."""
        shapes = tuple([x.shape for x in xs])
        kept = is_pooled(xs[0], shapes, dtype)
        if len(xs) == 1 and not kept:
            alone = xs[0].to(dtype, copy=True, memory_format=torch.contiguous_format)
            return alone.view(-1), [alone]
        if xs[0].dtype == dtype and not kept:
            flat = flatten_dense_tensors(xs)  # one tensor would be returned as it is
            return flat, _views_like(flat, xs)
        buffer, parts = self.comm.buffer(xs[0], shapes, dtype)
        torch.cat([x.reshape(-1) for x in xs], out=buffer)
        return buffer, parts

    def _begin_gather(self, moves: list[Move], xs: list[Tensor], dtype: torch.dtype) -> Callable[[], list[Tensor]]:
        group = self.comm.beside(moves[0].axes)
        rows = [self._shapes(moves, [x.shape for x in xs], k) for k in range(group.size)]
        row, alone = sum(numel(s) for s in rows[0]), self._alone(moves, rows, group, dtype, xs[0])
        if alone:
            mine = xs[0].view(-1)
        else:
            mine = xs[0].new_empty(row, dtype=dtype)
            length = sum(x.numel() for x in xs)
            torch.cat([x.reshape(-1) for x in xs], out=mine[:length])
            if length < row:  # NCCL's NaN check reads the padding
                mine[length:].zero_()
        out = mine.new_empty(group.size * row)
        work = self.comm.begin(group, all_gather_single, raw(out), raw(mine))

        def arrive() -> list[Tensor]:
            work.wait()
            if alone:
                return buffer_views(out, [[moves[0].size, *rows[0][0][1:]]])
            by_index = list(torch.split(out, row)) if row else [out] * group.size
            if group.order is not None:
                by_index = [by_index[group.order.index(k)] for k in range(group.size)]
            pieces = [buffer_views(r, shapes) for r, shapes in zip(by_index, rows, strict=True)]
            return [torch.cat([p[i] for p in pieces], m.dim) for i, m in enumerate(moves)]

        return arrive

    def _all_to_all(self, moves: list[Move], xs: list[Tensor]) -> list[Tensor]:
        group = self.comm.process_group(moves[0].axes)
        members = range(group.size) if group.order is None else group.order
        cuts = [self.comm.chunks(m.to_size, m.axes) for m in moves]
        sent = [[x.narrow(m.to_dim, *c[k]) for m, x, c in zip(moves, xs, cuts, strict=True)] for k in members]
        mine = [x.narrow(m.to_dim, *c[group.number]).shape for m, x, c in zip(moves, xs, cuts, strict=True)]
        received = [self._shapes(moves, mine, k) for k in members]
        sends = [sum(piece.numel() for piece in pieces) for pieces in sent]
        receives = [sum(map(numel, shapes)) for shapes in received]
        buffer = torch.cat([piece.reshape(-1) for pieces in sent for piece in pieces])
        out = buffer.new_empty(sum(receives))
        scale = 1 if raw(out) is out else out.element_size()
        theirs, ours = ([n * scale for n in counts] for counts in (receives, sends))
        self.comm.run(group, dist.all_to_all_single, raw(out), raw(buffer), theirs, ours)
        by_index: list[list[Tensor]] = [[] for _ in members]
        for k, part, shapes in zip(members, torch.split(out, receives), received, strict=True):
            by_index[k] = buffer_views(part, shapes)
        return [torch.cat([pieces[i] for pieces in by_index], m.dim) for i, m in enumerate(moves)]

    def _reduce_scatter(
        self, moves: list[Move], gradients: list[Tensor], dtype: torch.dtype
    ) -> tuple[Tensor, Any, list[Tensor]]:
        group = self.comm.beside(moves[0].axes)
        rows = [self._shapes(moves, [g.shape for g in gradients], k) for k in range(group.size)]
        row = sum(numel(s) for s in rows[0])
        if self._alone(moves, rows, group, dtype, gradients[0]):
            out = gradients[0].new_empty(row)
            return (
                out,
                self.comm.reduce_scatter(group, out, gradients[0].view(-1)),
                buffer_views(out, rows[group.number]),
            )
        buffer = gradients[0].new_empty(group.size * row, dtype=dtype)
        for position in range(group.size):
            k = position if group.order is None else group.order[position]
            part = buffer[position * row : (position + 1) * row]
            cuts = [self.comm.chunks(m.size, m.axes)[k] for m in moves]
            pieces = [g.narrow(m.dim, *c).reshape(-1) for g, m, c in zip(gradients, moves, cuts, strict=True)]
            length = sum(p.numel() for p in pieces)
            torch.cat(pieces, out=part[:length])
            if length < row:
                part[length:].zero_()
        out = buffer.new_empty(row)
        work = self.comm.reduce_scatter(group, out, buffer)
        return out, work, buffer_views(out, rows[group.number])

    def _alone(self, moves: list[Move], rows: list[list[list[int]]], group: Any, dtype: Any, x: Tensor) -> bool:
        """Whether it is one tensor whose chunks are contiguous: no copy is needed."""
        even = group.order is None and rows[0] == rows[-1]
        return even and len(moves) == 1 and moves[0].dim == 0 and x.dtype == dtype and x.is_contiguous()

    def _shapes(self, moves: list[Move], shapes: Iterable[Sequence[int]], k: int) -> list[list[int]]:
        """Shapes of the chunks of rank number ``k`` of the group."""
        lengths = [self.comm.chunks(m.size, m.axes)[k][1] for m in moves]
        return [[*s[: m.dim], n, *s[m.dim + 1 :]] for m, s, n in zip(moves, shapes, lengths, strict=True)]


def _shifted_dims(move: Move) -> Move:
    """The same move of a tensor with one more dim in front."""
    return move._replace(**{name: n + 1 for name in ("dim", "to_dim") if (n := getattr(move, name)) >= 0})


def _views_like(buffer: Tensor, xs: list[Tensor]) -> list[Tensor]:
    """Consecutive views of ``buffer`` shaped as ``xs``; torch's call loses shapes of empty ones."""
    if 0 in [x.numel() for x in xs]:
        return buffer_views(buffer, [x.shape for x in xs])
    return list(unflatten_dense_tensors(buffer, xs))


class JointBucket(Bucket):
    """All in-process ranks' bucket, without flat buffers; logged as one collective per dtype."""

    def __init__(
        self,
        world: World,
        moves: Sequence[Move],
        replicas: tuple[str, ...] = (),
        listed: bool = False,
        dtypes: Dtypes = OWN_DTYPES,
    ) -> None:
        super().__init__(moves, replicas, listed, dtypes, world.ranks[0].deferred)
        self.world = world
        self.count = len(self.moves) // world.size

    @property
    def first_rank(self) -> Communicator:
        """See :attr:`Bucket.home`."""
        return self.world.ranks[0]

    def forward(self, xs: Sequence[Tensor], phase: str) -> list[Tensor]:
        return [y for y in self._execute(self.moves, _cast_all(xs, self.dtypes.forward), phase) if y is not None]

    def of(self, moves: Sequence[Move], dtype: torch.dtype | None = None) -> Bucket:
        """See :meth:`Bucket.of`; the same for every face."""
        return JointBucket(self.world, moves, dtypes=Dtypes(dtype))

    def backward(
        self, gradients: MemberGradients, earlier: MemberGradients = (), keeps: bool = False
    ) -> tuple[Sequence[Tensor | None], list[Any], list[BeginWork]]:
        """See :meth:`Bucket.backward`; nothing is under way afterwards. Gradients are unsharded
        here, so their sum is free: a deferred sum is only not logged."""
        waits, gradients = self.deferred, _cast_all(gradients, self.dtypes.backward)
        out = self._execute([m.backward() for m in self.moves], gradients, "backward", waits and not self.replicas)
        if self.replicas:
            out = self._execute([self.last_move] * len(out), out, "backward", waits)
        return out, [], []

    def _execute(self, moves: Sequence[Move], xs: MemberGradients, phase: str, waits: bool = False) -> MemberGradients:
        out: list[Tensor | None] = [None] * len(xs)
        first = self.world.ranks[0]
        if moves[0].verb not in LOCAL and not waits:
            for members in indices_by_dtype(xs[: self.count]):
                record_bucket(
                    first, [moves[i] for i in members], [x for i in members if (x := xs[i]) is not None], phase
                )
        # The forward runs in any rank's thread, so each rank records it where it waits.
        shown = self.count if self.listed else 1
        with profiled(first, moves[0], phase, shown) if phase == "backward" and not waits else contextlib.nullcontext():
            self._carry_out(moves, xs, out)
        return out

    def _carry_out(self, moves: Sequence[Move], xs: MemberGradients, out: list[Tensor | None]) -> None:
        for i in range(self.count):
            faces = range(i, len(xs), self.count)
            ours = [x for f in faces if (x := xs[f]) is not None]
            if ours:
                for f, y in zip(faces, self.world.carry_out([moves[f] for f in faces], ours), strict=True):
                    out[f] = y


def move_bucketed(
    what: str,
    moves: Sequence[Move],
    xs: Sequence[Tensor],
    through: Callable[[Bucket, Sequence[Tensor]], BucketTensors],
    replicas: tuple[str, ...] = (),
    listed: bool = False,
    dtypes: Dtypes = OWN_DTYPES,
) -> BucketTensors:
    """Every tensor moved: ``through(bucket, tensors)``, with all faces' tensors in one process.
    ``what``: the caller's name, for errors. Other arguments: see :class:`Bucket`."""
    comm = current()
    module = with_module(moves[0], always=isinstance(comm, TorchCommunicator)).module
    moves = map_moves(moves, lambda move: move._replace(module=module))
    if isinstance(comm, TorchCommunicator):
        return through(FlatBucket(comm, moves, replicas, listed, dtypes), xs)
    if not isinstance(comm, InProcessCommunicator):
        raise RuntimeMismatchError(f"{what}: unknown communicator {type(comm).__name__}")
    world = comm.world

    def joint(values: list[tuple[Sequence[Move], Sequence[Tensor]]]) -> list[BucketTensors]:
        bucket = JointBucket(world, [m for ms, _ in values for m in ms], replicas, listed, dtypes)
        out = through(bucket, [x for _, ys in values for x in ys])
        return [out[i * len(xs) : (i + 1) * len(xs)] for i in range(world.size)]

    key = f"{what} of {len(xs)} tensors, the first a {moves[0].key}"
    with profiled(comm, moves[0], comm.phase, len(moves) if listed else 1):
        result: BucketTensors = world.meet(comm.rank, key, (moves, xs), joint)
    return result


def _cast_all(xs: Any, dtype: torch.dtype | None) -> Any:
    return [x if x is None or dtype is None else x.to(dtype) for x in xs]

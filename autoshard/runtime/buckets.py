"""Several tensors moved together: one collective per dtype instead of one per tensor.

A bucket has a *face* for every rank whose tensors it sees: one under torch.distributed, all of them in-process.
Tensors come and go as one list, face after face.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autoshard.errors import RuntimeMismatchError
from autoshard.runtime.communicator import Communicator, current
from autoshard.runtime.in_process import InProcessCommunicator, World
from autoshard.runtime.move import LOCAL, Move
from autoshard.runtime.process_group import TorchCommunicator, all_gather_single, numel
from autoshard.runtime.profiling import named, recorded
from autoshard.runtime.wire import raw

Tensors = tuple[torch.Tensor, ...]
Gradients = Sequence[torch.Tensor | None]
Begin = Callable[[], Any]


class Dtypes(NamedTuple):
    """In which dtypes tensors travel, and arrive; None: in their own."""

    forward: torch.dtype | None = None
    backward: torch.dtype | None = None
    """of gradients; in this one they are summed"""


PLAIN = Dtypes()


class Bucket(ABC):
    """``moves``: one for each tensor of each face, all of one verb; ``replicas``: axes that hold the same shards.

    ``listed``: whether the plan lists every member, as it does for parameters; profiles then say how many there are.
    ``dtypes``: of mixed precision. ``deferred``: whether the backward may leave the last sum to a later one, see
    :attr:`awaited`.
    """

    def __init__(
        self,
        moves: Sequence[Move],
        replicas: tuple[str, ...] = (),
        listed: bool = False,
        dtypes: Dtypes = PLAIN,
        deferred: bool = False,
    ) -> None:
        self.moves, self.replicas, self.listed, self.dtypes = tuple(moves), replicas, listed, dtypes
        self.deferred = deferred and bool(self.awaited)

    @property
    def awaited(self) -> tuple[str, ...]:
        """Axes whose sum comes last in the backward, so that it may be taken once for several; () where there is none."""
        return self.replicas or (self.moves[0].axes if self.moves[0].verb == "enter" else ())

    @property
    def last_move(self) -> Move:
        """What the replicas do with the reduced shards' gradients."""
        return Move("P", "I", self.replicas, module=self.moves[0].module)

    @abstractmethod
    def forward(self, xs: Sequence[torch.Tensor], phase: str) -> list[torch.Tensor]:
        """Every tensor moved."""

    @abstractmethod
    def of(self, moves: Sequence[Move], dtype: torch.dtype | None = None) -> Bucket:
        """A bucket of other moves on the same ranks, in this dtype."""

    def duals(self, present: Sequence[int]) -> list[Bucket]:
        """What the gradients of the tensors with these numbers go through, one after the other."""
        back = self.of([self.moves[i].backward() for i in present], self.dtypes.backward)
        return [back, self.of([self.last_move] * len(present))] if self.replicas else [back]

    @abstractmethod
    def backward(
        self, gradients: Gradients, earlier: Gradients = (), keeps: bool = False
    ) -> tuple[Sequence[torch.Tensor | None], list[Any], list[Begin]]:
        """Gradients, perhaps still under way: ``(gradients, works to wait for, works to begin later)``.

        A gradient that is None on every rank stays None and is not communicated. ``keeps``: without the sum over
        :attr:`awaited`; ``earlier``: what was kept of earlier backward passes, None where nothing was, to go into it.
        """


class FlatBucket(Bucket):
    """One flat buffer per dtype on torch.distributed. Chunks that are uneven are padded at the end of a rank's row."""

    def __init__(
        self,
        comm: TorchCommunicator,
        moves: Sequence[Move],
        replicas: tuple[str, ...] = (),
        listed: bool = False,
        dtypes: Dtypes = PLAIN,
    ) -> None:
        super().__init__(moves, replicas, listed, dtypes, comm.deferred)
        self.comm = comm

    def forward(self, xs: Sequence[torch.Tensor], phase: str) -> list[torch.Tensor]:
        out: list[Any] = list(xs)
        if self.moves[0].verb in LOCAL:
            xs = [x.view_as(x) for x in xs] if self.dtypes.forward is None else [x.to(self.dtypes.forward) for x in xs]
            return [self.comm.local(m, x) for m, x in zip(self.moves, xs, strict=True)]
        for members in _by_dtype(xs):
            moves, given = [self.moves[i] for i in members], [xs[i] for i in members]
            _, work, moved = self._begin(moves, given, phase, self.dtypes.forward)
            if work is not None:
                work.wait()
            for i, y in zip(members, moved, strict=True):
                out[i] = y
        return out

    def of(self, moves: Sequence[Move], dtype: torch.dtype | None = None) -> Bucket:
        return FlatBucket(self.comm, moves, dtypes=Dtypes(dtype))

    def backward(
        self, gradients: Gradients, earlier: Gradients = (), keeps: bool = False
    ) -> tuple[Sequence[torch.Tensor | None], list[Any], list[Begin]]:
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
        later: list[Begin] = []
        for members in _by_dtype(gradients):
            moves = [self.moves[i].backward() for i in members]
            present = [g for i in members if (g := gradients[i]) is not None]
            buffer, work, parts = self._begin(moves, present, "backward", dtype)
            if self.replicas and not keeps:
                later.append(self._then_all_reduce(work, buffer, parts, [earlier[i] for i in members]))
            elif work is not None:
                works.append(work)
            for i, part in zip(members, parts, strict=True):
                out[i] = part
        return out, works, later

    def _begin(
        self, moves: list[Move], xs: list[torch.Tensor], phase: str, dtype: torch.dtype | None
    ) -> tuple[torch.Tensor, Any | None, list[torch.Tensor]]:
        """A flat buffer, the work that fills it, and the moved tensors: parts of it. ``dtype``: of the buffer."""
        verb, dtype = moves[0].verb, dtype or xs[0].dtype
        if verb in LOCAL:
            parts = [self.comm.local(m, x) for m, x in zip(moves, xs, strict=True)]
            buffer = _flat(parts, dtype)
            return buffer, None, _views(buffer, [p.shape for p in parts])
        record(self.comm, moves, xs, phase, dtype)
        self.comm.during(moves[0], phase)
        with recorded(self.comm, moves[0], phase, len(moves) if self.listed else 1):
            if verb == "all_reduce":
                buffer = _flat(xs, dtype)
                return buffer, self._all_reduce(buffer, moves[0].axes), _views(buffer, [x.shape for x in xs])
            if verb == "reduce_scatter":
                return self._reduce_scatter(moves, xs, dtype)
            moved = self._gather(moves, xs, dtype) if verb == "all_gather" else self._all_to_all(moves, xs)
            return moved[0], None, moved

    def _then_all_reduce(
        self, before: Any | None, buffer: torch.Tensor, parts: list[torch.Tensor], earlier: Gradients
    ) -> Begin:
        def begin() -> Any:
            if before is not None:
                before.wait()  # once only: gloo copies its result out in every wait
            for part, kept in zip(parts, earlier, strict=True):
                if kept is not None:
                    part.add_(kept)
            record(self.comm, [self.last_move] * len(parts), parts, "backward")
            self.comm.during(self.last_move, "backward")
            with recorded(self.comm, self.last_move, "backward", len(parts)):
                return self._all_reduce(buffer, self.replicas)

        return begin

    def _all_reduce(self, buffer: torch.Tensor, axes: tuple[str, ...]) -> Any:
        return self.comm.begin(self.comm.process_group(axes), dist.all_reduce, buffer)

    def _gather(self, moves: list[Move], xs: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        group = self.comm.process_group(moves[0].axes)
        rows = [self._shapes(moves, [x.shape for x in xs], k) for k in range(group.size)]
        row = sum(numel(s) for s in rows[0])
        mine = xs[0].new_empty(row, dtype=dtype)
        torch.cat([x.reshape(-1) for x in xs], out=mine[: sum(x.numel() for x in xs)])
        out = mine.new_empty(group.size * row)
        self.comm.run(group, all_gather_single, raw(out), raw(mine))
        by_index = list(torch.split(out, row)) if row else [out] * group.size
        if group.order is not None:
            by_index = [by_index[group.order.index(k)] for k in range(group.size)]
        pieces = [_views(r, shapes) for r, shapes in zip(by_index, rows, strict=True)]
        return [torch.cat([p[i] for p in pieces], m.dim) for i, m in enumerate(moves)]

    def _all_to_all(self, moves: list[Move], xs: list[torch.Tensor]) -> list[torch.Tensor]:
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
        by_index: list[list[torch.Tensor]] = [[] for _ in members]
        for k, part, shapes in zip(members, torch.split(out, receives), received, strict=True):
            by_index[k] = _views(part, shapes)
        return [torch.cat([pieces[i] for pieces in by_index], m.dim) for i, m in enumerate(moves)]

    def _reduce_scatter(
        self, moves: list[Move], gradients: list[torch.Tensor], dtype: torch.dtype
    ) -> tuple[torch.Tensor, Any, list[torch.Tensor]]:
        group = self.comm.process_group(moves[0].axes)
        rows = [self._shapes(moves, [g.shape for g in gradients], k) for k in range(group.size)]
        row = sum(numel(s) for s in rows[0])
        buffer = gradients[0].new_empty(group.size * row, dtype=dtype)
        for position in range(group.size):
            k = position if group.order is None else group.order[position]
            part = buffer[position * row : (position + 1) * row]
            cuts = [self.comm.chunks(m.size, m.axes)[k] for m in moves]
            pieces = [g.narrow(m.dim, *c).reshape(-1) for g, m, c in zip(gradients, moves, cuts, strict=True)]
            length = sum(p.numel() for p in pieces)
            torch.cat(pieces, out=part[:length])
            part[length:].zero_()
        out = buffer.new_empty(row)
        work = self.comm.reduce_scatter(group, out, buffer)
        return out, work, _views(out, rows[group.number])

    def _shapes(self, moves: list[Move], shapes: Iterable[Sequence[int]], k: int) -> list[list[int]]:
        """Shapes of the chunks of rank number ``k`` of the group."""
        lengths = [self.comm.chunks(m.size, m.axes)[k][1] for m in moves]
        return [[*s[: m.dim], n, *s[m.dim + 1 :]] for m, s, n in zip(moves, shapes, lengths, strict=True)]


class JointBucket(Bucket):
    """The same for all in-process ranks at once, without flat buffers; logged as one collective per dtype."""

    def __init__(
        self,
        world: World,
        moves: Sequence[Move],
        replicas: tuple[str, ...] = (),
        listed: bool = False,
        dtypes: Dtypes = PLAIN,
    ) -> None:
        super().__init__(moves, replicas, listed, dtypes, world.ranks[0].deferred)
        self.world = world
        self.count = len(self.moves) // world.size

    def forward(self, xs: Sequence[torch.Tensor], phase: str) -> list[torch.Tensor]:
        return [y for y in self._execute(self.moves, _as(xs, self.dtypes.forward), phase) if y is not None]

    def of(self, moves: Sequence[Move], dtype: torch.dtype | None = None) -> Bucket:
        """See :meth:`Bucket.of`; the same for every face."""
        return JointBucket(self.world, moves, dtypes=Dtypes(dtype))

    def backward(
        self, gradients: Gradients, earlier: Gradients = (), keeps: bool = False
    ) -> tuple[Sequence[torch.Tensor | None], list[Any], list[Begin]]:
        """See :meth:`Bucket.backward`. Nothing is under way afterwards.

        Here gradients are kept whole, whose summands cost nothing to add: a sum that waits is one that is not counted.
        """
        waits, gradients = self.deferred, _as(gradients, self.dtypes.backward)
        out = self._execute([m.backward() for m in self.moves], gradients, "backward", waits and not self.replicas)
        if self.replicas:
            out = self._execute([self.last_move] * len(out), out, "backward", waits)
        return out, [], []

    def _execute(self, moves: Sequence[Move], xs: Gradients, phase: str, waits: bool = False) -> Gradients:
        out: list[torch.Tensor | None] = [None] * len(xs)
        first = self.world.ranks[0]
        if moves[0].verb not in LOCAL and not waits:
            for members in _by_dtype(xs[: self.count]):
                record(first, [moves[i] for i in members], [x for i in members if (x := xs[i]) is not None], phase)
        # The forward runs in any rank's thread; every rank records it where it waits for it.
        shown = self.count if self.listed else 1
        with recorded(first, moves[0], phase, shown) if phase == "backward" and not waits else contextlib.nullcontext():
            self._carry_out(moves, xs, out)
        return out

    def _carry_out(self, moves: Sequence[Move], xs: Gradients, out: list[torch.Tensor | None]) -> None:
        for i in range(self.count):
            faces = range(i, len(xs), self.count)
            ours = [x for f in faces if (x := xs[f]) is not None]
            if ours:
                for f, y in zip(faces, self.world.carry_out([moves[f] for f in faces], ours), strict=True):
                    out[f] = y


def carried(
    what: str,
    moves: Sequence[Move],
    xs: Sequence[torch.Tensor],
    through: Callable[[Bucket, Sequence[torch.Tensor]], Tensors],
    replicas: tuple[str, ...] = (),
    listed: bool = False,
    dtypes: Dtypes = PLAIN,
) -> Tensors:
    """Every tensor moved: ``through(bucket, tensors)``, on all faces' tensors where this process holds all ranks.

    ``what``: the caller's name, for errors; ``replicas``, ``listed`` and ``dtypes`` as in :class:`Bucket`.
    """
    comm = current()
    module = named(moves[0], always=isinstance(comm, TorchCommunicator)).module
    moves = [move._replace(module=module) for move in moves]
    if isinstance(comm, TorchCommunicator):
        return through(FlatBucket(comm, moves, replicas, listed, dtypes), xs)
    if not isinstance(comm, InProcessCommunicator):
        raise RuntimeMismatchError(f"{what}: unknown communicator {type(comm).__name__}")
    world = comm.world

    def joint(values: list[tuple[Sequence[Move], Sequence[torch.Tensor]]]) -> list[Tensors]:
        bucket = JointBucket(world, [m for ms, _ in values for m in ms], replicas, listed, dtypes)
        out = through(bucket, [x for _, ys in values for x in ys])
        return [out[i * len(xs) : (i + 1) * len(xs)] for i in range(world.size)]

    key = f"{what} of {len(xs)} tensors, the first a {moves[0].key}"
    with recorded(comm, moves[0], comm.phase, len(moves) if listed else 1):
        result: Tensors = world.meet(comm.rank, key, (moves, xs), joint)
    return result


def record(
    comm: Communicator, moves: Sequence[Move], xs: Sequence[torch.Tensor], phase: str, dtype: torch.dtype | None = None
) -> None:
    """Log one collective for several tensors. ``dtype``: in which they travel, where that is not their own."""
    axes = moves[0].axes
    size = comm.size_of(axes)
    each = ((m.ring_bytes(x, size), x.dtype.itemsize) for m, x in zip(moves, xs, strict=True))
    ring = sum(n if dtype is None else n / itemsize * dtype.itemsize for n, itemsize in each)
    comm.record(moves[0].verb, axes, phase, ring)


def _by_dtype(xs: Sequence[torch.Tensor | None]) -> list[list[int]]:
    """Indices of the tensors that exist, by dtype, in the order of first appearance."""
    groups: dict[torch.dtype, list[int]] = {}
    for i, x in enumerate(xs):
        if x is not None:
            groups.setdefault(x.dtype, []).append(i)
    return list(groups.values())


def _as(xs: Any, dtype: torch.dtype | None) -> Any:
    """Every tensor in this dtype."""
    return [x if x is None or dtype is None else x.to(dtype) for x in xs]


def _flat(xs: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    out = xs[0].new_empty(sum(x.numel() for x in xs), dtype=dtype)
    return torch.cat([x.reshape(-1) for x in xs], out=out)


def _views(buffer: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Consecutive views of ``buffer``."""
    out, at = [], 0
    for shape in shapes:
        n = numel(shape)
        out.append(buffer[at : at + n].view(shape))
        at += n
    return out

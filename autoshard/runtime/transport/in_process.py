"""Simulated ranks: all ranks are threads of one process, and one of them runs at a time.

A rank runs until it needs the others, leaves its tensor and lets the next rank run. The last to
arrive executes the collective for all. So ranks never race, random draws come in rank order, and a
rank that never comes is an error at once. Where a gradient flows, a collective is one autograd node
over all ranks' tensors: one graph spans the mesh, and a plain ``loss.backward()`` runs it."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autoshard.errors import RuntimeMismatchError
from autoshard.runtime.transport import sparse
from autoshard.runtime.transport.communicator import Communicator, Executed, bind, current, in_order_of
from autoshard.runtime.transport.move import LOCAL, Move, piece, together
from autoshard.runtime.transport.profiling import named, recorded
from autoshard.runtime.transport.relay import Arrival, Begun, Collective, Hop
from autoshard.runtime.transport.schedule import Joint, Schedule, Threads, ThreadState

Tensors = tuple[torch.Tensor, ...]


class World:
    """A simulated mesh, for example ``World({"dp": 2, "tp": 2})``.

    ``log``: None, or a list that receives every collective once (bytes per rank, rank 0's
    group)."""

    def __init__(self, axes: Mapping[str, int]) -> None:
        self.log: list[Executed] | None = None
        first = InProcessCommunicator(self, axes, 0)
        self.ranks = [first, *(InProcessCommunicator(self, axes, r) for r in range(1, first.world_size))]
        self._threads: Threads | None = None
        self._process = os.getpid()
        self._schedule: Schedule | None = None

    def __reduce__(self) -> Any:
        return World, (self.ranks[0].mesh,)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def run(self, fn: Callable[..., Any], args: Sequence[Sequence[Any]] | None = None) -> list[Any]:
        """``fn(*args[rank])`` on every rank; returns results by rank. Rank 0 runs in this thread.

        Grad and inference mode, autocast and default device of the caller hold in every rank.
        Raises the first exception of any rank, and :class:`RuntimeMismatchError` if collectives
        differ between ranks."""
        if self._schedule is not None:
            raise RuntimeMismatchError("this in-process mesh is already running; a nested run needs a World of its own")
        if self._threads is None or self._process != os.getpid():  # threads do not survive a fork
            self._threads, self._process = Threads(self.size), os.getpid()
        schedule = self._schedule = Schedule(self._threads)
        results: list[Any] = [None] * self.size
        state = ThreadState()

        def rank_fn(rank: int) -> None:
            with state.restored() if rank else contextlib.nullcontext(), bind(self.ranks[rank]):
                results[rank] = fn(*(args[rank] if args is not None else ()))

        def rank_main(rank: int) -> None:
            schedule.rank_main(rank, lambda: rank_fn(rank))

        self._threads.job[0] = rank_main
        try:
            rank_main(0)
            schedule.wait()
        except BaseException:
            self._threads = None  # an interrupt may have left a rank behind; the next run starts afresh
            raise
        finally:
            self._schedule = None
        self._threads.job[0] = None
        return results

    def meet(self, rank: int, what: Any, value: Any, joint: Joint) -> Any:
        """Wait for all ranks; ``joint(values by rank)`` runs once and gives each rank its result.

        ``what``: printable purpose of the call. Ranks with different ones raise
        :class:`RuntimeMismatchError`."""
        if self._schedule is None:
            raise RuntimeMismatchError(f"{what}: a collective of the in-process mesh outside World.run")
        return self._schedule.meet(rank, what, value, joint)

    def execute(self, moves: Sequence[Move], xs: Sequence[torch.Tensor], phase: str) -> list[torch.Tensor]:
        """One move of all ranks, without autograd, logged."""
        verb, axes = moves[0].verb, moves[0].axes
        if self.log is not None and verb not in LOCAL:
            ring = moves[0].ring_bytes(xs[0], self.ranks[0].size_of(axes))
            self.ranks[0].record("all_gather" if xs[0].is_sparse else moves[0].kind, axes, phase, ring)
        return self.carry_out(moves, xs)

    def carry_out(self, moves: Sequence[Move], xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One move of all ranks, without autograd and log."""
        return [in_order_of(x, out) for x, out in zip(xs, self._carry_out(moves, xs), strict=True)]

    def _carry_out(self, moves: Sequence[Move], xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        verb = moves[0].verb
        if verb in LOCAL:
            return [comm.local(move, x) for comm, move, x in zip(self.ranks, moves, xs, strict=True)]
        out: list[Any] = [None] * self.size
        for first, comm in enumerate(self.ranks):
            if out[first] is not None:
                continue
            group = comm.group(moves[first].axes)
            if xs[first].is_sparse:
                parts = _sparse(comm, moves[first], [xs[r] for r in group])
            elif moves[first].splits is not None:
                parts = _exchanged([moves[r] for r in group], [xs[r] for r in group])
            else:
                parts = _GROUP_OPS[verb](comm, moves[first], [xs[r] for r in group])
            receivers = comm.group(moves[first].order) if verb == "permute" else group
            for r, part in zip(receivers, parts, strict=True):
                out[r] = part
        return out


class InProcessCommunicator(Communicator):
    """One rank of a :class:`World`."""

    def __init__(self, world: World, axes: Mapping[str, int], rank: int) -> None:
        super().__init__(axes, rank)
        self.world = world

    def apply(self, move: Move, x: torch.Tensor) -> torch.Tensor:
        """See :meth:`Communicator.apply`. Local moves without a gradient need no meeting."""
        if move.verb in LOCAL and not (x.requires_grad and torch.is_grad_enabled()):
            return in_order_of(x, self.local(move, x))
        move = named(move)
        with recorded(self, move, self.phase):
            result: torch.Tensor = self.world.meet(self.rank, move.key, (move, x), self._joint)
        return result

    def _joint(self, values: list[tuple[Move, torch.Tensor]]) -> Sequence[torch.Tensor]:
        moves, xs = zip(*values, strict=True)
        return _joint(self.world, moves, xs, self.phase)

    def exchange(self, hops: Sequence[Begun], phase: str) -> Sequence[Arrival]:
        """See :meth:`Communicator.exchange`."""
        together = [hop for hop in hops if isinstance(hop, Collective)]
        if together:
            with recorded(self, together[0].move, phase):
                moved = self.world.execute([hop.move for hop in together], [hop.x for hop in together], phase)
            return [functools.partial(tuple, (x,)) for x in moved]
        return self._permute([hop for hop in hops if isinstance(hop, Hop)], phase)

    def _permute(self, hops: Sequence[Hop], phase: str) -> Sequence[Arrival]:
        first = hops[0]
        self.record("permute", first.move.axes, phase, first.bytes)
        sent: dict[int, tuple[torch.Tensor, ...]] = {}
        with recorded(self, first.move, phase):
            for rank, hop in zip(self.world.ranks, hops, strict=True):
                sent[rank.group(hop.move.axes)[hop.to]] = hop.tensors
        for rank, hop in zip(self.world.ranks, hops, strict=True):
            if [x.shape for x in sent[rank.rank]] != list(hop.shapes):
                raise RuntimeMismatchError(f"{hop.move}: rank {rank.rank} gets other shapes than {hop.shapes}")
            if hop.into is not None:
                sent[rank.rank] = (hop.into.copy_(sent[rank.rank][0]),)
        return [functools.partial(sent.__getitem__, rank.rank) for rank in self.world.ranks]

    def meet(self, what: str, value: Any, joint: Joint) -> Any:
        """See :meth:`Communicator.meet`."""
        return self.world.meet(self.rank, what, value, joint)

    def gathered(self, what: str, mine: Any) -> Sequence[Any]:
        """See :meth:`Communicator.gathered`."""
        every: Sequence[Any] = self.world.meet(self.rank, what, mine, lambda runs: [tuple(runs)] * self.world.size)
        return every

    def repeat(self, runs: Sequence[tuple[Callable[..., None], Sequence[Any]]]) -> None:
        """See :meth:`Communicator.repeat`."""

        def again(run: Callable[..., None], inputs: Sequence[Any]) -> None:
            with current().in_backward():
                run(*inputs)

        self.world.run(again, list(runs))

    def shared(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :meth:`Communicator.shared`: the last rank to arrive draws once for all."""
        what = f"shared {getattr(fn, '__name__', fn)}"
        return self.world.meet(self.rank, what, None, lambda _: [fn(*args, **kwargs)] * self.world.size)

    @property
    def logs(self) -> bool:
        """See :attr:`Communicator.logs`."""
        return self.world.log is not None

    def record(self, kind: str, axes: tuple[str, ...], phase: str, ring_bytes: float) -> None:
        """Append to the world's log, if there is one."""
        if self.world.log is not None:
            self.world.log.append(Executed(kind, self.named(kind, axes), phase, ring_bytes))


def _joint(world: World, moves: tuple[Move, ...], xs: Tensors, phase: str) -> Sequence[torch.Tensor]:
    if torch.is_grad_enabled() and any(x.requires_grad for x in xs):
        out: Tensors = _Joint.apply(world, moves, phase, *xs)  # type: ignore[no-untyped-call]
        return out
    return world.execute(moves, xs, phase)


class _Joint(torch.autograd.Function):
    """One move of all ranks as one autograd node."""

    @staticmethod
    def forward(ctx: Any, world: World, moves: tuple[Move, ...], phase: str, *xs: torch.Tensor) -> Tensors:
        ctx.world, ctx.moves = world, moves
        ctx.set_materialize_grads(False)
        out = tuple(world.execute(moves, xs, phase))
        ctx.shapes = [(y.shape, y.dtype, y.device) for y in out]
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if all(g is None for g in gradients):  # no rank's result is used: no gradient
            return None, None, None, *gradients
        given = tuple(
            torch.zeros(shape, dtype=dtype, device=device) if g is None else g
            for g, (shape, dtype, device) in zip(gradients, ctx.shapes, strict=True)
        )
        moves = tuple(move.backward() for move in ctx.moves)
        with recorded(ctx.world.ranks[0], moves[0], "backward"):
            return None, None, None, *_joint(ctx.world, moves, given, "backward")


def _all_reduce(comm: Communicator, move: Move, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    total = _reduced(move, xs)
    return [total, *(total.clone() for _ in xs[1:])]


def _reduce_scatter(comm: Communicator, move: Move, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    total = _reduced(move, xs)
    # Copies: a view would keep the full sum alive.
    parts = (total.narrow(move.dim, *c) for c in comm.chunks(move.size, move.axes))
    return [part.clone(memory_format=torch.contiguous_format) for part in parts]


def _all_gather(comm: Communicator, move: Move, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    total = torch.cat(xs, move.dim)
    return [total, *(total.clone() for _ in xs[1:])]


def _all_to_all(comm: Communicator, move: Move, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    cuts = comm.chunks(move.to_size, move.axes)
    return [torch.cat([x.narrow(move.to_dim, *c) for x in xs], move.dim) for c in cuts]


def _exchanged(moves: list[Move], xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """All-to-all of rows, by the moves' splits."""
    ways = [move.splits for move in moves if move.splits is not None]
    sent = [way.going(x).split(way.sent) for way, x in zip(ways, xs, strict=True)]
    return [way.staying(torch.cat(parts)) for way, parts in zip(ways, zip(*sent, strict=True), strict=True)]


def _sparse(comm: Communicator, move: Move, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [sparse.joined(move, xs, comm.chunks, number) for number in range(len(xs))]


def _permute(comm: Communicator, move: Move, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.clone() for x in xs]


def _halo(comm: Communicator, move: Move, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [together(move, r, [piece(move, s, r, x) for s, x in enumerate(xs)]) for r in range(len(xs))]


_GROUP_OPS = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "permute": _permute,
    "halo": _halo,
}


def _reduced(move: Move, xs: list[torch.Tensor]) -> torch.Tensor:
    total = xs[0].clone(memory_format=torch.contiguous_format)
    for x in xs[1:]:
        total = _COMBINE[move.op](total, x)
    return total


_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}

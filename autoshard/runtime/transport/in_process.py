"""Simulated ranks: all ranks are threads of one process, and one runs at a time, until it needs the
others; the last to arrive executes the collective for all. So ranks never race, random draws
come in rank order, and a missing rank ends the run. Where a gradient flows, a collective is one
autograd node over all ranks' tensors, and ``loss.backward()`` runs the one graph."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.errors import RuntimeMismatchError
from autoshard.runtime.transport import sparse_gradients
from autoshard.runtime.transport.communicator import Communicator, Executed, bind, current
from autoshard.runtime.transport.move import LOCAL, Move, assemble_halo, halo_piece
from autoshard.runtime.transport.profiling import profiled, with_module
from autoshard.runtime.transport.rank_coroutines import Arrival, Collective, Hop, Sending
from autoshard.runtime.transport.torch_state import autocast_state

Joint = Callable[[list[Any]], Sequence[Any]]


class Threads:
    """One waiting thread per rank but 0, which runs in the caller. They end with this object."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turns = [threading.Lock() for _ in range(size)]
        for turn in self.turns:
            turn.acquire()
        self.job: list[Callable[[int], None] | None] = [None]
        for rank in range(1, size):
            args = (self.turns[rank], self.job, rank)
            threading.Thread(target=_rank_thread, args=args, name=f"autoshard rank {rank}", daemon=True).start()
        weakref.finalize(self, _end_threads, self.turns, self.job)


def _rank_thread(turn: threading.Lock, job: list[Callable[[int], None] | None], rank: int) -> None:
    while True:
        turn.acquire()
        if job[0] is None:
            return
        job[0](rank)


def _end_threads(turns: list[threading.Lock], job: list[Callable[[int], None] | None]) -> None:
    job[0] = None
    for turn in turns[1:]:
        if turn.locked():
            turn.release()


class Schedule:
    """One run: whose turn it is, who waits with what, and the first failure."""

    def __init__(self, threads: Threads) -> None:
        self.failure: BaseException | None = None
        self._size, self._turns = threads.size, threads.turns
        self._running = 0
        self._ended: set[int] = set()
        self._waiting: dict[int, tuple[Any, Any]] = {}
        self._results: Sequence[Any] = ()
        self._done = threading.Lock()
        self._done.acquire()

    def rank_main(self, rank: int, fn: Callable[[], None]) -> None:
        """Body of a rank's thread, from its first turn to the end of the run."""
        try:
            if self.failure is None:
                fn()
        except _Aborted:
            pass
        except BaseException as error:  # the caller's thread raises it
            self.failure = self.failure or error
        self._ended.add(rank)
        self._waiting.pop(rank, None)
        self._pass_on(rank)

    def wait(self) -> None:
        """Wait until every rank has ended; raise the first failure."""
        self._done.acquire()
        if self.failure is not None:
            raise self.failure

    def meet(self, rank: int, what: Any, value: Any, joint: Joint) -> Any:
        """See ``World.meet``."""
        if self.failure is not None:
            raise _Aborted
        self._waiting[rank] = (what, value)
        if len(self._waiting) < self._size:
            self._pass_on(rank)
            self._turns[rank].acquire()
            if isinstance(self.failure, RuntimeMismatchError):
                raise RuntimeMismatchError(*self.failure.args)
            if self.failure is not None:
                raise _Aborted
            return self._results[rank]
        try:
            self._check_agreement()
            self._results = joint([self._waiting[r][1] for r in range(self._size)])
        except BaseException as error:
            self.failure = error
            raise
        self._waiting.clear()
        return self._results[rank]

    def _pass_on(self, rank: int) -> None:
        """Give the turn to the next rank that can run; if all others wait in vain, fail."""
        if self._running != rank:  # an interrupt ended this rank in another one's turn
            return
        ready = [r for r in range(self._size) if r not in self._ended and r not in self._waiting]
        if not ready and self._waiting:
            self.failure = self.failure or self._waits_in_vain()
            ready = sorted(self._waiting)
        if ready:
            self._running = ready[0]
            self._waiting.pop(ready[0], None)
            self._turns[ready[0]].release()
        else:
            self._done.release()

    def _waits_in_vain(self) -> RuntimeMismatchError:
        waiter = min(self._waiting)
        return RuntimeMismatchError(
            f"rank {waiter} waits in {self._waiting[waiter][0]}, but rank {min(self._ended)} has "
            "ended without it. Every rank must call the same collectives in the same order"
        )

    def _check_agreement(self) -> None:
        first = self._waiting[0][0]
        for rank in range(1, self._size):
            if self._waiting[rank][0] != first:
                raise RuntimeMismatchError(
                    f"rank 0 calls {first}, but rank {rank} calls {self._waiting[rank][0]}. "
                    "Every rank must call the same collectives in the same order"
                )


class _Aborted(BaseException):
    """Unwinds a rank after another one failed; never leaves the schedule."""


class ThreadState:
    """The caller's thread-local torch state, restored in the threads of other ranks."""

    def __init__(self) -> None:
        self.grad, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.device = torch.get_default_device()
        self.stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self.autocast = autocast_state()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the caller's grad and inference mode, autocast, default device, CUDA stream."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.device.type != "cpu":
                stack.enter_context(self.device)
            if self.stream is not None:
                stack.enter_context(torch.cuda.stream(self.stream))
            for kind, dtype, cache in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, True, cache))
            yield


RankTensors = tuple[Tensor, ...]


class World:
    """A simulated mesh: ``World({"dp": 2, "tp": 2})``. ``log``: None, or a list that receives every
    collective once (bytes per rank, rank 0's group)."""

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
        return len(self.ranks)

    def run(self, fn: Callable[..., Any], args: Sequence[Sequence[Any]] | None = None) -> list[Any]:
        """``fn(*args[rank])`` on every rank, rank 0 in this thread; results by rank. Grad and
        inference mode, autocast and default device are the caller's. Raises the first exception
        of any rank, and :class:`RuntimeMismatchError` if collectives differ."""
        if self._schedule is not None:
            raise RuntimeMismatchError("this in-process mesh is already running. A nested run needs its own World")
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
        ``what``: printable purpose; if ranks' differ, :class:`RuntimeMismatchError`."""
        if self._schedule is None:
            raise RuntimeMismatchError(f"{what}: a collective of the in-process mesh outside World.run")
        return self._schedule.meet(rank, what, value, joint)

    def execute(self, moves: Sequence[Move], xs: Sequence[Tensor], phase: str) -> list[Tensor]:
        """One move of all ranks, without autograd, logged."""
        verb, axes = moves[0].verb, moves[0].axes
        if self.log is not None and verb not in LOCAL:
            ring = moves[0].ring_bytes(xs[0], self.ranks[0].size_of(axes))
            self.ranks[0].record("all_gather" if xs[0].is_sparse else moves[0].kind, axes, phase, ring)
        return self.carry_out(moves, xs)

    def carry_out(self, moves: Sequence[Move], xs: Sequence[Tensor]) -> list[Tensor]:
        """One move of all ranks, without autograd and log."""
        verb = moves[0].verb
        if verb in LOCAL:
            return [comm.local(move, x) for comm, move, x in zip(self.ranks, moves, xs, strict=True)]
        out: list[Any] = [None] * self.size
        for first, comm in enumerate(self.ranks):
            if out[first] is not None:
                continue
            group = comm.group(moves[first].axes)
            if xs[first].is_sparse:
                parts = _simulated_sparse(comm, moves[first], [xs[r] for r in group])
            elif moves[first].splits is not None:
                parts = _simulated_splits([moves[r] for r in group], [xs[r] for r in group])
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

    def apply(self, move: Move, x: Tensor) -> Tensor:
        """See :meth:`Communicator.apply`. Local moves without a gradient need no meeting."""
        if move.verb in LOCAL and not (x.requires_grad and torch.is_grad_enabled()):
            return self.local(move, x)
        move = with_module(move)
        with profiled(self, move, self.phase):
            result: Tensor = self.world.meet(self.rank, move.key, (move, x), self._joint)
        return result

    def _joint(self, values: list[tuple[Move, Tensor]]) -> Sequence[Tensor]:
        moves, xs = zip(*values, strict=True)
        return _joint_execute(self.world, moves, xs, self.phase)

    def exchange(self, hops: Sequence[Sending], phase: str) -> Sequence[Arrival]:
        """See :meth:`Communicator.exchange`."""
        together = [hop for hop in hops if isinstance(hop, Collective)]
        if together:
            with profiled(self, together[0].move, phase):
                moved = self.world.execute([hop.move for hop in together], [hop.x for hop in together], phase)
            return [functools.partial(tuple, (x,)) for x in moved]
        return self._permute([hop for hop in hops if isinstance(hop, Hop)], phase)

    def _permute(self, hops: Sequence[Hop], phase: str) -> Sequence[Arrival]:
        first = hops[0]
        self.record("permute", first.move.axes, phase, first.bytes)
        sent: dict[int, tuple[Tensor, ...]] = {}
        with profiled(self, first.move, phase):
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
        return self.world.meet(self.rank, what, mine, lambda runs: [tuple(runs)] * self.world.size)

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


def _joint_execute(world: World, moves: tuple[Move, ...], xs: RankTensors, phase: str) -> Sequence[Tensor]:
    if torch.is_grad_enabled() and any(x.requires_grad for x in xs):
        return _JointMove.apply(world, moves, phase, *xs)  # type: ignore[no-untyped-call]
    return world.execute(moves, xs, phase)


class _JointMove(torch.autograd.Function):
    """One move of all ranks as one autograd node."""

    @staticmethod
    def forward(ctx: Any, world: World, moves: tuple[Move, ...], phase: str, *xs: Tensor) -> RankTensors:
        ctx.world, ctx.moves = world, moves
        ctx.set_materialize_grads(False)
        out = tuple(world.execute(moves, xs, phase))
        ctx.shapes = [(y.shape, y.dtype, y.device) for y in out]
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if all(g is None for g in gradients):  # no rank's result is used: no gradient
            return None, None, None, *gradients
        given = tuple(
            torch.zeros(shape, dtype=dtype, device=device) if g is None else g
            for g, (shape, dtype, device) in zip(gradients, ctx.shapes, strict=True)
        )
        moves = tuple(move.backward() for move in ctx.moves)
        with profiled(ctx.world.ranks[0], moves[0], "backward"):
            return None, None, None, *_joint_execute(ctx.world, moves, given, "backward")


def _simulated_all_reduce(comm: Communicator, move: Move, xs: list[Tensor]) -> list[Tensor]:
    total = _reduced_over_ranks(move, xs)
    return [total, *(total.clone() for _ in xs[1:])]


def _simulated_reduce_scatter(comm: Communicator, move: Move, xs: list[Tensor]) -> list[Tensor]:
    total = _reduced_over_ranks(move, xs)
    # Copies: a view would keep the full sum alive.
    parts = (total.narrow(move.dim, *c) for c in comm.chunks(move.size, move.axes))
    return [part.clone(memory_format=torch.contiguous_format) for part in parts]


def _simulated_all_gather(comm: Communicator, move: Move, xs: list[Tensor]) -> list[Tensor]:
    total = torch.cat(xs, move.dim)
    return [total, *(total.clone() for _ in xs[1:])]


def _simulated_all_to_all(comm: Communicator, move: Move, xs: list[Tensor]) -> list[Tensor]:
    cuts = comm.chunks(move.to_size, move.axes)
    return [torch.cat([x.narrow(move.to_dim, *c) for x in xs], move.dim) for c in cuts]


def _simulated_splits(moves: list[Move], xs: list[Tensor]) -> list[Tensor]:
    """All-to-all of rows, by the moves' splits."""
    ways = [move.splits for move in moves if move.splits is not None]
    sent = [way.going(x).split(way.sent) for way, x in zip(ways, xs, strict=True)]
    return [way.staying(torch.cat(parts)) for way, parts in zip(ways, zip(*sent, strict=True), strict=True)]


def _simulated_sparse(comm: Communicator, move: Move, xs: list[Tensor]) -> list[Tensor]:
    return [sparse_gradients.join_sparse(move, xs, comm.chunks, number) for number in range(len(xs))]


def _simulated_permute(comm: Communicator, move: Move, xs: list[Tensor]) -> list[Tensor]:
    return [x.clone() for x in xs]


def _simulated_halo(comm: Communicator, move: Move, xs: list[Tensor]) -> list[Tensor]:
    return [assemble_halo(move, r, [halo_piece(move, s, r, x) for s, x in enumerate(xs)]) for r in range(len(xs))]


_GROUP_OPS = {
    "all_reduce": _simulated_all_reduce,
    "reduce_scatter": _simulated_reduce_scatter,
    "all_gather": _simulated_all_gather,
    "all_to_all": _simulated_all_to_all,
    "permute": _simulated_permute,
    "halo": _simulated_halo,
}


def _reduced_over_ranks(move: Move, xs: list[Tensor]) -> Tensor:
    total = xs[0].clone(memory_format=torch.contiguous_format)
    for x in xs[1:]:
        total = _COMBINE[move.op](total, x)
    return total


_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}

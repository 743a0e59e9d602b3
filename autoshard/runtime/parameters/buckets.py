"""Moving several tensors through one bucket: one collective per dtype instead of one per tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autoshard.errors import RuntimeMismatchError
from autoshard.runtime.parameters.bucket import PLAIN, Begin, Bucket, Dtypes, Gradients, Tensors, by_dtype, each, record
from autoshard.runtime.parameters.flat_bucket import FlatBucket
from autoshard.runtime.transport.communicator import Communicator, current
from autoshard.runtime.transport.in_process import InProcessCommunicator, World
from autoshard.runtime.transport.move import LOCAL, Move
from autoshard.runtime.transport.process_group import TorchCommunicator
from autoshard.runtime.transport.profiling import named, recorded


class JointBucket(Bucket):
    """All in-process ranks' bucket, without flat buffers; logged as one collective per dtype."""

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

    @property
    def home(self) -> Communicator:
        """See :attr:`Bucket.home`."""
        return self.world.ranks[0]

    def forward(self, xs: Sequence[torch.Tensor], phase: str) -> list[torch.Tensor]:
        return [y for y in self._execute(self.moves, _as(xs, self.dtypes.forward), phase) if y is not None]

    def of(self, moves: Sequence[Move], dtype: torch.dtype | None = None) -> Bucket:
        """See :meth:`Bucket.of`; the same for every face."""
        return JointBucket(self.world, moves, dtypes=Dtypes(dtype))

    def backward(
        self, gradients: Gradients, earlier: Gradients = (), keeps: bool = False
    ) -> tuple[Sequence[torch.Tensor | None], list[Any], list[Begin]]:
        """See :meth:`Bucket.backward`; nothing is under way afterwards.

        Gradients are unsharded here, so their sum is free: a deferred sum is only not logged."""
        waits, gradients = self.deferred, _as(gradients, self.dtypes.backward)
        out = self._execute([m.backward() for m in self.moves], gradients, "backward", waits and not self.replicas)
        if self.replicas:
            out = self._execute([self.last_move] * len(out), out, "backward", waits)
        return out, [], []

    def _execute(self, moves: Sequence[Move], xs: Gradients, phase: str, waits: bool = False) -> Gradients:
        out: list[torch.Tensor | None] = [None] * len(xs)
        first = self.world.ranks[0]
        if moves[0].verb not in LOCAL and not waits:
            for members in by_dtype(xs[: self.count]):
                record(first, [moves[i] for i in members], [x for i in members if (x := xs[i]) is not None], phase)
        # The forward runs in any rank's thread, so each rank records it where it waits.
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
    """Every tensor moved: ``through(bucket, tensors)``, with all faces' tensors in one process.

    ``what``: the caller's name, for errors. Other arguments: see :class:`Bucket`."""
    comm = current()
    module = named(moves[0], always=isinstance(comm, TorchCommunicator)).module
    moves = each(moves, lambda move: move._replace(module=module))
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


def _as(xs: Any, dtype: torch.dtype | None) -> Any:
    """Every tensor cast to ``dtype``."""
    return [x if x is None or dtype is None else x.to(dtype) for x in xs]

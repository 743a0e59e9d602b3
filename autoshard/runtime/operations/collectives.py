"""Differentiable collectives of generated code, on plain local tensors; an overlapped all-reduce.
``axes`` is one mesh axis, or a tuple that is flattened into one group (first axis outermost).
Chunks are those of :func:`torch.chunk`, nested for several axes, so a rank may hold 0 rows. The
gradient of each function follows from the placements it converts
(:mod:`autoshard.runtime.transport.move`). Axes of size 1 cost nothing. Raises
:class:`~autoshard.errors.MeshError` for an unknown axis."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from autoshard.errors import LayoutError
from autoshard.runtime.transport.communicator import Axes, current
from autoshard.runtime.transport.move import Move
from autoshard.runtime.transport.process_group import TorchCommunicator
from autoshard.runtime.transport.profiling import profiled, with_module

UnshardedPlacement = Literal["I", "R"]


def enter(x: Tensor, axes: Axes) -> Tensor:
    """I → R. Forward: identity. Backward: all-reduce (Megatron's f)."""
    return _apply_move(x, "I", "R", axes)


def leave(x: Tensor, axes: Axes) -> Tensor:
    """R → I. Forward: identity. Backward: the group's first rank keeps the gradient; others: 0."""
    return _apply_move(x, "R", "I", axes)


def all_reduce(x: Tensor, axes: Axes, to: UnshardedPlacement = "I", op: str = "sum") -> Tensor:
    """P → I (backward: identity) or R (backward: all-reduce). ``op`` "max", "min": no gradient."""
    if op != "sum":
        x = x.detach()
        if op not in ("max", "min"):
            raise LayoutError(f"all_reduce op {op!r} is not one of 'sum', 'max', 'min'")
    comm = current()
    if not (names := comm.active(axes)):
        return x
    return comm.apply(Move("P", _checked_unsharded(to), names, op=op), x)


def reduce_statistic(x: Tensor, axes: Axes, to: UnshardedPlacement = "I", op: str = "sum") -> Tensor:
    """:func:`all_reduce` inside an operation; recomputation in the backward reuses its result."""
    comm, of = current(), functools.partial(all_reduce, axes=axes, to=to, op=op)
    return of(x) if comm.sums is None or not comm.active(axes) else comm.sums(x if op == "sum" else x.detach(), of)


def reduce_scatter(x: Tensor, dim: int, axes: Axes) -> Tensor:
    """P → S(dim). Backward: all-gather."""
    return _apply_move(x, "P", "S", axes, dim, x.shape[dim])


def all_gather(x: Tensor, dim: int, axes: Axes, to: UnshardedPlacement = "I", size: int | None = None) -> Tensor:
    """S(dim) → I (backward: local slice) or R (reduce-scatter). ``size``: gathered length of
    ``dim``; default: even chunks."""
    return _apply_move(x, "S", _checked_unsharded(to), axes, dim, size)


def slice(x: Tensor, dim: int, axes: Axes, of: UnshardedPlacement = "I") -> Tensor:  # noqa: A001
    """I → S(dim) (backward: all-gather) or R → S(dim) (backward: zero-pad)."""
    return _apply_move(x, _checked_unsharded(of), "S", axes, dim, x.shape[dim])


def pad(x: Tensor, dim: int, axes: Axes, size: int | None = None) -> Tensor:
    """S(dim) → P: this rank's chunk among zeros. Backward: local slice. See :func:`all_gather`."""
    return _apply_move(x, "S", "P", axes, dim, size)


def partial(x: Tensor, axes: Axes, of: UnshardedPlacement = "I") -> Tensor:
    """I → P or R → P: the group's first rank keeps the value. Backward: identity, or likewise."""
    return _apply_move(x, _checked_unsharded(of), "P", axes)


def all_to_all(x: Tensor, src: int, dst: int, axes: Axes, size: int | None = None) -> Tensor:
    """S(src) → S(dst). Backward: all-to-all. ``size``: length of dim ``src`` once gathered."""
    comm = current()
    if not (names := comm.active(axes)):
        return x
    size = x.shape[src] * comm.size_of(names) if size is None else size
    return comm.apply(Move("S", "S", names, src, size, dst, x.shape[dst]), x)


def permute(x: Tensor, axes: Axes, order: Axes, dim: int | None = None, size: int | None = None) -> Tensor:
    """Renumber chunks: number k along ``axes`` goes to the rank with number k along ``order``;
    backward: the inverse. Chunks have one shape unless ``dim`` and its ``size`` are given."""
    comm = current()
    names, target = comm.active(axes), comm.active(order)
    if sorted(names) != sorted(target):
        raise LayoutError(f"permute: order {target} must name the axes {names}, in another order")
    if names == target:
        return x
    if dim is None or size is None:
        return comm.apply(Move("S", "S", names, order=target), x)
    return comm.apply(Move("S", "S", names, dim, size, order=target), x)


def size(n: int, axes: Axes) -> int:
    """This rank's length of a dim of global length ``n`` sharded by ``axes``, outer to inner."""
    comm = current()
    return comm.chunk(n, comm.active(axes))[1]


def offset(n: int, axes: Axes) -> int:
    """Start of this rank's chunk of a dim of global length ``n`` sharded by ``axes``."""
    comm = current()
    return comm.chunk(n, comm.active(axes))[0]


def _apply_move(x: Tensor, source: str, target: str, axes: Axes, dim: int = -1, size: int | None = None) -> Tensor:
    comm = current()
    if not (names := comm.active(axes)):
        return x
    if dim < 0:
        return comm.apply(Move(source, target, names), x)
    if size is None:
        size = x.shape[dim] * comm.size_of(names)
    return comm.apply(Move(source, target, names, dim, size), x)


def _checked_unsharded(placement: str) -> str:
    if placement not in ("I", "R"):
        raise LayoutError(f'placement {placement!r} is not "I" (invariant) or "R" (replicate)')
    return placement


def begin_sum(x: Tensor, axes: Axes) -> Callable[[], Tensor]:
    """Begin to sum ``x`` over the ranks of ``axes``, without gradient; call the result to wait."""
    comm, out = current(), x.detach()
    names = comm.active(axes)
    if not isinstance(comm, TorchCommunicator) or not names or comm.sums is not None:
        whole = reduce_statistic(out, names, to="R")
        return lambda: whole
    move, group, out = with_module(Move("P", "R", names), always=True), comm.process_group(names), out.clone()
    comm.record("all_reduce", names, comm.phase, move.ring_bytes(out, group.size))
    comm.during(move, comm.phase)
    with profiled(comm, move, comm.phase):
        work = comm.begin(group, dist.all_reduce, out)

    def arrived() -> Tensor:
        work.wait()
        return out

    return arrived

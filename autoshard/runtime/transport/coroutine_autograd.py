"""Per-rank coroutines as autograd functions. The backward needs all ranks at once, so a process's
journeys are one node; one more per rank saves what its backward needs, under this rank's
saved-tensor hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoshard.errors import RuntimeMismatchError
from autoshard.runtime.transport.communicator import Communicator
from autoshard.runtime.transport.rank_coroutines import RankCoroutine, Tensors, run_coroutines

Operands = tuple[Tensor | None, ...]


class CoroutinePair(NamedTuple):
    """The forward and backward coroutines of one rank."""

    name: str
    """for errors, in lower case"""
    ahead: Callable[..., RankCoroutine]
    """operands → results, followed by what the backward needs"""
    back: Callable[[Tensors, Sequence[Any], Sequence[bool]], RankCoroutine]
    """(result gradients, what it needs, which operands want gradients) → operand gradients"""
    results: int = 1


def apply_coroutines(comm: Communicator, trip: CoroutinePair, *operands: Tensor | None) -> Tensors:
    """The results of ``trip``, which all ranks run. No second derivative."""
    held: dict[str, Any] = {}
    visit = _RankVisit(trip, operands, held)
    made: Tensors = comm.meet(trip.name, visit, lambda visits: _joint_results(comm, visits))
    results, needed = made[: trip.results], made[trip.results :]
    if not any(x.requires_grad for x in results):
        return results
    needed = tuple(x.detach() if isinstance(x, Tensor) else x for x in needed)
    return _RankNode.apply(held, trip.results, *results, *needed)  # type: ignore[no-untyped-call]


class _RankVisit(NamedTuple):
    """One rank's trip and operands."""

    trip: CoroutinePair
    operands: Operands
    held: dict[str, Any]
    """where its node leaves what the backward needs"""


def _joint_results(comm: Communicator, visits: Sequence[_RankVisit]) -> list[Tensors]:
    """Per rank: its results, and what its backward needs."""
    phase, made, count = comm.phase, list[Tensors](), visits[0].trip.results
    xs = tuple(x for visit in visits for x in visit.operands)
    if not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in xs):
        return _run_forward(comm, visits, phase, xs)
    results: Tensors = _AllRanksNode.apply(comm, visits, phase, made, *xs)  # type: ignore[no-untyped-call]
    own = _split_by_rank(results, len(visits))
    return [(*mine, *rest[count:]) for mine, rest in zip(own, made, strict=True)]


def _run_forward(comm: Communicator, visits: Sequence[_RankVisit], phase: str, xs: Operands) -> list[Tensors]:
    journeys = [v.trip.ahead(*given) for v, given in zip(visits, _split_by_rank(xs, len(visits)), strict=True)]
    return run_coroutines(journeys, lambda hops: comm.exchange(hops, phase))


def _split_by_rank(xs: Sequence[Any], ranks: int) -> list[Any]:
    count = len(xs) // ranks
    return [xs[i * count : (i + 1) * count] for i in range(ranks)]


class _AllRanksNode(torch.autograd.Function):
    """The journeys of all ranks in this process; a gradient comes through :class:`_RankNode`."""

    @staticmethod
    def forward(
        ctx: Any,
        comm: Communicator,
        visits: Sequence[_RankVisit],
        phase: str,
        made: list[Tensors],
        *xs: Tensor | None,
    ) -> Tensors:
        ctx.comm, ctx.trips = comm, [(visit.trip, visit.held) for visit in visits]
        made += _run_forward(comm, visits, phase, xs)
        return tuple(x for visit, results in zip(visits, made, strict=True) for x in results[: visit.trip.results])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        name, ranks = ctx.trips[0][0].name, len(ctx.trips)
        # once_differentiable would cut the path to the inputs, and they would seem unused.
        if torch.is_grad_enabled():
            raise RuntimeMismatchError(
                f"create_graph=True: {name} has no second derivative. Leave create_graph out, or "
                "differentiate the unsharded model"
            )
        if not all(held for _, held in ctx.trips):
            raise RuntimeMismatchError(f"{name}: the result of one rank has no gradient, but another rank's has one")
        given, wanted = _split_by_rank(gradients, ranks), _split_by_rank(ctx.needs_input_grad[4:], ranks)
        saved = [held.pop("saved") for _, held in ctx.trips]
        if not any(held["reached"] for _, held in ctx.trips):
            return (None,) * len(ctx.needs_input_grad)
        back = zip(ctx.trips, given, saved, wanted, strict=True)
        journeys = [trip.back(g, s, w) for (trip, _), g, s, w in back]
        found = run_coroutines(journeys, lambda hops: ctx.comm.exchange(hops, "backward"))
        return None, None, None, None, *(x for xs in found for x in xs)


class _RankNode(torch.autograd.Function):
    """One rank's results: saves what the backward needs and hands it to :class:`_AllRanksNode`."""

    @staticmethod
    def forward(ctx: Any, held: dict[str, Any], results: int, *xs: Tensor | None) -> Any:
        ctx.save_for_backward(*xs[results:])
        ctx.held, ctx.needed = held, len(xs) - results
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in xs[:results] if x is not None)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.held |= {"saved": ctx.saved_tensors, "reached": any(g is not None for g in gradients)}
        return None, None, *gradients, *(None,) * ctx.needed

"""One rank of a gloo world whose ranks come with other weights, inputs, plans or gradients; see checks.py."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import agreement_calls
import agreement_gradients
import torch
import torch.distributed as dist
import world
from agreeing import HINTS, Net, X, assert_step_alike, checks, compiled, warnings_of_ours
from checks import assert_all_raise, assert_close, case, mesh, run
from torch import nn

import autoshard
from autoshard.check import clock
from autoshard.check.clock import Clock
from autoshard.errors import CaptureError, PlanError, RuntimeMismatchError
from autoshard.module.ranks.agreement import Agreement
from autoshard.module.ranks.rank_calls import FIRST_CALLS

RANK = 0
"""this process's, set by :func:`here`"""


# --- clocks ---


def time_stolen_from_one() -> None:
    """What the host of one rank disturbed is measured again by both: at a barrier one would wait for the other."""
    reads = calls = 0

    def gone() -> float:
        nonlocal reads
        reads += 1
        return float(min(reads, 10)) if RANK == 1 else 0.0  # in the first five measurements, a second each

    def call() -> None:
        nonlocal calls
        calls += 1

    with mock.patch.object(clock, "steal_seconds", gone):
        timer = Clock(torch.device("cpu"), 2)
        assert len(timer.interleaved_seconds([call])) == 2
        assert timer.seconds(call, together=True) > 0
    assert reads == 2 * (5 + 2 + 1), reads
    assert (timer.watch.share(), calls > 8) == (0.0, True)


# --- weights ---


def other_weights() -> None:
    """Every rank with another seed: rank 0's weights and buffers are taken, and it says so."""
    with warnings_of_ours() as said:
        sharded = compiled(Net(seed=RANK), X)
    assert len(said) == (RANK == 0), said
    if RANK == 0:
        assert "of 10 tensors of Net" in said[0], said
        assert "first.weight (rank 1 differs)" in said[0], said
    assert_close(sharded.full_state_dict(), Net(seed=0).state_dict(), "weight")
    assert_step_alike(sharded, Net(seed=0))


def one_other_number() -> None:
    """One number in the middle of one weight."""
    model = Net()
    with torch.no_grad():
        model.first.weight[4, 3] += RANK
    with warnings_of_ours() as said:
        sharded = compiled(model, X)
    if RANK == 0:
        assert said == [
            "the ranks have different values of 1 of 10 tensors of Net. Those of rank 0 are used: first.weight (rank 1 differs)"
        ]
    assert_step_alike(sharded, Net())


def weights_on_rank_0_only() -> None:
    """The other ranks come with a model on the meta device, which is no reason for a warning."""
    with warnings_of_ours() as said:
        sharded = compiled(Net() if RANK == 0 else Net().to("meta"), X)
    assert not said, said
    assert_step_alike(sharded, Net())


def weights_on_rank_1_only() -> None:
    text = "rank 0 has Net on the meta device, but other ranks have its data (first.weight, first.bias"
    assert_all_raise(RuntimeMismatchError, text, lambda: compiled(Net() if RANK else Net().to("meta"), X))


def meta_everywhere() -> None:
    with warnings_of_ours():
        sharded = compiled(Net().to("meta"), X)
    sharded.load_full_state_dict(Net().state_dict())
    assert_step_alike(sharded, Net())


class WithConstant(nn.Module):
    """A tensor that is neither parameter nor buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8, 6, dtype=torch.float64))
        self.table = torch.rand(8, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.w * self.table).sum()


def other_constants() -> None:
    with warnings_of_ours() as said:
        sharded = compiled(WithConstant(RANK), X)
    assert len(said) == (RANK == 0), said
    assert_step_alike(sharded, WithConstant(0))


def other_shapes_of_weights() -> None:
    class Unused(Net):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Parameter(torch.zeros(2 + RANK))

    text = "the ranks disagree on the graph captured from the model: rank 1 differs from rank 0"
    assert_all_raise(RuntimeMismatchError, text, lambda: compiled(Unused(), X))


def drifted_replicas() -> None:
    """A replica that changes on one rank is found by the check, by name and rank, on every rank; else it is not."""
    with checks("replicas"):
        sharded = compiled(Net(), X, hints=HINTS)
    unchecked = compiled(Net(), X, hints=HINTS)
    for module in (sharded, unchecked):
        assert module.plan.layouts["first.weight"].axes_with(autoshard.Shard)
        module(X)
        with torch.no_grad():
            module.tensor("last.weight").to_local()[1, 1] += RANK
            module.tensor("scale")[2] -= RANK
    text = (
        "replicas have drifted apart: last.weight (rank 1 differs from rank 0), scale (rank 1 differs from rank 0). "
        "Some ranks changed them and others did not"
    )
    assert_all_raise(RuntimeMismatchError, text, lambda: sharded(X))
    unchecked(X)
    with torch.no_grad():
        sharded.tensor("last.weight").to_local()[1, 1] -= RANK
        sharded.tensor("scale").copy_(Net().scale)
    sharded(X)


def unknown_check() -> None:
    with checks("weights"):
        assert_all_raise(
            PlanError,
            "AUTOSHARD_CHECK=weights is not known. Known: inputs, replicas, errors; an interval is set by a number, "
            "as in replicas=100",
            lambda: compiled(Net(), X),
        )


# --- inputs and calls ---


class Sum(nn.Module):
    """Of anything."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * (x.abs() if x.is_complex() else x).float().sum()


VALUES = "the ranks disagree on the values of the inputs (every rank needs the same global batch: "
SHAPES = "the ranks disagree on the shapes and dtypes of the inputs: rank 1 differs from rank 0"
STATE = "the ranks disagree on the state of the call: recorded gradients, train or eval mode"


def one_other_input() -> None:
    """In the middle of 2 million numbers; of every kind of dtype, and where the memory is not in order."""
    sharded = compiled(Sum())
    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64, torch.float64):
        x = torch.ones(1001, 2003, dtype=dtype)
        if RANK:
            x[500, 1000] = 0
        for given in (x, x.t(), x[1:, 1:]):
            assert_all_raise(RuntimeMismatchError, VALUES, lambda s=sharded, x=given: s(x))
        sharded = compiled(Sum())  # its calls count anew


def an_evaluation_with_other_batches() -> None:
    """A sampler that was left in is found in the first batch after a training, also of a program that was called before."""
    sharded = compiled(Net(), X)
    data = torch.utils.data.TensorDataset(X)
    sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
    (own,) = next(iter(torch.utils.data.DataLoader(data, 4, sampler=sampler)))

    def evaluated(x: torch.Tensor, times: int = 1) -> torch.Tensor:
        for _ in range(12):
            sharded.train()(X)
        with torch.no_grad():
            return [sharded.eval()(x) for _ in range(times)][-1]

    way_out = 'seed the loader, use no DistributedSampler, or compile with inputs="local"'
    text = f"{VALUES}{way_out}): rank 1 differs"
    assert_all_raise(RuntimeMismatchError, text, lambda: evaluated(own))
    evaluated(X[:4], 12)
    assert_all_raise(RuntimeMismatchError, text, lambda: evaluated(own))
    local = compiled(Net().eval(), own, inputs="local")
    assert_close({"": local(own)}, {"": Net().eval()(X)}, "loss")


def a_copy_is_compared_anew() -> None:
    sharded = compiled(Net(), X)
    for _ in range(FIRST_CALLS + 2):
        sharded(X)
    sharded(X + RANK)  # not compared: the negative control
    other = X.clone()
    other[3, 2] += RANK
    assert_all_raise(RuntimeMismatchError, VALUES, lambda: copy.deepcopy(sharded)(other))


def inputs_are_always_compared_where_asked() -> None:
    with checks("inputs"):
        sharded = compiled(Net(), X)
    for _ in range(FIRST_CALLS + 2):
        sharded(X)
    other = X.clone()
    other[3, 2] += RANK
    assert_all_raise(RuntimeMismatchError, VALUES, lambda: sharded(other))


def other_calls() -> None:
    """A rank that comes with other shapes, new to the module or known to it, in a first call or when all ranks change.

    Nothing is wrong with the module afterwards, as no collective was begun. What a rank does that changes while others
    repeat their calls, test_failures_gloo.py tests.
    """
    sharded = compiled(Net(), X)
    assert_all_raise(RuntimeMismatchError, SHAPES, lambda: sharded(X[:4] if RANK else X))
    for _ in range(FIRST_CALLS):
        sharded(X)
    assert_all_raise(RuntimeMismatchError, SHAPES, lambda: sharded(X[:4] if RANK else X[:2]))
    for rows in (4, 2, 8):
        sharded(X[:rows])
    assert_all_raise(RuntimeMismatchError, SHAPES, lambda: sharded(X[:4] if RANK else X[:2]))
    assert_all_raise(
        RuntimeMismatchError, STATE, lambda: (sharded.eval() if RANK else sharded.requires_grad_(False))(X)
    )


def repeated_calls_are_not_compared() -> None:
    """After the first calls the ranks compare a call that is another than the one before, and no more."""
    sharded = compiled(Net(), X)
    begin, begun = Agreement.begin, []

    def counted(self: Agreement, *claims: Any) -> None:
        begun.append(claims)
        begin(self, *claims)

    def compared(change: Callable[[], object] = lambda: None) -> list[bool]:
        change()
        found = []
        for _ in range(3 if known else FIRST_CALLS):
            begun.clear()
            sharded(X)
            found.append(bool(begun))
        return found

    changes = (
        sharded.eval,
        sharded.train,
        sharded.last.eval,
        lambda: sharded.last.requires_grad_(False),
        lambda: sharded.requires_grad_(True),
    )
    with mock.patch.object(Agreement, "begin", counted):
        for known in (False, True):
            expected = [True, False, False] if known else [True] * FIRST_CALLS
            assert [compared(change) for change in changes[:4]] == [expected] * 4
            compared(changes[4])  # back in a program that has been called
            with torch.autocast("cpu"):
                assert compared() == expected
            with sharded.no_sync():
                assert compared()[:3] == [True, False, False]
            assert compared()[:3] == [True, False, False]


def calls_inside_no_sync() -> None:
    """A rank that enters it alone is noticed. Where a pass inside has no collective, nobody would wait for others there:
    these are compared every time.
    """
    hints = {"*.weight": "replicate", "*.bias": "replicate", "input": autoshard.Shard(0)}
    sharded = compiled(nn.Sequential(nn.Linear(6, 6)).double(), X, hints=hints)
    assert {c.phase for c in sharded.collectives} == {"backward"}
    with sharded.no_sync() if RANK else contextlib.nullcontext():
        assert_all_raise(RuntimeMismatchError, STATE, lambda: sharded(X))
    for _ in range(FIRST_CALLS + 1):
        sharded(X)
    with mock.patch.object(Agreement, "begin", side_effect=Agreement.begin, autospec=True) as begin:
        sharded(X)
        assert not begin.called
        with sharded.no_sync():
            for count in range(1, 4):
                sharded(X)
                assert begin.call_count == count


def alike_failures_leave_nothing() -> None:
    """An error that every rank has, in a call: the next one is as if it had not been."""
    sharded = compiled(Net(), X)
    for _ in range(2):
        assert_all_raise(RuntimeError, "", lambda: sharded(X[:, :5]))
    assert_step_alike(sharded, Net())


# --- plans ---


def rank_0_plans() -> None:
    """The other ranks do not search: they follow rank 0's plan."""
    from autoshard.plans import planning

    search = planning.search_within_memory
    searched = []

    def counted(*args: Any) -> Any:
        searched.append(args)
        return search(*args)

    with mock.patch.object(planning, "search_within_memory", counted):
        model, args, kwargs = case("llama")
        sharded = autoshard.compile(model, mesh(), args, kwargs)
        sharded.eval()(*args, **kwargs)
    assert len(searched) == (2 if RANK == 0 else 0)
    texts: list[Any] = [None, None]
    dist.all_gather_object(texts, sharded.source)
    assert texts[0] == texts[1]


def errors_are_raised_everywhere() -> None:
    """Of rank 0 while it plans, of one rank alone in capture, and of one that cannot follow; a class that is not ours."""
    from autoshard import compiler
    from autoshard.plans import planning

    def failing(error: Exception) -> Callable[..., Any]:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise error

        return fail

    for name, rank, error in (
        ("search_within_memory", 0, PlanError("no plan at all")),
        ("search_within_memory", 0, IndexError("out of range")),
        ("capture", 1, CaptureError("cannot be captured")),
        ("assignment_of", 1, PlanError("another model")),
    ):
        with (
            mock.patch.object(compiler if name == "capture" else planning, name, failing(error))
            if rank == RANK
            else checks("")
        ):
            of_ours, text = isinstance(error, autoshard.AutoshardError), str(error)
            text = text if of_ours else f"the model cannot be compiled: {type(error).__name__}: {text}"
            assert_all_raise(type(error) if of_ours else CaptureError, text, lambda: compiled(Net(), X, parts=None))
    assert_step_alike(compiled(Net(), X), Net())


def other_models() -> None:
    """A rank whose graph is another cannot follow the plan."""

    class Other(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2 if RANK == 0 else torch.ones(()).exp())

    text = "the ranks disagree on the graph captured from the model: rank 1 differs from rank 0"
    assert_all_raise(RuntimeMismatchError, text, lambda: compiled(Other(), X))


def here(rank: int, ranks: int, rendezvous: str, result: str) -> None:
    """The checks on this rank."""
    global RANK
    RANK = rank
    agreement_calls.RANK = agreement_gradients.RANK = rank
    run({**globals(), **vars(agreement_calls), **vars(agreement_gradients)}, rank, ranks, rendezvous, result)


if __name__ == "__main__":
    world.main(here)

"""Parts of one gradient that are summands over different axes come together as one summand, and nothing counts twice."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autoshard.runtime.parameters.bucket import FlatBucket
from autoshard.runtime.parameters.gradients import MIN_BUCKET_BYTES, Gradients
from autoshard.runtime.transport.buffer_pool import IDLE_CALLS, MIN_POOLED_BYTES, BufferPool
from autoshard.runtime.transport.in_process import World
from autoshard.runtime.transport.move import Move

MESH = {"dp": 2, "tp": 2}


def test_parts_over_different_axes() -> None:
    random = torch.Generator().manual_seed(0)
    whole = torch.randn(3, generator=random, dtype=torch.float64)
    by_dp = torch.randn(2, 3, generator=random, dtype=torch.float64)
    by_rank = torch.randn(4, 3, generator=random, dtype=torch.float64)
    found = []
    for rank in range(4):
        gradients = Gradients(World(MESH).ranks[rank])
        gradients.parts = [(1, by_dp[rank // 2], ("dp",)), (1, by_rank[rank], ("dp", "tp"))]
        out = gradients.finish([whole, whole, None])
        assert gradients.summands == {1: ("dp", "tp")}
        assert out[0] is whole
        assert out[2] is None
        assert out[1] is not None
        found.append(out[1])
    torch.testing.assert_close(sum(found), whole + by_dp.sum(0) + by_rank.sum(0), rtol=1e-12, atol=1e-12)


def test_one_kind_of_parts_stays_as_it_is() -> None:
    gradients = Gradients(World(MESH).ranks[3])
    part = torch.ones(2)
    gradients.parts = [(0, part, ("dp",))]
    assert gradients.finish([None])[0] is part
    assert gradients.summands == {0: ("dp",)}
    assert gradients.finish([part])[0] is part
    assert gradients.summands == {}


class Arriving:
    """A sum under way: it adds up when it is waited for."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def wait(self) -> None:
        self.x += 1.0


def test_only_what_is_added_up_is_waited_for() -> None:
    for brought, at_once in ((None, False), (torch.ones(2), True)):
        gradients, part = Gradients(World(MESH).ranks[0]), torch.zeros(2)
        gradients.works, gradients.parts = [Arriving(part)], [(0, part, ())]
        (found,) = gradients.finish([brought])
        assert found is not None
        assert found.tolist() == ([2.0, 2.0] if at_once else [0.0, 0.0])
        gradients.wait()
        assert found.tolist() == ([2.0, 2.0] if at_once else [1.0, 1.0])
        assert not gradients.works


def test_small_buckets_of_one_kind_go_together_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of another kind between them goes apart; the last of its kind waits for none."""
    gone = []
    monkeypatch.setattr(
        Gradients, "_move", lambda self, bucket, numbers, given: gone.append((bucket.kind.verb, numbers))
    )
    comm: Any = SimpleNamespace(deferred=False)
    sums = [FlatBucket(comm, [Move("I", "R", ("dp",))]) for _ in range(4)]
    shard = FlatBucket(comm, [Move("S", "R", ("dp",), 0, 4)])
    gradients, order = Gradients(World(MESH).ranks[0]), [sums[0], sums[1], shard, sums[2], sums[3]]
    for bucket in order:
        gradients.expect(bucket)
    for number, bucket in enumerate(order):
        gradients.move(bucket, [number], [torch.ones(4)])
    assert gone == [("enter", [0, 1]), ("all_gather", [2]), ("enter", [3, 4])]


class Work:
    """A message that arrives when it is waited for."""

    def __init__(self) -> None:
        self.waited = 0

    def wait(self) -> None:
        self.waited += 1


def test_few_reduce_scatters_are_under_way_and_small_ones_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do sums that replicas make of their gradients where these lie."""
    monkeypatch.setattr(FlatBucket, "backward", lambda self, given, earlier, keeps: (given, [Work()], []))
    comm: Any = SimpleNamespace(deferred=False)
    shard, summed = (FlatBucket(comm, [move]) for move in (Move("S", "R", ("dp",), 0, 4), Move("I", "R", ("dp",))))
    gradients, large, small = Gradients(World(MESH).ranks[0]), torch.empty(MIN_BUCKET_BYTES // 4), torch.empty(4)
    begun: list[Work] = []
    for bucket, given in (
        (shard, large),
        (shard, small),
        (summed, large),
        (shard, small),
        (shard, large),
        (shard, large),
    ):
        gradients._move(bucket, [0], [given])
        begun.append(gradients.works[-1])
        assert not begun[0].waited or len(begun) == 6
    assert [work.waited for work in begun] == [1, 0, 0, 0, 0, 0]
    gradients.wait()
    assert [work.waited for work in begun] == [1] * 6


def test_buckets_that_go_together_leave_their_sums_as_each_would() -> None:
    """As in the forward that they are of, whatever the backward runs in."""
    comm: Any = SimpleNamespace(deferred=True)
    first, second = (FlatBucket(comm, [Move("I", "R", ("dp",))]) for _ in range(2))
    comm.deferred = False
    assert first.joined((first, second)).deferred
    assert first.joined((first,)) is first


@pytest.mark.parametrize("size", [1, MIN_POOLED_BYTES // 4])
@pytest.mark.parametrize("count", [1, 2])
def test_what_is_summed_in_place_is_no_gradients_own_memory(count: int, size: int) -> None:
    """Autograd may have given a gradient to others, too."""
    comm: Any = SimpleNamespace(deferred=False, buffer=lambda *args: BufferPool().take(*args, call=1))
    gradients = [torch.ones(size) for _ in range(count)]
    flat, parts = FlatBucket(comm, [Move("I", "R", ("dp",))] * count)._flat(gradients, torch.float32)
    assert flat.tolist() == [1.0] * count * size
    flat.zero_()
    assert [x.tolist() for x in parts] == [[0.0] * size] * count
    assert all(g.min() == 1.0 for g in gradients)


SHAPES = (
    torch.Size([MIN_POOLED_BYTES // 16, 2]),
    torch.Size([]),
    torch.Size([0, 3]),
    torch.Size([MIN_POOLED_BYTES // 8]),
)


def test_a_buffer_is_used_again_when_nobody_sees_it() -> None:
    spare, like = BufferPool(), torch.empty(0)

    def take(call: int) -> torch.Tensor:
        return spare.take(like, SHAPES, torch.float32, call)[0]

    first = take(1)
    place, gradient = first.data_ptr(), first[8:12].view(2, 2).detach()
    del first
    second = take(1)
    assert second.data_ptr() != place, "a gradient is still there"
    gradient.fill_(7.0)
    second.zero_()
    assert gradient.tolist() == [[7.0, 7.0], [7.0, 7.0]]
    del gradient
    assert take(2).data_ptr() == place
    del second
    take(2 + IDLE_CALLS + 1)
    assert [x.call for kept in spare._kept.values() for x in kept] == [2 + IDLE_CALLS + 1], "what nobody takes is freed"
    spare.take(like, SHAPES[::3], torch.float32, 20)
    assert [x.call for kept in spare._kept.values() for x in kept] == [20], (
        "nor what nothing like it is taken of any more"
    )
    spare.clear()
    assert not spare._kept
    assert take(9).numel() == sum(s.numel() for s in SHAPES)
    small, parts = spare.take(like, SHAPES[1:3], torch.float32, 1)
    assert [x.shape for x in parts] == [*SHAPES[1:3]]
    assert small.data_ptr() not in {x.buffer.data_ptr() for kept in spare._kept.values() for x in kept}


class Holder(torch.autograd.Function):
    """Keeps its input as autograd does: no name of Python holds it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return weight * 1.0


@pytest.mark.parametrize(
    "holds",
    [
        lambda parts: parts,
        lambda parts: parts[3],
        lambda parts: parts[0][4:].T,
        lambda parts: parts[0].detach(),
        lambda parts: parts[3].untyped_storage(),
        lambda parts: parts[1].numpy(),
        lambda parts: Holder.apply(parts[1], torch.ones(1, requires_grad=True)),
        lambda parts: parts[1].requires_grad_() and None,
    ],
    ids=["all", "one", "a view", "detached", "the storage", "numpy", "a graph", "in a graph"],
)
def test_parts_are_used_again_when_nobody_has_one(holds: Callable[[list[torch.Tensor]], Any]) -> None:
    """They are the same tensors then, and others where somebody, or the last backward, has one."""
    spare, like = BufferPool(), torch.empty(0)
    buffer, parts = spare.take(like, SHAPES, torch.float32, 1)
    assert [x.shape for x in parts] == [*SHAPES]
    numbers = [*map(id, parts)]
    del buffer, parts
    buffer, parts = spare.take(like, SHAPES, torch.float32, 2)
    assert [*map(id, parts)] == numbers
    torch.arange(buffer.numel(), out=buffer)
    assert torch.equal(torch.cat([x.reshape(-1) for x in parts]), buffer)
    place, held = buffer.data_ptr(), holds(parts)
    del buffer, parts
    assert spare.take(like, SHAPES, torch.float32, 3)[0].data_ptr() != place
    del held

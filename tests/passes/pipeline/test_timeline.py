"""Schedules of pipelines: their orders are torch's, their bubbles and micro-batches in flight those of the papers."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torchs

from autoshard.errors import PlanError
from autoshard.passes.pipeline.schedules import (
    Action,
    Orders,
    StageSeconds,
    max_in_flight,
    peak_kept,
    rank_orders,
    schedule_refusal,
    simulate_timeline,
)

SIZES = [(1, 1), (4, 1), (4, 2), (1, 3), (2, 2), (2, 5), (3, 4), (4, 4), (4, 8), (4, 10), (8, 16)]


def torch_orders(schedule: str, ranks: int, batches: int, chunks: int) -> list[list[str]]:
    """What torch's own schedule does on every rank, without idle slots and reductions."""
    name = {
        "gpipe": "ScheduleGPipe",
        "1f1b": "Schedule1F1B",
        "interleaved": "ScheduleInterleaved1F1B",
        "zero_bubble": "ScheduleInterleavedZeroBubble",
    }[schedule]
    schedule_class = getattr(torchs, name)
    made = schedule_class.__new__(schedule_class)
    made._num_stages, made._n_microbatches = ranks * chunks, batches
    made.pp_group_size, made.n_local_stages = ranks, chunks
    made.number_of_rounds = max(1, batches // ranks)
    made.microbatches_per_round = batches // made.number_of_rounds
    if schedule in ("gpipe", "1f1b"):
        found = made._get_pipeline_order()
    else:
        found = {rank: made._calculate_single_rank_operations(rank) for rank in range(ranks)}
    return [list(_texts(found[rank])) for rank in range(ranks)]


def _texts(actions: list[Any]) -> Iterator[str]:
    """Forwards are numbered as they come: torch's listing of 1F1B, not its execution, counts the last rank's from 1."""
    count = Counter[int]()
    for action in actions:
        if action is not None and "REDUCE" not in str(action):
            forward = action.computation_type is torchs.FORWARD
            yield f"{action.stage_index}F{count[action.stage_index]}" if forward else str(action)
            count[action.stage_index] += forward


def as_text(found: Orders) -> list[list[str]]:
    return [[str(a) for a in order] for order in found]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_the_order_of_work_is_torchs(schedule: str) -> None:
    tried = 0
    for (ranks, batches), chunks in itertools.product(SIZES, (1, 2, 3)):
        listed = schedule != "1f1b" or batches >= ranks  # torch runs no others
        if listed and not schedule_refusal(schedule, ranks, batches, chunks):
            assert as_text(rank_orders(schedule, ranks, batches, chunks)) == torch_orders(
                schedule, ranks, batches, chunks
            )
            tried += 1
    assert tried >= len(SIZES) - 2


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_every_order_comes_to_an_end(schedule: str) -> None:
    for ranks, batches, chunks in itertools.product(range(1, 6), range(1, 12), (1, 2, 3)):
        if not schedule_refusal(schedule, ranks, batches, chunks):
            found = simulate_timeline(
                rank_orders(schedule, ranks, batches, chunks), [StageSeconds(1, 2, 1)] * (ranks * chunks)
            )
            assert max(found.busy_s) == pytest.approx(3 * batches * chunks)


def test_in_the_order_of_another_schedule_the_work_differs() -> None:
    assert as_text(rank_orders("gpipe", 4, 8)) != torch_orders("1f1b", 4, 8, 1)


@pytest.mark.parametrize(("ranks", "batches"), [(2, 2), (4, 4), (4, 8), (8, 24)])
def test_bubbles_of_equal_stages_are_those_of_the_papers(ranks: int, batches: int) -> None:
    ahead, back, weights = 1.0, 2.0, 1.0

    def bubble(schedule: str, chunks: int = 1) -> float:
        stages = [StageSeconds(ahead / chunks, back / chunks, weights / chunks)] * (ranks * chunks)
        found = simulate_timeline(rank_orders(schedule, ranks, batches, chunks), stages)
        assert max(found.busy_s) == pytest.approx(batches * (ahead + back))
        return found.bubble_s

    for schedule in ("gpipe", "1f1b"):
        assert bubble(schedule) == pytest.approx((ranks - 1) * (ahead + back))
    for chunks in (1, 2, 4):
        assert bubble("interleaved", chunks) == pytest.approx((ranks - 1) * (ahead + back) / chunks)
    assert bubble("zero_bubble") == pytest.approx((ranks - 1) * (ahead + back - 2 * weights))


@pytest.mark.parametrize(("ranks", "batches"), [(1, 4), (2, 2), (4, 4), (4, 8), (8, 24)])
def test_micro_batches_in_flight(ranks: int, batches: int) -> None:
    def flying(schedule: str, chunks: int = 1) -> list[int]:
        return [max_in_flight(order) for order in rank_orders(schedule, ranks, batches, chunks)]

    assert flying("gpipe") == [batches] * ranks
    assert flying("1f1b") == [min(batches, ranks - i) for i in range(ranks)]
    for chunks in (2, 4):
        expected = [min(batches * chunks, (chunks - 1) * ranks + 2 * (ranks - 1 - i) + 1) for i in range(ranks)]
        assert flying("interleaved", chunks) == expected
    assert flying("zero_bubble") == [min(batches, ranks)] * ranks


def test_what_is_held_weighs_each_stage() -> None:
    first = rank_orders("interleaved", 2, 4, 2)[0]  # stages 0 and 2
    assert peak_kept(first, [1, 0, 1, 0]) == max_in_flight(first)
    assert peak_kept(first, [1, 0, 0, 0]) + peak_kept(first, [0, 0, 1, 0]) >= peak_kept(first, [1, 0, 1, 0])
    assert peak_kept(first, [10, 0, 1, 0]) < 10 * max_in_flight(first)


def test_the_slowest_stage_sets_the_pace() -> None:
    stages = [StageSeconds(1, 2), StageSeconds(2, 4), StageSeconds(1, 2)]
    steps = {n: simulate_timeline(rank_orders("1f1b", 3, n), stages) for n in (6, 12)}
    assert steps[12].step_s - steps[6].step_s == pytest.approx(6 * stages[1].work)
    assert steps[12].bubble_s == pytest.approx(steps[12].step_s - 12 * stages[1].work)


def test_a_step_takes_no_longer_than_the_formula_by_which_stages_are_cut() -> None:
    draw = random.Random(0)
    for _ in range(200):
        ranks = draw.randint(2, 6)
        batches = draw.randint(ranks, 3 * ranks)
        stages = [StageSeconds(f := 0.1 + draw.random(), 2 * f) for _ in range(ranks)]
        works = [s.work for s in stages]
        step = simulate_timeline(rank_orders("1f1b", ranks, batches), stages).step_s
        assert 0.75 * (formula := sum(works) + (batches - 1) * max(works)) < step < formula * (1 + 1e-12)


def test_messages_are_waited_for() -> None:
    none, some = (simulate_timeline(rank_orders("1f1b", 4, 8), [StageSeconds(1, 2, 0, x, x)] * 4) for x in (0.0, 0.25))
    assert not none.messages
    assert len(some.messages) == 2 * 3 * 8
    # Filling and draining each pass three boundaries; in between every micro-batch waits for one there and one back.
    assert none.step_s + 2 * 3 * 0.25 < some.step_s <= none.step_s + 2 * (3 + 7) * 0.25
    for m in some.messages:
        assert m.end - m.start == pytest.approx(0.25)
        sent = next(s for s in some.ranks[m.source] if s.action == m.action)
        read = m.action._replace(stage=m.action.stage + (1 if m.action.kind == "F" else -1))
        reader = next(s for s in some.ranks[m.target] if s.action == read)
        assert sent.end <= m.start + 1e-12
        assert m.end <= reader.start + 1e-12


def test_ranks_that_wait_leave_their_core_to_others() -> None:
    """Two ranks on one core; a piece takes the pace of two wherever both are at work."""
    stages = [StageSeconds(2, 4, send=0.5, send_back=0.5)] * 2
    found = simulate_timeline(rank_orders("gpipe", 2, 2), stages, (2.0, 1.0))
    times = [[(str(s.action), s.start, s.end) for s in spans] for spans in found.ranks]
    # 0F1 and 1F0 run beside each other for a second, 0B0 and 1B1 for three.
    assert times == [
        [("0F0", 0, 1), ("0F1", 1, 2.5), ("0B0", 7, 10.5), ("0B1", 11, 13)],
        [("1F0", 1.5, 3), ("1F1", 3.5, 4.5), ("1B0", 4.5, 6.5), ("1B1", 6.5, 10)],
    ]
    assert found.busy_s == (8, 8)


def test_both_ends_of_a_message_work_beside_ranks_that_share_a_core() -> None:
    stages = [StageSeconds(2, 0, send=1, carry=0.25)] * 2
    order = rank_orders("gpipe", 2, 2, training=False)
    found = simulate_timeline(order, stages, (2.0, 1.0))
    # From 1 on both ends have a third of the core each, as 0F1 has, for 3/8 s; 1F0 runs beside the rest of it from 2 on.
    times = [[(s.start, s.end) for s in spans] for spans in found.ranks]
    assert times == [[(0, 1), (1, pytest.approx(2.5))], [(2, pytest.approx(3.25)), pytest.approx((4.25, 5.25))]]
    assert simulate_timeline(order, stages).ranks == simulate_timeline(order, [StageSeconds(2, 0, send=1)] * 2).ranks


@pytest.mark.parametrize(("schedule", "actions"), [("gpipe", 8), ("1f1b", 8), ("interleaved", 16), ("zero_bubble", 12)])
def test_every_action_takes_the_host(schedule: str, actions: int) -> None:
    order = rank_orders(schedule, 2, 4, 2 if schedule == "interleaved" else 1)
    found = simulate_timeline(order, [StageSeconds(1, 2, 1, host=0.5)] * (4 if schedule == "interleaved" else 2))
    work = 24 if schedule == "interleaved" else 12
    assert found.busy_s == (work + 0.5 * actions,) * 2


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_one_core_is_never_idle(schedule: str) -> None:
    """Without messages somebody can always work: on one core a step takes what all work takes, whatever the order."""
    draw = random.Random(0)
    for ranks in (2, 3, 4):
        chunks = 2 if schedule == "interleaved" else 1
        stages = [StageSeconds(f := draw.random(), 2 * f, f) for _ in range(ranks * chunks)]
        paces = [ranks / (n + 1) for n in range(ranks)]
        found = simulate_timeline(rank_orders(schedule, ranks, 2 * ranks, chunks), stages, paces)
        assert found.step_s == pytest.approx(2 * ranks * sum(s.work for s in stages) / ranks)


def test_a_pipeline_without_backward_only_fills() -> None:
    for chunks in (1, 2):
        found = simulate_timeline(
            rank_orders("1f1b", 4, 8, chunks, training=False), [StageSeconds(1 / chunks, 0)] * (4 * chunks)
        )
        assert found.bubble_s == pytest.approx(3 / chunks)
        assert {span.action.kind for spans in found.ranks for span in spans} == {"F"}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("2f2b", 2, 4, 1), "is not known"),
        (("1f1b", 2, 4, 2), "one stage per rank"),
        (("interleaved", 4, 9, 2), "in 2 rounds of at least 4"),
    ],
)
def test_numbers_that_do_not_go_together_are_refused(asked: tuple[str, int, int, int], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        rank_orders(*asked)


def test_orders_that_wait_for_each_other_are_found() -> None:
    crossed = ((Action("B", 0, 0), Action("F", 0, 0)), (Action("F", 1, 0), Action("B", 1, 0)))
    with pytest.raises(ValueError, match="wait for each other"):
        simulate_timeline(crossed, [StageSeconds(1, 1)] * 2)

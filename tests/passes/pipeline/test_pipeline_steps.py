"""Steps of many cuts at once are those of the timeline, and no step is below what none can be."""

from __future__ import annotations

import random

import numpy as np
import pytest

from autoshard.passes.pipeline.schedules import Action, Orders, StageSeconds, rank_orders, simulate_timeline
from autoshard.passes.pipeline.step_times import cut_step_seconds, step_lower_bound

# schedule, ranks, micro-batches, stages of each, and whether there is a backward
CASES = [
    ("gpipe", 3, 4, 1, True),
    ("1f1b", 4, 3, 1, True),
    ("1f1b", 4, 9, 1, True),
    ("1f1b", 3, 5, 2, False),
    ("interleaved", 3, 6, 2, True),
    ("interleaved", 2, 4, 3, True),
    ("zero_bubble", 3, 6, 1, True),
    ("zero_bubble", 2, 4, 2, True),
]
PARTS = {
    "F": lambda s: s.forward,
    "B": lambda s: s.backward,
    "I": lambda s: s.backward - s.weights,
    "W": lambda s: s.weights,
}


def drawn(draw: random.Random, count: int, training: bool, message: float = 0.3) -> list[StageSeconds]:
    """Stages, some of which have nearly nothing to do."""
    found = []
    for _ in range(count):
        f, b = draw.choice([1.0, 1.0, 0.05]) * draw.random(), training * draw.choice([2.0, 0.1]) * draw.random()
        found.append(StageSeconds(f, b, b * draw.random(), message * draw.random(), message * draw.random()))
    return found


def totals(order: Orders, stages: list[StageSeconds]) -> dict[str, float]:
    return {kind: sum(PARTS[kind](s) for s in stages) for kind in {a.kind for own in order for a in own}}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_many_steps_at_once_are_those_of_the_timeline(case: tuple[str, int, int, int, bool]) -> None:
    schedule, ranks, batches, chunks, training = case
    draw, order = random.Random(0), rank_orders(schedule, ranks, batches, chunks, training)
    cuts = [drawn(draw, ranks * chunks, training) for _ in range(50)]
    one_each = (1.0,) * ranks  # the simulation of shared processors, where each rank has one
    assert cut_step_seconds(order, cuts) == pytest.approx(
        [simulate_timeline(order, cut).step_s for cut in cuts], rel=1e-12
    )
    assert cut_step_seconds(order, cuts) == pytest.approx(
        [simulate_timeline(order, cut, one_each).step_s for cut in cuts], rel=1e-9
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_step_is_below_the_least(case: tuple[str, int, int, int, bool]) -> None:
    schedule, ranks, batches, chunks, training = case
    draw, order = random.Random(0), rank_orders(schedule, ranks, batches, chunks, training)
    ratios = []
    for _ in range(30):
        stages = drawn(draw, ranks * chunks, training, message=0.0)
        step = simulate_timeline(order, stages).step_s
        ratios.append(step / step_lower_bound(order, ranks * chunks, totals(order, stages)))
    assert min(ratios) >= 1 - 1e-9
    # With equal stages it is near: it has most of the bubble.
    even = [StageSeconds(1.0, 2.0 * training, 1.0 * training)] * (ranks * chunks)
    least = step_lower_bound(order, ranks * chunks, totals(order, even))
    work = batches * chunks * (1 + 2 * training)
    assert simulate_timeline(order, even).step_s >= least > work
    assert least - work >= 0.4 * simulate_timeline(order, even).bubble_s


@pytest.mark.parametrize(("ranks", "batches"), [(2, 8), (4, 16), (8, 64)])
def test_with_many_micro_batches_the_least_has_all_of_the_bubble(ranks: int, batches: int) -> None:
    least = step_lower_bound(rank_orders("1f1b", ranks, batches), ranks, {"F": ranks, "B": 2 * ranks})
    assert least == pytest.approx(3 * (batches + ranks - 1), rel=2e-6)


def test_the_work_of_no_stage_may_be_left_out() -> None:
    order = rank_orders("1f1b", 3, 6)
    assert step_lower_bound(order, 3, {"F": 0.0, "B": 0.0}) == 0
    assert step_lower_bound(order, 3, {"F": 1e-6, "B": 2e-6}) == pytest.approx(1e-6 * 3 * (6 + 2) / 3, rel=2e-6)


def test_orders_that_wait_for_each_other_are_found() -> None:
    crossed = ((Action("B", 0, 0), Action("F", 0, 0)), (Action("F", 1, 0), Action("B", 1, 0)))
    with pytest.raises(ValueError, match="wait for each other"):
        cut_step_seconds(crossed, [[StageSeconds(1, 1)] * 2])


def test_steps_are_float64_one_per_cut() -> None:
    found = cut_step_seconds(rank_orders("1f1b", 2, 4), [[StageSeconds(1, 2)] * 2] * 3)
    assert found.shape == (3,)
    assert found.dtype == np.float64

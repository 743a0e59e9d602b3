"""Where a pipeline is cut: the choice is that of trying all cuts."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from autoshard.errors import PlanError
from autoshard.passes.pipeline import partition
from autoshard.passes.pipeline.partition import BoundarySearch, GraphSegment
from autoshard.passes.pipeline.schedules import max_in_flight, rank_orders, simulate_timeline
from autoshard.passes.pipeline.step_times import cut_step_seconds


def cuts(pieces: int, stages: int) -> list[tuple[int, ...]]:
    """The ends of every cut of so many pieces."""
    return [(*inner, pieces) for inner in itertools.combinations(range(1, pieces), stages - 1)]


def seconds(cutting: BoundarySearch, ends: tuple[int, ...]) -> float:
    """The formula of :mod:`autoshard.passes.pipeline.partition` of one cut, a stage at a time."""
    pieces, times = cutting.pieces, []
    for i, (first, end) in enumerate(zip((0, *ends), ends, strict=False)):
        own, rank = pieces[first:end], i % cutting.ranks
        flying = max_in_flight(rank_orders(cutting.schedule, cutting.ranks, cutting.batches, cutting.chunks)[rank])
        took = sum(p.forward + p.backward for p in own)
        took += pieces[end - 1].send if end < len(pieces) else 0.0
        took += own[0].send_back if first else 0.0
        held = cutting.chunks * sum(p.state for p in own) + flying * sum(p.kept for p in own) + max(p.most for p in own)
        if held > cutting.budget:
            spared = flying * sum(0.0 if math.isnan(p.least) else p.kept - p.least for p in own)
            if held - cutting.budget > spared:
                return math.inf
            took += (held - cutting.budget) / spared * sum(p.recompute_s for p in own)
        times.append(took)
    fill = cutting.fill
    return fill * sum(times) / cutting.chunks + (cutting.batches * cutting.chunks - fill) * max(times)


def drawn(draw: random.Random) -> BoundarySearch:
    ranks, chunks = draw.choice([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)])
    schedule = draw.choice(["gpipe", "1f1b"] if chunks == 1 else ["interleaved", "zero_bubble"])
    whole = draw.random() < 0.3  # small whole numbers: many cuts are equal

    def number() -> float:
        return float(draw.randint(0, 3)) if whole else draw.random()

    pieces = [
        GraphSegment(
            forward=number(),
            backward=2 * number(),
            weights=0.5 * number() if schedule == "zero_bubble" else 0.0,
            send=number(),
            send_back=number(),
            state=number(),
            kept=1 + number(),
            most=number(),
            least=draw.choice([math.nan, 0.5]),
            recompute_s=number(),
        )
        for _ in range(draw.randint(ranks * chunks, 9))
    ]
    budget = draw.choice([math.inf, 6.0, 12.0, 20.0])
    return BoundarySearch(pieces, schedule, ranks, ranks * draw.randint(1, 4), chunks, budget)


@pytest.mark.parametrize("seed", range(10))
def test_no_cut_is_shorter(seed: int) -> None:
    draw, fitting = random.Random(seed), 0
    for _ in range(200):
        cutting = drawn(draw)
        least = min(seconds(cutting, ends) for ends in cuts(len(cutting.pieces), cutting.stages))
        if math.isinf(least):
            with pytest.raises(PlanError, match="no split into"):
                cutting.best()
            continue
        found = cutting.best()
        assert found.seconds == pytest.approx(least, abs=1e-12)
        assert seconds(cutting, found.ends) == pytest.approx(least, abs=1e-12)
        fitting += 1
    assert 100 < fitting < 200


# schedule, ranks, stages of each, micro-batches, pieces; what messages take, and whether there is a backward
SIMULATED = [
    ("1f1b", 4, 1, 8, 9, 0.01, True),
    ("1f1b", 4, 1, 8, 9, 0.1, True),
    ("1f1b", 4, 1, 4, 9, 0.1, True),
    ("1f1b", 4, 1, 3, 9, 0.1, True),
    ("1f1b", 4, 1, 8, 9, 0.1, False),
    ("gpipe", 4, 1, 6, 9, 0.1, True),
    ("zero_bubble", 4, 1, 8, 9, 0.1, True),
    ("interleaved", 2, 2, 4, 9, 0.1, True),
]


@pytest.mark.slow_cases("interleaved-2-2-4-9-0.1-True", "gpipe-4-1-6-9-0.1-True", "1f1b-4-1-[48]-*", "zero_bubble-*")
@pytest.mark.parametrize(("schedule", "ranks", "chunks", "batches", "count", "message", "training"), SIMULATED)
def test_the_cut_is_the_best_of_all_by_simulation(
    schedule: str, ranks: int, chunks: int, batches: int, count: int, message: float, training: bool
) -> None:
    draw, order = random.Random(0), rank_orders(schedule, ranks, batches, chunks, training)
    plain = []
    for _ in range(20):
        pieces = [
            GraphSegment(
                f := 0.2 + draw.random(),
                training * f * (1 + 2 * draw.random()),
                weights=0.5 * f if schedule == "zero_bubble" else 0.0,
                send=message * draw.random(),
                send_back=training * message * draw.random(),
                kept=1.0,
                least=0.3,
                recompute_s=f,
                once=training * draw.choice([0.0, 0.0, 0.0, 6.0]) * draw.random(),
            )
            for _ in range(count)
        ]
        budget = draw.choice([math.inf, 12.0])  # within which some make part of it again
        paces = draw.choice([(), [ranks / (n + 1) for n in range(ranks)]])  # a core for each, or one for all
        cutting = BoundarySearch(pieces, schedule, ranks, batches, chunks, budget, training, paces)
        steps = {}
        for ends in cuts(count, ranks * chunks):
            if (stages := cutting._stages(ends)) is not None:
                steps[ends] = simulate_timeline(order, stages, paces).end_s
                spans = enumerate(zip((0, *ends), ends, strict=False))
                assert max(cutting._floor(i, a)[b] for i, (a, b) in spans) <= steps[ends] * (1 + 1e-9)
        found = cutting.shortest()
        assert found.seconds == pytest.approx(steps[found.ends], rel=1e-12)
        assert cutting.bubble(found) == pytest.approx(
            simulate_timeline(order, found.stages, paces).bubble_s, rel=1e-9, abs=1e-9
        )
        assert found.seconds == pytest.approx(min(steps.values()), rel=1e-9)
        plain.append(steps[cutting.best().ends] / min(steps.values()))
    assert schedule == "gpipe" or max(plain) > 1.001  # by the formula alone


def test_few_cuts_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that no bound rules out: of 9139 cuts of 40 pieces, and of equal layers as many."""
    simulated = []
    monkeypatch.setattr(
        partition, "cut_step_seconds", lambda order, cuts: simulated.extend(cuts) or cut_step_seconds(order, cuts)
    )
    draw = random.Random(0)
    for pieces in (
        [GraphSegment(f := 0.2 + draw.random(), 2 * f, send=0.01) for _ in range(40)],
        [GraphSegment(1, 2)] * 40,
    ):
        simulated.clear()
        BoundarySearch(pieces, "1f1b", 4, 16).shortest()
        assert len(simulated) < 10


def test_what_does_much_once_a_step_is_put_where_ranks_wait() -> None:
    """The first rank is done last: sums of gradients and updates on others hide behind its backward."""
    block, other = [GraphSegment(1, 2)] * 2, GraphSegment(1, 2, once=5.0)
    assert BoundarySearch([*block, GraphSegment(1, 2), *block], "1f1b", 2, 4).shortest().ends == (3, 5)
    found = BoundarySearch([*block, other, *block], "1f1b", 2, 4).shortest()
    assert found.ends == (2, 5)
    assert found.seconds == simulate_timeline(rank_orders("1f1b", 2, 4), found.stages).end_s == 43.0


def test_a_heavy_head_has_fewer_blocks_beside_it() -> None:
    block = GraphSegment(1, 2)
    pieces = [GraphSegment(0.1, 0.1), *[block] * 14, GraphSegment(2, 4)]
    assert BoundarySearch(pieces, "1f1b", 4, 16).best().ends == (5, 9, 13, 16)


def test_memory_in_flight_moves_blocks_to_later_stages() -> None:
    pieces = [GraphSegment(1, 2, kept=1.0)] * 12
    even = BoundarySearch(pieces, "1f1b", 3, 12)
    assert even.best().ends == (4, 8, 12)
    # Four blocks with three micro-batches in flight hold 12: with 9 the first stage has three, and then four and five.
    assert replace(even, budget=9.0).best().ends == (3, 7, 12)
    recompute_s = replace(even, pieces=[replace(p, least=0.1, recompute_s=0.1) for p in pieces], budget=9.0).best()
    assert recompute_s.ends == (4, 8, 12)
    assert recompute_s.stages[0].backward > recompute_s.stages[1].backward == recompute_s.stages[2].backward


def test_cuts_are_where_little_crosses() -> None:
    pieces = [GraphSegment(1, 2, send=0.1 if i % 2 else 3.0) for i in range(8)]
    assert all(end % 2 == 0 for end in BoundarySearch(pieces, "1f1b", 3, 3).best().ends)


def test_eighty_layers_on_sixteen_ranks() -> None:
    draw = random.Random(0)
    pieces = [GraphSegment(f := 1 + 0.01 * draw.random(), 2 * f, send=0.01, kept=1.0, state=1.0) for _ in range(162)]
    found = BoundarySearch(pieces, "1f1b", 16, 64, budget=170.0).best()
    assert len(found.stages) == 16


def test_more_stages_than_parts_are_refused() -> None:
    with pytest.raises(PlanError, match="8 stages were asked for, but the graph can be split into 5 at most"):
        BoundarySearch([GraphSegment(1, 2)] * 5, "interleaved", 4, 4, 2).best()

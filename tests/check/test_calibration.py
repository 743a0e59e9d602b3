"""What calibration counts: on clocks that are told what a call takes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from told_clocks import Told

from autoshard.check import calibration, collective_timing
from autoshard.check.clock import Clock, slowest_ranks
from autoshard.hardware import SMALL_ALL_REDUCE
from autoshard.runtime.transport.move import sums_directly


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, which agrees with itself."""
    monkeypatch.setattr(collective_timing, "agreed", lambda value, pick: value)
    monkeypatch.setattr(collective_timing, "slowest_ranks", lambda found: found)


def test_a_collective_is_timed_after_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Any = Told()
    slept = True

    def operation() -> None:
        nonlocal slept
        clock.now, slept = clock.now + 1e-3, True

    def send() -> None:
        nonlocal slept
        clock.now, slept = clock.now + (0.5 if slept else 0.2), False

    monkeypatch.setattr(collective_timing, "_layer_step", lambda clock: operation)
    assert collective_timing.TimedStep(clock).seconds([send]) == [pytest.approx(0.5)]


@pytest.mark.parametrize(("ranks", "gloo"), [(2, True), (4, True), (4, False)])
def test_sums_are_timed_as_modules_make_them(ranks: int, gloo: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few numbers, up to the most that ranks send each other, as well: not torch's all-reduce. Where these go another
    way, they say nothing of what more numbers take."""
    summed = list[int]()

    class Comm:
        world_size = ranks

        def __init__(self, axes: Any, members: Any) -> None:
            pass

        def process_group(self, axes: Any) -> Any:
            return SimpleNamespace(gloo=gloo)

        def all_reduce(self, group: Any, x: torch.Tensor) -> Any:
            return SimpleNamespace(wait=lambda: summed.append(x.numel()))

    clock: Any = Told()
    monkeypatch.setattr(collective_timing, "TorchCommunicator", Comm)
    monkeypatch.setattr(collective_timing.dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(collective_timing.dist, "get_rank", lambda: 0)
    messages = collective_timing.CollectiveTimes(SimpleNamespace(clock=clock), ranks, True)  # type: ignore[arg-type]
    for kind, size in messages.sent:
        if kind in (SMALL_ALL_REDUCE, "all_reduce"):
            messages._call(kind, size)()
    few = [size for kind, size in messages.sent if kind == SMALL_ALL_REDUCE]
    assert summed == [*few, *(size for kind, size in messages.sent if kind == "all_reduce")]
    assert sums_directly(4 * few[-1], ranks)
    assert not sums_directly(4 * few[-1] + 1, ranks)
    assert any(sums_directly(4 * n, ranks) for n in summed[len(few) :]) == (ranks == 2 or not gloo)


def test_what_hides_is_told_by_what_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of a collective hides, on a machine that takes twice as long each time."""
    clock: Any = Told()
    slower = 1.0

    def operation() -> None:
        clock.now += 1e-3 * slower

    def begin(*_: Any, **__: Any) -> Any:
        before = clock.now

        def wait() -> None:
            clock.now += 0.1 * slower - 0.25 * 0.1 * slower * (clock.now > before)

        return SimpleNamespace(wait=wait)

    def interleaved_seconds(calls: Sequence[Callable[[], object]]) -> list[list[float]]:
        nonlocal slower
        rounds = []
        for _ in range(3):
            slower *= 2
            rounds.append([clock.seconds(call) for call in calls])
        return rounds

    clock.interleaved_seconds = interleaved_seconds
    monkeypatch.setattr(collective_timing, "_layer_step", lambda clock: operation)
    monkeypatch.setattr(collective_timing.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(collective_timing.dist, "all_reduce", begin)
    monkeypatch.setattr(collective_timing, "all_gather_single", begin)
    assert collective_timing.measured_overlap(clock) == pytest.approx(0.25)


def test_few_numbers_have_a_line_of_their_own() -> None:
    messages: Any = SimpleNamespace(
        sent=[(SMALL_ALL_REDUCE, 1), (SMALL_ALL_REDUCE, 4097), *(("all_reduce", n) for n in (1 << 12, 1 << 20))]
    )
    messages.comm = SimpleNamespace(world_size=4)
    for once, expected in ((1e-3, 1e-3), (9e-3, 5e-3)):  # never later than what goes the long way
        few, summed = collective_timing.CollectiveTimes.rates(messages, [once, once + 1e-3, 5e-3, 5e-3])
        assert (few.kind, few.latency) == (SMALL_ALL_REDUCE, pytest.approx(expected, rel=2e-3))
        assert (summed.kind, summed.latency) == ("all_reduce", pytest.approx(5e-3))
        assert few.bandwidth == pytest.approx(1.5 * 4 * 4096 / 1e-3, rel=1e-6)


def test_waits_of_several_collectives_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ranks that wait at some collectives a step has the mean, not what most take."""
    clock: Any = Told()
    sent = 0

    def operation() -> None:
        clock.now += 1e-3

    def send() -> None:
        nonlocal sent
        sent += 1
        clock.now += 1.0 if sent % 4 == 0 else 0.1

    monkeypatch.setattr(collective_timing, "_layer_step", lambda clock: operation)
    assert collective_timing.TimedStep(clock).seconds([send]) == [pytest.approx(0.325)]


def test_the_time_until_others_are_through_is_none_of_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank computes for 6 ms before each message, this one for 2 ms, and then both send for 0.1 s."""
    clock: Any = Told()

    def operation() -> None:
        clock.now += 1e-3

    def send() -> None:
        clock.now += 0.1 + 2 * collective_timing.SECONDS_BETWEEN  # it waits for the other

    def with_another(found: Sequence[Sequence[float]]) -> list[list[float]]:
        return slowest_of(found, [[3 * alone, both] for alone, both in found])

    monkeypatch.setattr(collective_timing, "_layer_step", lambda clock: operation)
    monkeypatch.setattr(collective_timing, "slowest_ranks", with_another)
    assert collective_timing.TimedStep(clock).seconds([send]) == [pytest.approx(0.1)]
    monkeypatch.setattr(collective_timing, "slowest_ranks", lambda found: found)
    assert collective_timing.TimedStep(clock).seconds([send]) == [
        pytest.approx(0.1 + 2 * collective_timing.SECONDS_BETWEEN)
    ]


def test_ranks_compute_equally_often_before_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long one of them takes when it is timed alone."""
    clock: Any = Told()

    def operation() -> None:
        clock.now += 1e-3

    monkeypatch.setattr(collective_timing, "_layer_step", lambda clock: operation)
    assert collective_timing.TimedStep(clock).count == 2
    monkeypatch.setattr(collective_timing, "agreed", lambda value, pick: pick([value, 1.5 * value]))
    assert collective_timing.TimedStep(clock).count == 3


def slowest_of(*ranks: Sequence[Sequence[float]]) -> list[list[float]]:
    def gather(out: list[object], _: object) -> None:
        out[:] = ranks

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "get_world_size", lambda: len(ranks))
        patched.setattr(dist, "all_gather_object", gather)
        return slowest_ranks(ranks[0])


def test_the_slowest_of_all_ranks_counts_in_each_round() -> None:
    assert slowest_of([[1.0, 5.0], [2.0, 2.0]], [[3.0, 4.0], [1.0, 9.0]]) == [[3.0, 5.0], [2.0, 9.0]]


def test_a_machine_that_gets_slower_makes_no_collective_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute and what follows it are timed in turns: what adds 0.1 s adds that, however slow the compute is by then."""
    clock: Any = Told()
    slower = 1.0

    def operation() -> None:
        clock.now += 1e-3 * slower

    def send() -> None:
        clock.now += 0.1

    def interleaved_seconds(calls: Sequence[Callable[[], object]]) -> list[list[float]]:
        nonlocal slower
        rounds = []
        for _ in range(5):
            rounds.append([clock.seconds(call) for call in calls])
            slower *= 3
        return rounds

    clock.interleaved_seconds = interleaved_seconds
    monkeypatch.setattr(collective_timing, "_layer_step", lambda clock: operation)
    assert collective_timing.TimedStep(clock).seconds([send, lambda: None]) == [
        pytest.approx(0.1),
        collective_timing.SHORTEST_SECONDS,
    ]


def test_calls_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoshard.check.clock.on_this_machine", lambda: 1)
    monkeypatch.setattr("autoshard.check.clock.agreed", lambda value, pick: value)
    monkeypatch.setattr("autoshard.check.clock.dist.barrier", lambda: None)
    order = list[str]()
    rounds = Clock(torch.device("cpu"), 2).interleaved_seconds([lambda: order.append("a"), lambda: order.append("b")])
    assert order == ["a", "b"] * 3
    assert [len(taken) for taken in rounds] == [2, 2]


def test_results_are_kept_while_one_is_timed() -> None:
    results, alive = list[Any](), list[int]()

    def call() -> torch.Tensor:
        alive.append(sum(ref() is not None for ref in results))
        made = torch.empty(1 << 20)
        results.append(weakref.ref(made))
        return made

    clock: Any = Told()
    calibration._seconds_keeping_results(clock, call)
    assert max(alive) == alive[-1] == calibration.KEPT_BYTES["cpu"] // (4 << 20)


def test_convolutions_are_timed_as_programs_run_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their images, and the gradients of their results, lie with the channels last in memory, which is faster on CPUs."""
    clock: Any = Told()
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def both_ways(layer: torch.nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> None:
        clock.now += 1.0
        seen.append((x, gradient))

    monkeypatch.setattr(calibration, "_forward_and_backward", both_ways)
    for few in (None, 8):
        assert calibration._convolution_speed(clock, few) > 0
    assert {(x.shape[1], gradient.shape[1]) for x, gradient in seen} == {(64, 64), (8, 64), (64, 8)}
    assert all(x.is_contiguous(memory_format=torch.channels_last) for pair in seen for x in pair)


def test_a_clock_says_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoshard.check.clock.on_this_machine", lambda: 1)
    clock, took = Clock(torch.device("cpu"), 4), iter([9.0, 9.0, 1.0, 1.0, 1.0, 7.0])
    monkeypatch.setattr("autoshard.check.clock.agreed", lambda value, pick: value)
    monkeypatch.setattr(clock, "_took", lambda call, often, now=None: next(took))
    assert clock.seconds(lambda: None) == 2.5


@pytest.mark.parametrize(("machine", "counts"), [(4, [1, 2, 4]), (3, [1, 2, 3])])
def test_what_ranks_that_share_cores_take_by_how_many_work(
    machine: int, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two cores, of a machine that becomes slower from turn to turn, and in one second is slow indeed."""
    turns = (1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 3.0, 4.0)
    speeds = [slow * (40.0 if (slow, ranks) == (4.0, 1) else 1.0) for slow in turns for ranks in counts]
    took = list[int]()

    def one(call: Callable[[], object], often: int, now: Any) -> float:
        took.append(now.args[0])
        return speeds[len(took) - 1] * max(1.0, took[-1] / 2)

    for module in ("clock", "calibration"):
        monkeypatch.setattr(f"autoshard.check.{module}.on_this_machine", lambda: machine)
    monkeypatch.setattr("autoshard.check.clock.dist.barrier", lambda: None)
    monkeypatch.setattr("autoshard.check.clock.dist.get_rank", lambda: 0)
    monkeypatch.setattr("autoshard.check.clock.agreed", lambda value, pick: pick([value] * took[-1]))
    clock = Clock(torch.device("cpu"), 4)
    monkeypatch.setattr(clock, "_often", lambda call, together: 7)
    monkeypatch.setattr(clock, "_took", one)
    assert calibration._core_sharing(clock) == tuple((n, pytest.approx(max(2, n) / machine)) for n in counts)
    assert len(took) == len(speeds)


def test_only_some_ranks_repeat_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoshard.check.clock.on_this_machine", lambda: 4)
    monkeypatch.setattr("autoshard.check.clock.agreed", lambda value, pick: value)
    monkeypatch.setattr("autoshard.check.clock.dist.barrier", lambda: None)
    for rank, expected in ((5, [2, 4]), (6, [4])):  # the second and the third of the second machine
        monkeypatch.setattr("autoshard.check.clock.dist.get_rank", lambda rank=rank: rank)
        clock, calls = Clock(torch.device("cpu"), 8), list[int]()
        monkeypatch.setattr(clock, "_often", lambda call, together: 7)
        monkeypatch.setattr(clock, "_took", lambda call, often, now, calls=calls: calls.append(now.args[0]) or 1.0)
        clock.relative(lambda: None, [2, 4])
        assert calls == expected * (len(calls) // len(expected))


@pytest.mark.parametrize(("cores", "threads", "ranks", "expected"), [(2, 1, 4, 2.0), (2, 1, 1, 1.0), (8, 4, 4, 0.5)])
def test_ranks_that_share_cores_wait_for_them(
    cores: int, threads: int, ranks: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second of the processor, which no clock on the wall sees, is as many as ranks share it: not what one turn takes."""
    monkeypatch.setattr("autoshard.check.clock.on_this_machine", lambda: 4)
    monkeypatch.setattr("autoshard.check.clock.os.cpu_count", lambda: cores)
    monkeypatch.setattr("autoshard.check.clock.torch.get_num_threads", lambda: threads)
    monkeypatch.setattr("autoshard.check.clock.agreed", lambda value, pick: value)
    monkeypatch.setattr("autoshard.check.clock.dist.barrier", lambda: None)
    monkeypatch.setattr("autoshard.check.clock.dist.get_rank", lambda: 0)
    worked = 0.0

    def call() -> None:
        nonlocal worked
        worked += 1.0

    monkeypatch.setattr("autoshard.check.clock.time.process_time", lambda: worked)
    clock = Clock(torch.device("cpu"), 4)
    assert clock.shared
    clock._took(call, 1)
    begin = clock.now(ranks)
    call()
    assert clock.now(ranks) - begin == pytest.approx(expected)


def test_backwards_are_measured_where_the_caller_wants_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    class AskedError(Exception):
        pass

    def asked() -> int:
        raise AskedError(torch.is_grad_enabled())

    monkeypatch.setattr(calibration.dist, "get_world_size", asked)
    with torch.no_grad(), pytest.raises(AskedError, match="True"):
        calibration._calibrated(True)


def test_a_bad_second_changes_no_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every visit meets one in another entry; medians are those of visits without."""
    bad: Any = iter(("bandwidth", "launch", "messages"))
    visited = []

    def visit(*_: Any) -> dict[str, Any]:
        slow = next(bad)
        visited.append(slow)
        pair = [(0.5, 0.25), (0.6, 0.3), (0.7, 0.35)]
        return {
            "speeds": [1e11, 5e11], "bandwidth": 1e9 if slow == "bandwidth" else 1e10, "caches": ((12.0, 1e-6), (99.0, 2e-6)),
            "launch": 1e-3 if slow == "launch" else 1e-5, "convolutions": 0.8, "attention": pair, "staged": (1e-4, 1e-9),
            "messages": [[1e-3 * (1 + n) * (40 if slow == "messages" else 1) for n in range(17)]], "overlap": 0.5,
            "products": [0.1, 0.2, 0.3, 0.4], "channels": [0.1] * 7, "functions": (1e-9, 2e-9), "updates": 1e9,
            "sharing": ((1, 0.5), (2, 1.0)), "waiting": [(2e-3, 9.0 if slow == "launch" else 0.0), (8e-3, 1e-3)],
            "disturbed": 1.0 if slow == "launch" else 0.0,
        }  # fmt: skip

    for name, found in (("get_world_size", lambda: 2), ("get_rank", lambda: 0), ("get_backend", lambda: "gloo")):
        monkeypatch.setattr(calibration.dist, name, found)
    for module in ("clock", "calibration", "collective_timing"):
        monkeypatch.setattr(f"autoshard.check.{module}.agreed", lambda value, pick: value)
    monkeypatch.setattr(calibration, "_visit", visit)
    monkeypatch.setattr(
        collective_timing, "TorchCommunicator", lambda axes, ranks: type("", (), {"world_size": axes["ranks"]})()
    )
    found = calibration._calibrated(True)
    assert len(visited) == calibration.VISITS
    assert (found.memory_bandwidth, found.kernel_latency) == (1e10, 1e-5)
    assert found.attention == ((32, 0.5, 0.25), (128, 0.6, 0.3), (512, 0.7, 0.35))
    assert found.products == ((4, 0.1), (16, 0.2), (64, 0.3), (256, 0.4), (512, 1.0))
    assert found.caches == ((12.0, 1e-6), (99.0, 2e-6))
    assert (found.sharing, found.waiting) == (((1, 0.5), (2, 1.0)), ((2e-3, 0.0), (8e-3, 1e-3)))
    assert (found.disturbed, found.name[-8:]) == (0.0, "measured")
    assert [rate.kind for rate in found.node.rates] == [
        *(SMALL_ALL_REDUCE, "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")
    ]
    assert all(rate.latency < 0.02 for rate in found.node.rates)
    assert found.node.rate(SMALL_ALL_REDUCE, 2)[0] == pytest.approx(1e-3, rel=1e-3)


def test_stages_take_what_is_not_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four ranks, eight micro-batches: 64 actions, and 48 messages of two ends each."""
    taken = {size: 0.064 + 48 * 2 * 4 * (size - 1) * 1e-9 for size in collective_timing.SIZES}
    monkeypatch.setattr(collective_timing.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(collective_timing, "_processor_seconds", lambda clock, size: taken[size] / 4)
    monkeypatch.setattr(collective_timing, "agreed", lambda value, pick: pick([value] * 4))
    clock: Any = Told()
    assert collective_timing.stage_host_seconds(clock) == pytest.approx((1e-3, 1e-9))

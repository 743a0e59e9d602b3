"""Calibration on a machine whose host takes cores away: fake clocks, and a fake counter of what was stolen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autoshard.check import calibration, clock, collective_timing
from autoshard.check.clock import Clock
from autoshard.hardware import PRESETS


class Host:
    """A machine on which a measurement takes a tenth of a second; during a burst the host takes a half of that.

    ``burst``: measurements, from the first on. An all-reduce takes 1.2 ms, and 10.5 in the burst.
    """

    def __init__(self, burst: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.burst, self.now, self.gone, self.measured = burst, 0.0, 0.0, 0
        monkeypatch.setattr(clock, "steal_seconds", lambda: self.gone)
        self.watch = clock.StealWatch(lambda value: value, lambda: self.now, cores=2)

    def measure(self) -> float:
        within = self.measured < self.burst
        self.now, self.measured = self.now + 0.1, self.measured + 1
        self.gone += 0.1 / self.measured if within else 0.0
        return 10.5e-3 - self.measured * 1e-5 if within else 1.2e-3


def test_what_a_burst_disturbed_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(15, monkeypatch)
    assert [host.watch.undisturbed(host.measure) for _ in range(3)] == [1.2e-3] * 3
    assert (host.measured, host.watch.share()) == (15 + 3, 0.0)


def test_without_repetition_the_wrong_number_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REPEAT_SECONDS", "REPEAT_RATIO"):
        monkeypatch.setattr(clock, name, 0.0)
    host = Host(15, monkeypatch)
    assert host.watch.undisturbed(host.measure) > 10e-3
    assert (host.measured, host.watch.share()) == (1, 1.0)


def test_a_host_that_never_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring ends, in a time that is known; what was least disturbed counts, and how much was is told once."""
    host = Host(float("inf"), monkeypatch)
    monkeypatch.setattr(clock, "MOST_STOLEN", 0.0)
    found = [host.watch.undisturbed(host.measure) for _ in range(50)]
    assert host.now <= 2 * 50 * 0.1 + clock.REPEAT_SECONDS + 0.1
    assert found[0] == pytest.approx(
        10.5e-3 - 1e-5 * round(1 + (clock.REPEAT_SECONDS + clock.REPEAT_RATIO * 0.1) / 0.1), rel=1e-3
    )
    assert [host.watch.share(), host.watch.share()] == [1.0, 0.0]


def test_a_little_that_is_stolen_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(0, monkeypatch)

    def measure() -> float:
        host.gone += clock.MOST_STOLEN * 0.9 * 0.1 * 2
        return host.measure()

    assert host.watch.undisturbed(measure) == 1.2e-3
    assert (host.measured, host.watch.share()) == (1, 0.0)


@pytest.mark.parametrize("text", ["cpu  1 2 3 4 5 6 7\n", "", None])
def test_systems_that_do_not_say(text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any, **__: Any) -> str:
        if text is None:
            raise FileNotFoundError("/proc/stat")
        return text

    monkeypatch.setattr(Path, "read_text", read)
    assert clock.steal_seconds() == 0.0


def test_the_ninth_field_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "cpu  1 2 3 4 5 6 7 250 9 10\ncpu0 0 0 0\n")
    monkeypatch.setattr(clock.os, "sysconf", lambda name: {"SC_CLK_TCK": 100}[name])
    assert clock.steal_seconds() == 2.5


@pytest.mark.parametrize("how", ["seconds", "computing", "in_turns", "relative"])
def test_every_measurement_of_a_clock_is_watched(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two times that it is made everything takes ten times as long, and as much is stolen."""
    monkeypatch.setattr("autoshard.check.clock.on_this_machine", lambda: 2)
    monkeypatch.setattr("autoshard.check.clock.agreed", lambda value, pick: value)
    monkeypatch.setattr("autoshard.check.clock.dist.barrier", lambda: None)
    monkeypatch.setattr("autoshard.check.clock.dist.get_rank", lambda: 0)
    timer, reads, calls = Clock(torch.device("cpu"), 1), 0, 0

    def gone() -> float:
        nonlocal reads
        reads += 1
        return float(min(reads, 4))

    def took(*_: Any) -> float:
        return 10.0 if reads < 4 else 1.0

    def call() -> None:
        nonlocal calls
        calls += 1

    monkeypatch.setattr(clock, "steal_seconds", gone)
    monkeypatch.setattr(timer, "_often", lambda call, together: 1)
    monkeypatch.setattr(timer, "_took", took)
    measures: dict[str, Callable[[], Any]] = {
        "seconds": lambda: timer.seconds(call),
        "computing": lambda: timer.compute_seconds(call),
        "in_turns": lambda: timer.interleaved_seconds([call]),
        "relative": lambda: timer.relative(call, [2]),
    }
    expected = {"in_turns": [[1.0]], "relative": [1.0]}.get(how, 1.0)
    assert measures[how]() == expected
    assert reads >= 2 * 3


KINDS = ("all_reduce", "all_gather")


def sent(sizes: tuple[int, ...]) -> list[tuple[str, int]]:
    return [("scalar", 1), *((kind, size) for kind in KINDS for size in sizes)]


@pytest.mark.parametrize(
    ("milliseconds", "odd"),
    [
        ((1.0, 1.1, 2.0), []),
        ((1.2, 10.5, 3.0), [1, 2, 3]),  # a burst in the middle
        ((10.5, 1.3, 3.0), [1, 2, 3]),  # the shortest took longest
        ((1.2, 1.3, 30.0), [1, 2, 3]),
        ((1.2, 2.0, 0.9), [2, 3]),  # it falls steeply
        ((1.0, 0.6, 2.0), []),  # a little luck
    ],
)
def test_messages_out_of_line(milliseconds: tuple[float, ...], odd: list[int]) -> None:
    straight = (1.0, 1.1, 2.0)
    assert (
        collective_timing.outlying_messages(sent((1 << 12, 1 << 17, 1 << 20)), [0.5, *milliseconds, *straight]) == odd
    )


def test_messages_out_of_line_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        collective_timing, "TorchCommunicator", lambda axes, ranks: type("", (), {"world_size": axes["ranks"]})()
    )
    monkeypatch.setattr(collective_timing, "agreed", lambda value, pick: value)
    for name in ("get_world_size", "get_rank"):
        monkeypatch.setattr(collective_timing.dist, name, lambda: 2)
    asked = list[list[tuple[str, int]]]()

    class Step:
        def seconds(self, calls: list[tuple[str, int]]) -> list[float]:
            asked.append(list(calls))
            bad = ("all_gather", 1 << 17) if len(asked) == 1 else None
            return [10.5e-3 if call == bad else 1e-3 + 1e-9 * call[1] for call in calls]

    messages = collective_timing.CollectiveTimes(Step(), 2, quick=True)  # type: ignore[arg-type]
    monkeypatch.setattr(messages, "_call", lambda kind, size: (kind, size))
    found = dict(zip(messages.sent, messages.seconds(), strict=True))
    assert asked[1:] == [[("all_gather", size) for size in (1 << 12, 1 << 17, 1 << 20)]]
    assert found["all_gather", 1 << 17] == pytest.approx(1.13e-3, rel=0.01)


def test_what_could_not_be_avoided_is_told(caplog: pytest.LogCaptureFixture) -> None:
    quiet, loud = PRESETS["cpu"], replace(PRESETS["cpu"], disturbed=0.4)
    for hardware, here, said in ((quiet, True, 0), (loud, False, 0), (loud, True, 1)):
        caplog.clear()
        assert calibration._warned_if_disturbed(hardware, here) is hardware
        assert len(caplog.records) == said
    assert "40 % of the measurements of calibrate() were disturbed" in caplog.text
    assert "Calibrate again when the machine is quiet" in caplog.text

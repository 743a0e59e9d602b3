"""What a rank sees, and how soon, when another one raises inside its forward, is killed, or stops early."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import world
from failure_worker import WAIT

SOON = 5.0
"""seconds within which every rank must know; a rank that waits looks once a second"""

IN_FORWARD = r"\w+@tp blocks\.\d\S* forward among ranks 0, 1"


def seen(folder: Path, how: str, script: str = "failure_worker.py") -> list[str]:
    """What both ranks say."""
    said: list[str] = json.loads(world.start(script, 2, folder, how, timeout=120))
    return said


def seconds_and_text(said: str) -> tuple[float, str]:
    found = re.match(r"(\d+\.\d+) s: (.*)", said)
    assert found, said
    return float(found[1]), found[2]


@pytest.mark.slow_cases("stop")
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_rank_that_is_gone(tmp_path: Path, how: str) -> None:
    seconds, text = seconds_and_text(seen(tmp_path, how)[0])
    assert seconds < SOON
    assert re.match(rf"CommunicationError: {IN_FORWARD}: another rank ended, was killed, is unreach", text), text


@pytest.mark.slow
def test_a_rank_whose_own_code_fails_and_that_lives_on(tmp_path: Path) -> None:
    """Nobody can tell it from a slow one: the others wait as long as the process group says, and name the collective."""
    seconds, text = seconds_and_text(seen(tmp_path, "catch")[0])
    assert WAIT <= seconds < WAIT + SOON
    assert re.match(rf"CommunicationError: {IN_FORWARD}: another rank ended, .* or did not arrive in time", text), text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "refused"),
    [
        ("refuse", "CaptureError: argument of type set is neither"),
        ("generate", "MemoryError: no memory left"),
        ("hook before", "MemoryError: no memory left"),
    ],
)
def test_a_rank_that_raises_before_it_meets_the_others(tmp_path: Path, how: str, refused: str) -> None:
    """Its arguments are refused on it alone, or the caller's code fails between two calls, or in a hook of the module; the
    other one is told why."""
    other, failed = seen(tmp_path, how)
    assert refused in failed
    seconds, text = seconds_and_text(other)
    assert seconds < SOON
    assert re.match(rf"CommunicationError: {IN_FORWARD}: rank 1 failed: {refused}", text), text
    for said in (other, failed):
        assert re.search(
            r"then: \w+Error: .*(an earlier call (failed|stopped between its coll)|which call they make)", said
        ), said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("hook before, in stages", r"what ranks know of their tensors \(call \d+\)"),
        pytest.param("hook after", r"\w+@tp blocks\.\d\S* backward among ranks 0, 1", marks=pytest.mark.slow),
    ],
)
def test_a_hook_of_the_module_that_raises_on_one_rank(tmp_path: Path, how: str, where: str) -> None:
    """The rank lives on, and the other one waits for its next collective, or for its stages: it is told why."""
    other, failed = seen(tmp_path, how)
    assert seconds_and_text(failed)[1] == "MemoryError: no memory left"
    seconds, text = seconds_and_text(other)
    assert seconds < SOON
    assert re.match(rf"CommunicationError: {where}: rank 1 failed: MemoryError: no memory left", text), text
    for said in (other, failed):
        assert re.search(r"then: \w+Error: .*(an earlier call (failed|stopped between)|rank \d failed)", said), said


def test_a_rank_that_is_killed_in_its_backward(tmp_path: Path) -> None:
    """The collective is named by kind, axes, module, phase and ranks."""
    seconds, text = seconds_and_text(seen(tmp_path, "kill in backward")[0])
    assert seconds < SOON
    named = r"CommunicationError: \w+@tp blocks\.\d\S* backward among ranks 0, 1: another rank ended"
    assert re.match(named, text), text


def test_a_rank_that_raises_in_its_forward(tmp_path: Path) -> None:
    """It lives on, and has its own error; the other one waits in a collective and is told why. Another module, whose groups
    are the same, goes on no more than this one."""
    other, failed = seen(tmp_path, "raise")
    assert seconds_and_text(failed)[1] == "MemoryError: no memory left"
    seconds, text = seconds_and_text(other)
    assert seconds < SOON
    assert re.match(rf"CommunicationError: {IN_FORWARD}: rank 1 failed: MemoryError: no", text), text
    disagree, lost = (
        "the ranks disagree on whether an earlier call failed",
        "an earlier call stopped between its collec",
    )
    for said in (other, failed):  # by the agreement, by a look while it is waited for, or since that look failed
        told = re.findall(rf"then: \w+Error: .*({disagree}|{lost})", said)
        assert len(told) == 2, said
        assert told[0] == disagree, said


@pytest.mark.slow_cases("module")
@pytest.mark.parametrize(
    ("how", "what"),
    [
        pytest.param("other module", r"rank \d calls another module than rank \d: every", id="module"),
        ("state", r"rank \d is in (a call|full_state_dict\(\)), and rank \d in (a call|full_state_dict)"),
        pytest.param("other mode", "the ranks disagree on the state of the call", marks=pytest.mark.slow),
        pytest.param("other shape", "the ranks disagree on the shapes and", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_makes_another_call(tmp_path: Path, how: str, what: str) -> None:
    """Calls that repeat the one before are not compared: the other rank waits in a collective, and looks."""
    for said in seen(tmp_path, how):
        seconds, text = seconds_and_text(said)
        assert seconds < SOON
        assert re.search(what, text), text
        assert re.search(r"then: (Communication|RuntimeMismatch)Error", said), said


@pytest.mark.slow
def test_a_stage_that_is_gone(tmp_path: Path) -> None:
    """Its rank is killed in the middle of a schedule."""
    seconds, text = seconds_and_text(seen(tmp_path, "", "pipeline_failure_worker.py")[0])
    assert seconds < SOON
    assert re.match(r"CommunicationError: the messages between stages: another rank ended, was killed", text), text

"""Redistributions on gloo: what the plan says, what the communicator logs and what the kernel counts agree.

Bytes on the wire are those that each process hands to TCP, from the kernel (TCP_INFO), on large enough tensors that
gloo's message headers do not count.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import world

HERE = Path(__file__).parent
RANKS = 4
CASES = [
    line.split('"')[1] for line in (HERE / "redistribution_worker.py").read_text().splitlines() if ": Case(" in line
]
Outcome = dict[str, Any]
with socket.socket() as probe:
    COUNTED = sys.platform == "linux" and len(probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)) >= 216
needs_counts = pytest.mark.skipif(not COUNTED, reason="this kernel does not count the bytes a socket has sent")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """What every rank measured."""
    folder = tmp_path_factory.mktemp("gloo")
    result: list[Outcome] = json.loads(world.start("redistribution_worker.py", RANKS, folder, timeout=240))
    return result


def test_every_kind_of_collective_is_among_the_cases(outcomes: list[Outcome]) -> None:
    kinds = {kind for case in outcomes[0]["cases"].values() for kind, _ in case["planned"]}
    assert kinds == {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"}


@pytest.mark.parametrize("name", CASES)
def test_the_log_is_the_plan(outcomes: list[Outcome], name: str) -> None:
    """Also where sizes do not divide: there both count every chunk as the longest."""
    case = outcomes[0]["cases"][name]
    assert case["logged"] == [[kind, pytest.approx(size)] for kind, size in case["planned"]]


def wire(outcomes: list[Outcome], name: str, phase: int) -> float:
    """Bytes the busiest rank sent (ranks on the diagonal of a permute send none)."""
    return max(rank["cases"][name]["sent"][phase] - rank["idle"] for rank in outcomes)


@needs_counts
@pytest.mark.parametrize("name", [n for n in CASES if "uneven" not in n])
def test_the_wire_is_the_plan(outcomes: list[Outcome], name: str) -> None:
    for phase, predicted in enumerate(outcomes[0]["cases"][name]["predicted"]):
        assert wire(outcomes, name, phase) == pytest.approx(predicted, rel=0.005, abs=500), ("forward", "backward")[
            phase
        ]


@needs_counts
@pytest.mark.parametrize("name", [n for n in CASES if "uneven" in n])
def test_the_plan_bounds_the_wire_where_uneven(outcomes: list[Outcome], name: str) -> None:
    for phase, predicted in enumerate(outcomes[0]["cases"][name]["predicted"]):
        assert 0.9 * predicted <= wire(outcomes, name, phase) <= 1.005 * predicted + 500


@needs_counts
def test_a_wrong_prediction_is_seen(outcomes: list[Outcome]) -> None:
    """Negative control: the bytes of an all-gather are not those of an all-reduce."""
    gather, reduce = (wire(outcomes, name, 0) for name in ("all_gather", "all_reduce"))
    assert gather != pytest.approx(reduce, rel=0.4)

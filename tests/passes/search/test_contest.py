"""Problems of the contest: read from their files, the best so far told and kept, and given when the search is stopped."""

from __future__ import annotations

import gzip
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from search_problems import problem

from autoshard.passes.search import Solution

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from contest import search
from contest.local_search import Neighbourhoods
from contest.problems import Anytime, Problem
from contest.search import solve_within_memory
from contest.subgradient import Core
from copies import Options, Row


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A problem of which the cheapest choice of every node is too much to hold."""
    return written(tmp_path, 60)


def written(tmp_path: Path, nodes: int) -> Path:
    network, memory = problem(8, nodes, limit=20.0)
    costs = [[int(1e18) if math.isinf(v) else int(v) for v in m.ravel()] for *_, m in network.edges]
    path = tmp_path / "problem.json.gz"
    with gzip.open(path, "wt") as text:
        of_nodes = {
            "costs": [v.astype(int).tolist() for v in network.nodes],
            "usages": [u.astype(int).tolist() for u in memory.usage],
            "intervals": [list(life) for life in memory.intervals],
        }
        edges = {"nodes": [[i, j] for i, j, _ in network.edges], "costs": costs}
        json.dump({"problem": {"name": "P", "nodes": of_nodes, "edges": edges, "usage_limit": 20}}, text)
    return path


@pytest.mark.slow
def test_a_file_is_read_and_what_is_found_is_told_and_kept(file: Path, tmp_path: Path) -> None:
    read, network = Problem.read(file), problem(8, nodes=60, limit=20.0)[0]
    assert all(np.array_equal(a, b) for a, b in zip(read.network().nodes, network.nodes, strict=True))
    for (i, j, table), (k, m, expected) in zip(read.network().edges, network.edges, strict=True):
        assert (i, j) == (k, m)
        assert np.array_equal(table, expected)
    told: list[float] = []

    class Listening(Anytime):
        def better(self, cost: float, choice: Callable[[], tuple[int, ...]]) -> None:
            super().better(cost, choice)
            told.append(cost)
            assert read.checked(choice())[0] == cost
            assert read.checked(choice())[1] <= read.limit

    anytime = Listening(time.perf_counter(), tmp_path / "choice.json")
    found = anytime.solve(read.network(), read.memory(), math.inf)
    assert found is not None
    assert told == sorted(told, reverse=True)
    assert len(told) > 1
    assert found.cost == told[-1] == read.checked(found.choice)[0]
    assert read.checked(tuple(json.loads((tmp_path / "choice.json").read_text())))[0] in told


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_search_that_is_stopped_gives_the_best_so_far(file: Path, number: signal.Signals) -> None:
    read, before = Problem.read(file), signal.getsignal(number)

    class Stopping(Anytime):
        def better(self, *args: Any) -> None:
            super().better(*args)
            os.kill(os.getpid(), number)

    found = Stopping(0.0, None).solve(read.network(), read.memory(), math.inf)
    assert isinstance(found, Solution)
    assert not found.exact
    assert read.checked(found.choice) == (found.cost, pytest.approx(20, abs=19))
    assert signal.getsignal(number) is before


@pytest.mark.slow
def test_a_row_of_copies_is_solved_nearly_as_well_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What joins them hides nothing from the messages; without them and windows nothing is that near."""
    one = Problem.read(written(tmp_path, 20))
    best = solve_within_memory(one.network(), one.memory())
    assert best.exact
    text, reference = Row(one, best.choice, Options(copies=20, seams=30, tight=True, shuffled=True)).text()
    path = tmp_path / "row.json"
    path.write_text(json.dumps(text))
    row = Problem.read(path)
    assert row.checked(reference)[0] == 20 * best.cost
    monkeypatch.setattr(search, "MAX_NEIGHBOURHOOD", 399)
    monkeypatch.setattr(search, "NEIGHBOURHOODS", 0)
    monkeypatch.setattr(search, "WINDOWS", (25, 50))
    found = solve_within_memory(row.network(), row.memory())
    assert row.checked(found.choice) == (20 * best.cost, pytest.approx(row.limit, abs=row.limit))
    assert found.lower_bound >= 0.97 * found.cost
    monkeypatch.setattr(Core, "decode", lambda core: (0,) * len(core.sizes))
    monkeypatch.setattr(Neighbourhoods, "aim", lambda *args: None)
    assert solve_within_memory(row.network(), row.memory()).cost > 1.05 * found.cost

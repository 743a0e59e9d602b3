"""Problems of the ASPLOS'25 contest on intra-operator parallelism (iopddl): read, solved with the best at hand, checked."""

from __future__ import annotations

import gzip
import itertools
import json
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import PlanError
from autoshard.passes.search import CostNetwork, Solution
from autoshard.passes.search.exact.solver import solve_plain
from contest.liveness import Memory
from contest.search import solve_within_memory

Array = NDArray[np.float64]
Choice = tuple[int, ...]

FORBIDDEN = 1e17
"""costs from here on forbid a choice; the files have 10^18"""
_NUMBERS = re.compile(rb"\[[-+.eE\d,\s]*\]")
# Of the time that is left after reading: for what the answer takes, and seconds between two lines of progress.
RESERVE = 0.01
OFTEN = 1.0


@dataclass(frozen=True)
class Problem:
    """``lists``: every list of numbers of the file; in ``text``, the rest of it, their numbers stand for them."""

    text: dict[str, Any]
    lists: list[Array]

    @classmethod
    def read(cls, path: Path) -> Problem:
        """Lists of numbers become arrays as they are met, equal ones one: Python's integers take many times as much."""
        lists: list[Array] = []
        known: dict[bytes, bytes] = {}

        def number(match: re.Match[bytes]) -> bytes:
            found = match.group()
            if found not in known:
                known[found] = b"%d" % len(lists)
                lists.append(np.fromstring(found[1:-1].decode(), sep=","))
            return known[found]

        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            text = _NUMBERS.sub(number, file.read())
        return cls(json.loads(text)["problem"], lists)

    def of(self, part: str, name: str) -> list[Array]:
        return [self.lists[k] for k in self.text[part].get(name, [])]

    @cached_property
    def intervals(self) -> tuple[tuple[int, int], ...]:
        return tuple((int(start), int(end)) for start, end in self.of("nodes", "intervals"))

    @property
    def limit(self) -> int:
        limit: int = self.text["usage_limit"]
        return limit

    def network(self) -> CostNetwork:
        known: dict[tuple[int, tuple[int, ...]], Array] = {}

        def costs(number: int, *shape: int) -> Array:
            if (number, shape) not in known:
                array = self.lists[number].reshape(shape)
                known[number, shape] = np.where(array >= FORBIDDEN, np.inf, array)
            return known[number, shape]

        nodes = tuple(costs(k, -1) for k in self.text["nodes"]["costs"])
        pairs = [(int(i), int(j)) for i, j in self.of("edges", "nodes")]
        edges = zip(pairs, self.text["edges"]["costs"], strict=True)
        return CostNetwork(nodes, tuple((i, j, costs(k, nodes[i].size, nodes[j].size)) for (i, j), k in edges))

    def memory(self) -> Memory:
        return Memory(tuple(self.of("nodes", "usages")), self.limit, self.intervals)

    def checked(self, choice: Choice) -> tuple[int, int]:
        """(cost, most that is held at any time) by the file alone, in Python's integers."""
        costs = self.of("nodes", "costs")
        total = sum(int(c[s]) for c, s in zip(costs, choice, strict=True))
        for pair, table in zip(self.of("edges", "nodes"), self.of("edges", "costs"), strict=True):
            i, j = map(int, pair)
            total += int(table[choice[i] * costs[j].size + choice[j]])
        change: dict[int, int] = {}
        for (start, end), usage, s in zip(self.intervals, self.of("nodes", "usages"), choice, strict=True):
            if start < end:
                change[start] = change.get(start, 0) + int(usage[s])
                change[end] = change.get(end, 0) - int(usage[s])
        return total, max(itertools.accumulate(change[t] for t in sorted(change)), default=0)


class Stopped(BaseException):
    """SIGINT or SIGTERM."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped


@dataclass
class Anytime:
    """The best choice so far: told on stderr, and written to ``out``, whenever it is better."""

    begin: float
    out: Path | None
    cost: float = float("inf")
    choice: Callable[[], Choice] | None = None
    told: float = field(default=-float("inf"))

    def better(self, cost: float, choice: Callable[[], Choice]) -> None:
        self.cost, self.choice = cost, choice
        if time.perf_counter() - self.told > OFTEN:
            self.told = time.perf_counter()
            print(f"{self.told - self.begin:8.1f} s: cost {cost:.12g}", file=sys.stderr, flush=True)
            self.write(choice())

    def write(self, choice: Choice) -> None:
        """Whole, whatever happens meanwhile."""
        if self.out is not None:
            beside = self.out.with_name(self.out.name + ".new")
            beside.write_text(json.dumps(choice))
            beside.replace(self.out)

    def solve(self, network: CostNetwork, memory: Memory | None, time_limit: float) -> Solution | None:
        """None: nothing was found. SIGINT and SIGTERM end the search with what is there."""
        handlers = [(number, signal.signal(number, _stop)) for number in (signal.SIGINT, signal.SIGTERM)]
        left = self.begin + time_limit - time.perf_counter()
        try:
            left *= 1 - RESERVE
            if memory is None:
                return solve_plain(network, deadline=time.perf_counter() + left)
            return solve_within_memory(network, memory, left, better=self.better)
        except PlanError as error:
            print(f"  {error}")
            return None
        except Stopped:
            for number, _ in handlers:  # what follows is short
                signal.signal(number, signal.SIG_IGN)
            print("stopped", file=sys.stderr)
            if self.choice is None:
                return None
            return Solution(self.choice(), self.cost, -float("inf"), False)
        finally:
            for number, handler in handlers:
                signal.signal(number, handler)

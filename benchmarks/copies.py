"""Large problems of the contest's kind whose best cost is known or nearly: copies of one problem in a row.

Edges join every copy to the next. They cost nothing where both choose as the reference does, and otherwise what some edges of
the problem cost, so that k times the best cost stays the best. Copies live one after the other, or overlap.

python benchmarks/copies.py path/to/B.json.gz B.choice.json B20.json.gz --copies 20
python benchmarks/search.py iopddl B20.json.gz --time-limit 60
"""

from __future__ import annotations

import argparse
import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from contest.problems import Choice, Problem

FORBIDDEN = 10**18


@dataclass(frozen=True)
class Options:
    """``overlap``: the part of a copy's time in which the next one lives already; ``tight``: the limit is what the reference
    holds at most; ``shuffled``: nodes, edges and strategies are numbered at random; ``seams``: edges between two copies."""

    copies: int = 20
    seams: int = 8
    overlap: float = 0.0
    tight: bool = False
    shuffled: bool = False
    seed: int = 0


class Row:
    """Copies of ``problem`` in a row. ``choice``: one of its best."""

    def __init__(self, problem: Problem, choice: Choice, options: Options) -> None:
        self.problem, self.options = problem, options
        self.generator = np.random.default_rng(options.seed)
        self.costs = [c.astype(np.int64) for c in problem.of("nodes", "costs")]
        self.usages = [u.astype(np.int64) for u in problem.of("nodes", "usages")]
        self.pairs = [tuple(map(int, pair)) for pair in problem.of("edges", "nodes")]
        self.tables = [t.astype(np.int64) for t in problem.of("edges", "costs")]
        self.choice, self.size = choice, len(self.costs)

    def text(self) -> tuple[dict[str, Any], Choice]:
        """(what a file of the contest holds, the reference)."""
        options, size = self.options, self.size
        lives = np.array(self.problem.intervals)
        step = int(np.ceil((1 - options.overlap) * lives.max()))
        nodes = options.copies * size
        intervals = [(lives + copy * step).tolist() for copy in range(options.copies)]
        edges = [(i + copy * size, j + copy * size, t) for copy in range(options.copies) for (i, j), t in self._edges()]
        edges += [edge for copy in range(options.copies - 1) for edge in self._seam(copy)]
        costs, usages = self.costs * options.copies, self.usages * options.copies
        lives_of, choice = [life for copy in intervals for life in copy], list(self.choice) * options.copies
        if options.shuffled:
            numbers = self.generator.permutation(nodes)
            orders = [self.generator.permutation(len(c)) for c in costs]
            edges = [(i, j, t.reshape(len(costs[i]), -1)[np.ix_(orders[i], orders[j])].ravel()) for i, j, t in edges]
            edges = [(int(numbers[i]), int(numbers[j]), t) for i, j, t in edges]
            edges = [edges[k] for k in self.generator.permutation(len(edges))]
            back = np.argsort(numbers).tolist()
            choice = [int(np.flatnonzero(orders[k] == choice[k])[0]) for k in back]
            costs, usages = [costs[k][orders[k]] for k in back], [usages[k][orders[k]] for k in back]
            lives_of = [lives_of[k] for k in back]
        limit = most(lives_of, usages, choice)
        limit = limit if options.tight or options.overlap else max(limit, self.problem.limit)
        text = {
            "name": f"{options.copies} copies",
            "nodes": {
                "intervals": lives_of,
                "costs": [c.tolist() for c in costs],
                "usages": [u.tolist() for u in usages],
            },
            "edges": {"nodes": [[i, j] for i, j, _ in edges], "costs": [t.tolist() for *_, t in edges]},
            "usage_limit": limit,
        }
        return {"problem": text}, tuple(choice)

    def _edges(self) -> list[tuple[tuple[int, ...], np.ndarray]]:
        return list(zip(self.pairs, self.tables, strict=True))

    def _seam(self, copy: int) -> list[tuple[int, int, np.ndarray]]:
        """Edges from nodes of a copy's second half to some of the next one's first, the last of them to be born."""
        many = [node for node, costs in enumerate(self.costs) if len(costs) > 1]
        late, early = many[len(many) // 2 :], many[: len(many) // 2]
        values = np.concatenate([t for t in self.tables if len(t) > 1])
        edges = []
        for _ in range(self.options.seams):
            i, j = (int(self.generator.choice(among)) for among in (late, early))
            table = self.generator.choice(values, (len(self.costs[i]), len(self.costs[j])))
            table[self.choice[i]] = self.generator.choice(values[values < FORBIDDEN], table.shape[1])
            table[self.choice[i], self.choice[j]] = 0
            edges.append((copy * self.size + i, (copy + 1) * self.size + j, table.ravel()))
        return edges


def most(lives: list[list[int]], usages: list[np.ndarray], choice: list[int]) -> int:
    """The most that is held at any time."""
    change: dict[int, int] = {}
    for (start, end), usage, s in zip(lives, usages, choice, strict=True):
        if start < end:
            change[start] = change.get(start, 0) + int(usage[s])
            change[end] = change.get(end, 0) - int(usage[s])
    return int(np.cumsum([change[t] for t in sorted(change)]).max(initial=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem", type=Path)
    parser.add_argument("choice", type=Path, help="a best choice of it, as search.py --out keeps it")
    parser.add_argument("out", type=Path)
    parser.add_argument("--copies", type=int, default=Options.copies)
    parser.add_argument("--seams", type=int, default=Options.seams)
    parser.add_argument("--overlap", type=float, default=Options.overlap)
    parser.add_argument("--tight", action="store_true")
    parser.add_argument("--shuffled", action="store_true")
    parser.add_argument("--seed", type=int, default=Options.seed)
    given = vars(parser.parse_args())
    paths = [given.pop(name) for name in ("problem", "choice", "out")]
    text, choice = Row(Problem.read(paths[0]), tuple(json.loads(paths[1].read_text())), Options(**given)).text()
    with gzip.open(paths[2], "wt", compresslevel=1) as file:
        json.dump(text, file)
    cost, held = Problem.read(paths[2]).checked(choice)
    print(
        f"{paths[2]}: {len(choice)} nodes, the reference costs {cost} and holds {held} of {text['problem']['usage_limit']}"
    )


if __name__ == "__main__":
    main()

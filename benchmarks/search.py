"""How fast the search is: a synthetic Llama of any depth and mesh, and instances of the ASPLOS'25 contest (iopddl).

python benchmarks/search.py llama --layers 32 --mesh 4,8
python benchmarks/search.py iopddl path/to/B.json.gz --time-limit 60
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from contest.problems import Anytime, Problem
from numpy.typing import NDArray

from autoshard.passes.search import CostNetwork, LinearRow, Solution, solve

Array = NDArray[np.float64]
Placements = tuple[str, ...]  # one per mesh axis: "I", "R", "P" or the digit of the sharded tensor dim

LATENCY, BANDWIDTH, FLOPS, MEMORY_BANDWIDTH = 1e-5, 5e10, 4e14, 2e12  # s, bytes/s, 1/s, bytes/s
HIDING = 0.8  # the part of the compute that communication can hide behind


class Llama:
    """Builds the cost network of a Llama: an op is a node, a use of a value an edge, a parameter a node of degree 1.

    Strategies of an op along one mesh axis: all I, all R, P through its first operand where linear, and every factor
    of its spec ("b s k, n k -> b s n"; upper-case factors stay whole). On the mesh they combine freely.
    """

    def __init__(self, mesh: tuple[int, ...], batch: int = 8, sequence: int = 4096) -> None:
        self.mesh = mesh
        self.sizes = {"b": batch, "s": sequence, "t": sequence, "d": 4096, "D": 4096, "n": 4096, "k": 4096, "m": 1024}
        self.sizes |= {"h": 32, "g": 8, "E": 128, "f": 14336, "v": 128256, "T": sequence, "O": 1}
        self.nodes: list[Array] = []
        self.edges: list[tuple[int, int, Array]] = []
        self.layouts: list[tuple[Placements, ...]] = []  # of every node's result, per strategy
        self.bytes: list[float] = []
        self.held: list[Array] = []  # bytes: an op keeps its result for the backward pass, a parameter has an optimizer
        self.parameters: set[int] = set()
        self.uses: list[tuple[int, tuple[Placements, ...]]] = []  # of every edge: the source, the layouts wanted
        self._memo: dict[tuple[object, ...], Array] = {}

    def numel(self, term: str) -> float:
        return math.prod(self.sizes[factor] for factor in term.split())

    def axis_strategies(self, spec: str, linear: bool) -> list[tuple[str, ...]]:
        """Placements of (inputs…, output) along one axis."""
        left, right = spec.split("->")
        terms = [term.split() for term in (*left.split(","), right) if term.split()]
        found = [("I",) * len(terms), ("R",) * len(terms)]
        if linear:
            found.append(("P", *("R",) * (len(terms) - 2), "P"))
        for factor in dict.fromkeys(f for term in terms for f in term if f.islower()):
            placements = [str(term.index(factor)) if factor in term else "R" for term in terms]
            if factor not in terms[-1]:
                placements[-1] = "P"
            found.append(tuple(placements))
        return found

    def op(self, inputs: list[int], spec: str, *, linear: bool = False, matmul: bool = False) -> int:
        """A node whose operands are ``inputs``; returns its number."""
        key = ("op", spec, linear, matmul)
        left, right = spec.split("->")
        terms = [t for t in left.split(",") if t.strip()]
        strategies = list(itertools.product(self.axis_strategies(spec, linear), repeat=len(self.mesh)))
        if key not in self._memo:
            factors = set(spec.replace(",", " ").replace("->", " ").split())
            work = 6 * math.prod(self.sizes[f] for f in factors) / FLOPS if matmul else 0.0
            work += 6 * sum(map(self.numel, (*terms, right))) / MEMORY_BANDWIDTH
            ways = [
                math.prod(n for n, s in zip(self.mesh, strategy, strict=True) if any(p.isdigit() for p in s))
                for strategy in strategies
            ]
            self._memo[key] = np.array([work / way for way in ways])
        node = self.add(self._memo[key], tuple(tuple(s[-1] for s in strategy) for strategy in strategies), right)
        for i, source in enumerate(inputs):
            wanted = tuple(tuple(s[i] for s in strategy) for strategy in strategies)
            self.edges.append((source, node, self.edge(self.layouts[source], wanted, self.bytes[source])))
            self.uses.append((source, wanted))
        return node

    def add(self, costs: Array, layouts: tuple[Placements, ...], term: str, parameter: bool = False) -> int:
        self.nodes.append(costs)
        self.layouts.append(layouts)
        self.bytes.append(2 * self.numel(term))
        self.held.append(self.local_bytes(layouts, term, self.bytes[-1] * (8 if parameter else 1)))
        return len(self.nodes) - 1

    def local_bytes(self, layouts: tuple[Placements, ...], term: str, size: float) -> Array:
        key = ("held", layouts, size)
        if key not in self._memo:
            ways = [math.prod(n for n, p in zip(self.mesh, x, strict=True) if p.isdigit()) for x in layouts]
            self._memo[key] = np.array([size / way for way in ways])
        return self._memo[key]

    def parameter(self, term: str) -> int:
        """I, or cut along one of its dims, per axis; what is held costs the optimizer's reading and writing."""
        options = ["I"] + [str(i) for i in range(len(term.split()))]
        layouts = tuple(itertools.product(options, repeat=len(self.mesh)))
        key = ("parameter", term)
        if key not in self._memo:
            ways = [math.prod(n for n, p in zip(self.mesh, x, strict=True) if p != "I") for x in layouts]
            self._memo[key] = np.array([24 * self.numel(term) / way / MEMORY_BANDWIDTH for way in ways])
        self.parameters.add(len(self.nodes))
        return self.add(self._memo[key], layouts, term, parameter=True)

    def edge(
        self, have: tuple[Placements, ...], want: tuple[Placements, ...], size: float, only: int | None = None
    ) -> Array:
        """Seconds to redistribute, forward and backward, axis by axis; ``only``: on this axis."""
        key = ("edge", have, want, size, only)
        if key not in self._memo:
            rows, columns = list(dict.fromkeys(have)), list(dict.fromkeys(want))
            axes = range(len(self.mesh)) if only is None else (only,)
            small = np.array([[self.redistribute(a, b, size, axes) for b in columns] for a in rows])
            self._memo[key] = small[np.ix_([rows.index(a) for a in have], [columns.index(b) for b in want])]
        return self._memo[key]

    def redistribute(self, have: Placements, want: Placements, size: float, axes: Iterable[int]) -> float:
        seconds = 0.0
        for axis in axes:
            n = self.mesh[axis]
            local = size / math.prod(m for k, m in enumerate(self.mesh) if k != axis and have[k].isdigit())
            a, b = ("S" if p.isdigit() else p for p in (have[axis], want[axis]))
            rounds = {"IR": 2, "SI": 1, "SR": 2, "IS": 1, "PI": 2, "PR": 4, "PS": 2}.get(a + b, 0)
            if a == b == "S" and have[axis] != want[axis]:
                rounds = 2 / n
            if rounds:
                seconds += LATENCY + rounds * (n - 1) / n * local / BANDWIDTH
        return seconds

    def norm(self, x: int) -> int:
        square = self.op([x], "b s D -> b s D")
        mean = self.op([square], "b s D -> b s O")
        root = self.op([self.op([mean], "b s O -> b s O")], "b s O -> b s O")
        scaled = self.op([x, root], "b s d, b s O -> b s d", linear=True)
        return self.op([scaled, self.parameter("d")], "b s d, d -> b s d", linear=True)

    def rope(self, x: int, cos: int, sin: int, heads: str) -> int:
        same = f"b {heads} s E -> b {heads} s E"
        both = f"b {heads} s E, b {heads} s E -> b {heads} s E"
        plain = self.op([x, cos], f"b {heads} s E, b s E -> b {heads} s E", linear=True)
        first, second = self.op([x], same, linear=True), self.op([x], same, linear=True)
        turned = self.op([self.op([second], same, linear=True), first], both)
        return self.op([plain, self.op([turned, sin], f"b {heads} s E, b s E -> b {heads} s E", linear=True)], both)

    def layer(self, x: int, cos: int, sin: int, mask: int) -> int:
        h = self.norm(x)
        heads = []
        for width, letter in (("n", "h"), ("m", "g"), ("m", "g")):
            flat = self.op([h, self.parameter(f"{width} d")], f"b s d, {width} d -> b s {width}", matmul=True)
            split = self.op([flat], f"b s {letter} -> b s {letter} E", linear=True)
            heads.append(self.op([split], f"b s {letter} E -> b {letter} s E", linear=True))
        q, k = self.rope(heads[0], cos, sin, "h"), self.rope(heads[1], cos, sin, "g")
        k, v = (self.op([y], "b g t E -> b g t E", linear=True) for y in (k, heads[2]))
        k, v = (self.op([y], "b h t E -> b h t E", linear=True) for y in (k, v))
        y = self.op([q, k, v, mask], "b h s E, b h T E, b h T E, b s T -> b h s E", matmul=True)
        y = self.op([self.op([y], "b h s E -> b s h E", linear=True)], "b s h E -> b s h", linear=True)
        y = self.op([y, self.parameter("d k")], "b s k, d k -> b s d", matmul=True)
        x = self.op([x, y], "b s d, b s d -> b s d")
        h = self.norm(x)
        gate = self.op([h, self.parameter("f d")], "b s d, f d -> b s f", matmul=True)
        up = self.op([h, self.parameter("f d")], "b s d, f d -> b s f", matmul=True)
        y = self.op([self.op([gate], "b s f -> b s f"), up], "b s f, b s f -> b s f", linear=True)
        y = self.op([y, self.parameter("d f")], "b s f, d f -> b s d", matmul=True)
        return self.op([x, y], "b s d, b s d -> b s d")

    def build(self, layers: int) -> CostNetwork:
        tokens = self.parameter("b s")
        cos, sin = (self.op([self.op([tokens], "b s -> b s E")], "b s E -> b s E") for _ in range(2))
        mask = self.op([tokens], "b s -> b s T")
        x = self.op([tokens, self.parameter("v d")], "b s, v d -> b s d")
        for _ in range(layers):
            x = self.layer(x, cos, sin, mask)
        logits = self.op([self.norm(x), self.parameter("v d")], "b s d, v d -> b s v", matmul=True)
        self.op([logits], "b s v -> O")
        return CostNetwork(tuple(self.nodes), tuple(self.edges))

    def rows(self, network: CostNetwork, memory: float) -> tuple[CostNetwork, tuple[LinearRow, ...]]:
        """Parameters' traffic hides behind ``HIDING`` of the compute, one link per axis; ``memory``: bytes, a hard limit."""
        zeros, hiding, rows = {}, {}, []
        for vector in network.nodes:
            hiding.setdefault(id(vector), -HIDING * vector)
        for _, _, matrix in network.edges:
            zeros.setdefault(id(matrix), np.zeros(matrix.shape))
        movable = [source in self.parameters for source, _ in self.uses]
        edges = tuple(
            (i, j, zeros[id(m)] if moves else m) for moves, (i, j, m) in zip(movable, network.edges, strict=True)
        )
        for axis in range(len(self.mesh)):
            traffic = tuple(
                self.edge(self.layouts[source], wanted, self.bytes[source], axis) if moves else None
                for moves, (source, wanted) in zip(movable, self.uses, strict=True)
            )
            rows.append(LinearRow(tuple(hiding[id(vector)] for vector in network.nodes), traffic, 0.0, 1.0))
        rows.append(LinearRow(tuple(self.held), (None,) * len(edges), memory))
        return CostNetwork(network.nodes, edges), tuple(rows)


def report(name: str, network: CostNetwork, solution: Solution, seconds: float, used: float) -> None:
    sizes = [vector.size for vector in network.nodes]
    print(
        f"{name}: {len(sizes)} nodes of up to {max(sizes)} strategies, {len(network.edges)} edges\n"
        f"  cost {solution.cost:.9g}, lower bound {solution.lower_bound:.9g}, exact {solution.exact}\n"
        f"  {seconds:.2f} s, of CPU {used:.2f} s\n"
        f"  {solution.stats}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    llama = commands.add_parser("llama", help="a synthetic Llama-3-8B")
    llama.add_argument("--layers", type=int, default=32)
    llama.add_argument(
        "--memory",
        type=float,
        help="limit on what the strategies hold in sum, GiB per rank; then traffic of parameters hides behind compute",
    )
    llama.add_argument("--mesh", default="4,8", help="sizes of the mesh axes")
    contest = commands.add_parser("iopddl", help="a contest instance, with its memory limit")
    contest.add_argument("path", type=Path)
    contest.add_argument("--no-memory", action="store_true", help="ignore the memory limit")
    contest.add_argument("--time-limit", type=float, default=60.0)
    contest.add_argument("--out", type=Path, help="keep the best choice so far in this file, as a JSON list")
    options = parser.parse_args()
    (llama_of if options.command == "llama" else contest_of)(options)


def llama_of(options: argparse.Namespace) -> None:
    mesh = tuple(map(int, options.mesh.split(",")))
    model = Llama(mesh)
    network, rows = model.build(options.layers), ()
    if options.memory:
        network, rows = model.rows(network, options.memory * 2**30)
    start, used = time.perf_counter(), time.process_time()
    solution = solve(network, rows=rows)
    seconds = time.perf_counter() - start, time.process_time() - used
    report(f"llama, {options.layers} layers, mesh {mesh}", network, solution, *seconds)


def contest_of(options: argparse.Namespace) -> None:
    """The time limit is that of everything: reading, searching, writing."""
    start, used = time.perf_counter(), time.process_time()
    problem = Problem.read(options.path)
    network, memory = problem.network(), None if options.no_memory else problem.memory()
    print(f"  read in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    anytime = Anytime(start, options.out)
    solution = anytime.solve(network, memory, options.time_limit)
    if solution is None:
        sys.exit(f"{options.path.name}: no choice was found in {time.perf_counter() - start:.2f} s")
    anytime.write(solution.choice)
    report(options.path.name, network, solution, time.perf_counter() - start, time.process_time() - used)
    cost, held = problem.checked(solution.choice)
    print(f"  by the file: cost {cost}, at most {held} held" + (f" of {problem.limit}" if memory else ""))


if __name__ == "__main__":
    main()

"""Runner-up strategies per operation and the seconds that each would add (sensitivity)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, overload

import numpy as np

from autoshard.layout import I, Owned, R, Shard
from autoshard.passes.ir.assignment import Assignment, Placements
from autoshard.passes.ir.graph import Node
from autoshard.passes.propagate.edges import conversion_parts
from autoshard.passes.propagate.exchanges import Exchanges, exchanges
from autoshard.passes.propagate.links import paid, readings, unspared
from autoshard.passes.propagate.objective import objective, wanted
from autoshard.passes.propagate.op_space import OpSpace, OpSpaces
from autoshard.passes.propagate.prices.bucketed import EachShares, latency_shares
from autoshard.passes.propagate.prices.joined import joins, saved
from autoshard.passes.propagate.prices.step_time import Parts, movable_values
from autoshard.passes.propagate.prices.travelling import NONE, Beside, beside
from autoshard.passes.propagate.prices.waiting import update_seconds
from autoshard.passes.propagate.prices.zero import stages_of
from autoshard.passes.redistribute.pricing import Shares

Alternative = tuple[tuple[str, ...], float]
"""(a label per mesh axis, seconds more per step)"""


class Later(Sequence[Alternative]):
    """Lazy alternatives: finding them takes as long as the search, and most are never read."""

    def __init__(self, find: Callable[[], Sequence[Alternative]]) -> None:
        self._find = find

    @cached_property
    def found(self) -> tuple[Alternative, ...]:
        return tuple(self._find())

    @overload
    def __getitem__(self, index: int) -> Alternative: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Alternative, ...]: ...
    def __getitem__(self, index: int | slice) -> Alternative | tuple[Alternative, ...]:
        return self.found[index]

    def __len__(self) -> int:
        return len(self.found)

    def __eq__(self, other: object) -> bool:
        return self.found == (other.found if isinstance(other, Later) else other)

    def __hash__(self) -> int:
        return hash(self.found)

    def __repr__(self) -> str:
        return repr(self.found)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self.found,)


def alternatives(assignment: Assignment, limit: int = 3, optimizer: str = "adamw") -> dict[str, Later]:
    """Node → ``limit`` cheapest other strategies, and the cheapest that shards each idle axis.

    Seconds: change of the objective if this operation and redistributions around it change, all
    else fixed (an owned table follows its reader). An upper bound, as a search could adapt
    neighbours. Never negative in an optimal plan.
    """
    one = _Alternatives(assignment, limit, optimizer)
    return {node.name: Later(partial(one.of, node)) for node in assignment.graph.nodes}


class _Alternatives:
    def __init__(self, assignment: Assignment, limit: int, optimizer: str) -> None:
        self.assignment, self.limit, self.optimizer = assignment, limit, optimizer
        self.graph, self.mesh = assignment.graph, assignment.mesh
        self.known: dict[Any, tuple[Alternative, ...]] = {}

    @cached_property
    def spaces(self) -> OpSpaces:
        return OpSpaces(self.graph, self.mesh)

    @cached_property
    def total(self) -> Parts:
        return objective(self.assignment, self.optimizer).parts

    @cached_property
    def targets(self) -> Mapping[str, Sequence[Placements]]:
        return wanted(self.assignment) | {n: [x.placements] for n, x in self.assignment.shared.items()}

    @cached_property
    def movable(self) -> frozenset[str]:
        return movable_values(self.graph)

    @cached_property
    def shares(self) -> EachShares:
        return latency_shares(self.graph, self.mesh)

    @cached_property
    def products(self) -> Mapping[str, Beside]:
        return beside(self.graph, self.mesh)

    @cached_property
    def joined(self) -> Mapping[str, list[tuple[Node, tuple[str, ...]]]]:
        """Readers and producers of coalesced look-up results → (reader, values)."""
        found: dict[str, list[tuple[Node, tuple[str, ...]]]] = {}
        for reader, values in joins(self.graph, self.mesh):
            for name in dict.fromkeys((reader.name, *(self.graph.producers[n].name for n in values))):
                found.setdefault(name, []).append((reader, values))
        return found

    @cached_property
    def calls(self) -> Mapping[str, Exchanges]:
        """Look-up → pricing of the group that shares its all-to-all."""
        found = exchanges(self.graph, self.mesh, self.optimizer)
        return {node.name: together for together in found for node in together.nodes}

    @cached_property
    def stages(self) -> Mapping[str, int]:
        return stages_of(self.graph, self.assignment.zero)

    def of(self, node: Node) -> tuple[Alternative, ...]:
        space, labels = self.spaces[node], _labels(self.assignment.choices[node.name])
        current = next((i for i, choice in enumerate(space.choices) if _labels(choice) == labels), None)
        if current is None or len(space.choices) < 2:
            return ()
        sources = {name: self.assignment.source(name).placements for name in node.inputs}
        targets = tuple(tuple(self.targets[name]) for name in node.outputs)
        owned = tuple(self._terms(name) for name in (*node.inputs, *node.outputs))
        key = (id(space), current, *((sources[n], self._follows(n)) for n in node.inputs), targets, owned)
        alone = node.name not in self.joined and node.name not in self.calls
        key = key if alone else (*key, node.name)
        if key not in self.known:
            parts = space.parts
            for _, name, placed, mask, spared, _ in readings(node, space):
                parts += paid(self._read(name, placed), mask)
                if spared is not None:
                    parts += Parts(blocking=unspared(spared, [sources[name]])[0])
            for name, asked, placed in zip(node.outputs, targets, space.outputs, strict=True):
                for target in asked:
                    parts += self._parts(name, placed, [target])[:, 0]
            if node.name in self.joined:
                parts += Parts(blocking=-self._together(node, space))
            if node.name in self.calls:
                parts += self._on_top(node, space)
            others = self.total + (parts - parts[current])
            self.known[key] = self._best(space, self._step(others) - self._step(self.total), current)
        return self.known[key]

    def _together(self, node: Node, space: OpSpace) -> np.ndarray:
        """Seconds saved by coalesced look-up results, per choice of a producer or reader."""
        found = np.zeros(len(space.choices))
        for reader, values in self.joined.get(node.name, ()):
            places = [(i, name) for i, name in enumerate(reader.inputs) if name in values]
            for choice in range(len(found)):
                lies = {n: self.assignment.source(n).placements for _, n in places}
                if reader is not node:
                    made = zip(node.outputs, space.outputs, strict=True)
                    lies |= {n: x[choice] for n, x in made if n in lies and n not in self.assignment.shared}
                    read = [self.assignment.use(reader, i) for i, _ in places]
                else:
                    read = [space.inputs[i][choice] for i, _ in places]
                moves = ((n, lies[n], placed) for (_, n), placed in zip(places, read, strict=True))
                found[choice] += saved(self.graph, self.mesh, moves)
        return found

    def _on_top(self, node: Node, space: OpSpace) -> Parts:
        """Seconds on top of look-up prices in the group of ``node``, per choice of ``node``."""
        found = self.calls[node.name]
        each, at = found.chosen(self.assignment), found.nodes.index(node)
        own = (found.on_top([*each[:at], x, *each[at + 1 :]]) for x in found.of_choices(node, space))
        latency, update = np.array(list(own)).T
        return Parts(blocking=latency, once=update)

    def _step(self, parts: Parts) -> Any:
        return parts.step(self.mesh.overlap, self.graph.passes)

    def _parts(
        self, name: str, sources: Sequence[Placements], targets: Sequence[Placements], first: bool = True
    ) -> Parts:
        """``first``: whether sources are layouts of the definition, not of the shared layout."""
        stage, movable, share, products = self._terms(name)
        terms = stage, movable, share, products if first else NONE, self.graph.passes
        return conversion_parts(self.graph.types[name], self.mesh, sources, targets, *terms)

    def _read(self, name: str, placed: Sequence[Placements]) -> Parts:
        """Seconds to convert an operand to each layout; an owned table is stored as read."""
        if not self._follows(name):
            source = self.assignment.source(name).placements
            return self._parts(name, [source], placed, name not in self.assignment.shared)[0]
        type_ = self.graph.types[name]
        whole = I if type_.grad else R
        stored = [tuple(p if isinstance(p, Shard | Owned) else whole for p in x) for x in placed]
        read = self._parts(name, stored, placed)
        update = [update_seconds(self.optimizer, type_, x, self.graph, self.mesh) for x in stored]
        return Parts(*(x.diagonal() if x.ndim else x for x in read)) + Parts(once=np.array(update))

    def _follows(self, name: str) -> bool:
        """Whether it is stored as read: an owned table with one reader has no conversions."""
        owned = any(isinstance(p, Owned) for p in self.assignment.source(name).placements)
        return owned and name not in self.assignment.shared

    def _terms(self, name: str) -> tuple[int | None, bool, Shares, Beside]:
        """(ZeRO stage, whether movable, latency shares, products of a collective matmul)."""
        products = self.products.get(name, NONE)
        return self.stages.get(name), name in self.movable, self.shares[name], products

    def _best(self, space: OpSpace, extra: np.ndarray, current: int) -> tuple[Alternative, ...]:
        order = [int(i) for i in np.argsort(extra, kind="stable") if i != current and math.isfinite(extra[i])]
        kept = order[: self.limit]
        for axis, size in enumerate(self.mesh.shape):
            if size > 1 and not space.choices[current][axis].divides:
                kept += [i for i in order if space.choices[i][axis].divides][:1]
        return tuple((_labels(space.choices[i]), float(extra[i])) for i in sorted(set(kept), key=order.index))


def _labels(choice: Sequence[Any]) -> tuple[str, ...]:
    return tuple(s.label for s in choice)


def cheapest_use(found: Mapping[str, Sequence[Alternative]], axis: int) -> tuple[str, float] | None:
    """(node that mesh axis ``axis`` could shard at the least extra cost, extra seconds)."""
    candidates = (
        (seconds, name) for name, others in found.items() for labels, seconds in others if divides(labels[axis])
    )
    best = min(candidates, default=None)
    return None if best is None else (best[1], best[0])


def divides(label: str) -> bool:
    """Whether a strategy with this label shards a factor: it is not I, R or P(…)."""
    return label not in ("I", "R") and not label.startswith("P(")

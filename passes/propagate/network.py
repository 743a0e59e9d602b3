"""The cost network of a graph: one variable per choice, tables of seconds between them.

Variables: an operation's strategy (one per mesh axis, combined), an input's layout, and the
*shared* layout from which several readers of a value convert. So one redistribution serves
readers of equal layout, and the network stays pairwise. Costs are seconds: an operation's compute
on local shapes, forward and backward, and the redistribution along an edge. Redistributions of
parameters overlap with compute (:mod:`.prices.overlap`). With a memory limit variables have tags
(:mod:`.activation_memory`), and tables of bytes stand beside those of seconds.

Variables in the same place of repeated modules have one label, so that the search may tie their
choices."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from autoshard.layout import I, Layout, Placement, R
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Placements, input_layout
from autoshard.passes.ir.graph import Graph, Node, Ref
from autoshard.passes.ir.memory import optimizer_bytes
from autoshard.passes.ir.text import block_path
from autoshard.passes.propagate.activation_memory import (
    RECONVERTED,
    EdgeSide,
    SavedTensorTables,
    is_memory_view,
    nodes_after_blocks,
    passive_tags,
)
from autoshard.passes.propagate.edges import EdgeTables, ValueEdge, operand_reads
from autoshard.passes.propagate.embedding_tables import exchange_pricings
from autoshard.passes.propagate.hints import Constraint, DimLimit, candidate_placements, fixed_placements, free_buffers
from autoshard.passes.propagate.op_space import OpSpace, OpSpaces
from autoshard.passes.propagate.prices import roofline as costs
from autoshard.passes.propagate.prices.collective_overheads import update_seconds
from autoshard.passes.propagate.prices.overlap import (
    StepParts,
    StepTables,
    network_of_steps,
    sum_of_terms,
    tables_of_step,
)
from autoshard.passes.propagate.recompute import RecomputeOffer
from autoshard.passes.rules.facts import can_redraw
from autoshard.passes.search import CostNetwork, LinearRow
from autoshard.passes.search.arrays import CompactMatrix


@lru_cache(maxsize=4096)
def _block_kind(block: str) -> str:
    """A block's path without its number."""
    return re.sub(r"\d+$", "", block)


def repetition_labels(graph: Graph, variables: Iterable[str]) -> tuple[Hashable | None, ...]:
    """Per variable its place in its block, without the block's number; None: outside all blocks. Of
    an operation: how many precede it; of a parameter: its name. Blocks of equal labels may
    differ."""
    places: dict[str, Hashable] = {}
    counts: Counter[str] = Counter()
    for node in graph.nodes:
        block = block_path(node.fqn)
        if block:
            kind, number = _block_kind(block), counts[block]
            counts[block] += 1
            places[f"node:{node.name}"] = kind, number
            places.update((f"shared:{name}", (kind, number, slot)) for slot, name in enumerate(node.outputs))
    for value in graph.inputs:
        if value.kind == "parameter" and (block := block_path(value.fqn)):
            place = _block_kind(block), value.fqn.removeprefix(block)
            places[value.name], places[f"shared:{value.name}"] = place, ("shared", *place)
    return tuple(places.get(name) for name in variables)


def _read_by(variable: str, side: EdgeSide, *terms: Any) -> ValueEdge:
    """The edge of a reader, whose source is not known yet."""
    return ValueEdge("", side, variable, side, "", *terms)


@dataclass(frozen=True, eq=False)
class NetworkVariable:
    """A choice of the network. State number = place of its tag × number of choices + choice."""

    choices: tuple[Any, ...]
    """strategies of an operation, or placements of a value"""
    tags: tuple[int, ...] = (0,)
    terms: Mapping[str, StepParts] = field(default_factory=dict)
    """seconds per state, by name: "operation", "again" (recomputed in the backward), "update" (by the optimizer),
    "exchange" (of look-ups in tables)"""
    kept: np.ndarray | None = None
    """bytes held at the end of the forward, per state; with workspace of an operation after the last block"""
    at_backward_end: np.ndarray | None = None
    """bytes held at the end of the backward, per state"""
    stages: tuple[int, ...] = ()
    """ZeRO stage of each tag; only of parameters, or of their shared layout if there is one"""
    saved: np.ndarray | None = None
    """``kept`` without that workspace"""

    @property
    def parts(self) -> StepParts:
        return sum_of_terms(self.terms)

    @property
    def size(self) -> int:
        """Number of states."""
        return len(self.choices) * len(self.tags)


@dataclass(frozen=True)
class BuiltNetwork:
    """A network with its overlap rows, and its memory rows if memory is limited."""

    network: CostNetwork
    hiding: tuple[LinearRow, ...]
    kept: tuple[LinearRow, ...] = ()
    """bytes at the end of the forward, and of the backward; callers set the limits"""
    alike: tuple[Hashable | None, ...] = ()
    """per variable: label shared by the same place of equal modules; None: unique"""
    saved: tuple[np.ndarray | None, ...] = ()
    """per variable: its bytes at the end of the forward, without workspace"""

    @property
    def least_kept(self) -> tuple[LinearRow, LinearRow]:
        """``kept`` without workspace: operations after the last block hold theirs in turn."""
        return replace(self.kept[0], nodes=self.saved), self.kept[1]


@dataclass
class LayoutNetwork:
    """Builder of the cost network. ``offer``: recompute states; None: no memory rows."""

    graph: Graph
    mesh: Mesh
    constraints: Mapping[str, Constraint | DimLimit]
    spaces: OpSpaces
    keeps: SavedTensorTables
    offer: RecomputeOffer | None = None
    optimizer: str = "adamw"
    given: Mapping[str, Layout] = field(default_factory=dict)
    """layouts of inputs that arrive sharded, and layouts wanted of outputs, as "out:i" """
    stages: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """parameter → ZeRO stages on offer; default (0,)"""
    micro_batches_held: int = 1
    """micro-batches in flight: each keeps its activations"""
    carried: frozenset[str] = frozenset()  # inputs whose layout the search chooses, like a parameter's
    variables: dict[str, NetworkVariable] = field(default_factory=dict)
    """by name: a value, "node:…", "shared:…", "out:i", "way:i" """
    links: list[ValueEdge] = field(default_factory=list)
    calls: list[tuple[str, str, Mapping[str, StepParts]]] = field(default_factory=list)
    """of grouped look-ups: (variable of the group, variable of a look-up, seconds by name)"""
    sources: dict[str, tuple[str, EdgeSide]] = field(default_factory=dict)
    """value → (variable, its side) from which readers convert"""
    known: dict[Any, Any] = field(default_factory=dict)
    """interned objects: equal layers share identical tables"""

    def __post_init__(self) -> None:
        self.views = frozenset(n.name for n in self.graph.nodes if is_memory_view(n))
        self.tail = nodes_after_blocks(self.graph) if self.offer is not None else frozenset()
        self.free = free_buffers(self.graph, self.given, self.constraints) | self.carried
        """buffers whose layout the search chooses, like a parameter's"""

    @property
    def remembers(self) -> bool:
        """Whether saved tensors and recomputation count."""
        return self.offer is not None

    def build(self, tables: EdgeTables) -> BuiltNetwork:
        """Create variables and edges, then their tables."""
        self.collect()
        hides = self.mesh.overlap, self.graph.passes
        own: dict[Any, StepTables] = {}
        made: dict[Any, tuple[StepTables, CompactMatrix | None]] = {}
        of = [(v.size, *map(id, v.terms.values())) for v in self.variables.values()]
        for v, of_terms in zip(self.variables.values(), of, strict=True):
            if of_terms not in own:
                own[of_terms] = tables_of_step(v.parts, (v.size,), *hides)
        keys = [tables.key(link) for link in self.links]
        for link, key in zip(self.links, keys, strict=True):
            if key not in made:  # unfolded parts are several times as large: not kept
                found = tables.of(link, self.remembers, self.micro_batches_held)
                made[key] = tables_of_step(found.parts, found.shape, *hides, (found.rows, found.columns)), found.held
        between = [made[key] for key in keys]
        numbers = {name: i for i, name in enumerate(self.variables)}
        edges = [(numbers[x.source], numbers[x.reader], e) for x, (e, _) in zip(self.links, between, strict=True)]
        for way, look_up, terms in self.calls:
            parts = sum_of_terms(terms)
            edges.append((numbers[way], numbers[look_up], tables_of_step(parts, parts.blocking.shape, *hides)))
        nodes = [own[key] for key in of]
        network, hiding = network_of_steps(nodes, edges, *hides)
        if self.offer is None:
            return BuiltNetwork(network, hiding, alike=repetition_labels(self.graph, self.variables))
        held = (*(held for _, held in between), *[None] * len(self.calls))
        kept = LinearRow(tuple(v.kept for v in self.variables.values()), held, math.inf)
        at_backward_end = LinearRow(
            tuple(v.at_backward_end for v in self.variables.values()), (None,) * len(edges), math.inf
        )
        saved = tuple(v.saved for v in self.variables.values())
        return BuiltNetwork(
            network, hiding, (kept, at_backward_end), repetition_labels(self.graph, self.variables), saved
        )

    def collect(self) -> None:
        """Create variables and links."""
        graph = self.graph
        needed = self._needed()
        readers: dict[str, list[ValueEdge]] = {n: [] for n in graph.types}
        """edges whose sources are still open"""
        for node in graph.nodes:
            space = self.spaces[node]
            tags = self._tags(node, needed)
            self.variables[f"node:{node.name}"] = self._operation(node, space, tags)
            for name, reader in self._reads(node, space, tags):
                readers[name].append(reader)
        for i, out in enumerate(graph.outputs):
            if isinstance(out, Ref):
                states = self._output_states(i, out.name)
                self.variables[f"out:{i}"] = NetworkVariable(states)
                readers[out.name].append(_read_by(f"out:{i}", EdgeSide(states)))
        for fqn, name in graph.mutations.items():
            old = graph.states.get(fqn)
            if old in self.free:
                if old != name:
                    readers[name].append(_read_by(old, EdgeSide(self._input_states(old, "buffer"))))
                continue
            placed = (R,) * self.mesh.ndim if old is None else self._stated(old).without_gradient().placements
            states = self._interned(("mutation", placed), (placed,))
            self.variables[f"mutation:{fqn}"] = NetworkVariable(states)
            readers[name].append(_read_by(f"mutation:{fqn}", EdgeSide(states)))
        for value in graph.inputs:
            states = self._input_states(value.name, value.kind)
            stages = self._stages(value.name) if len(readers[value.name]) == 1 else ()
            self.variables[value.name] = self._input(value.name, states, stages)
            side = EdgeSide(states, (0,) * max(1, len(stages)), fixed=True, stages=stages)
            self._connect(value.name, side, value.name, readers[value.name], needed)
        for node in graph.nodes:
            for slot, name in enumerate(node.outputs):
                side = self._definition(node, slot, self.variables[f"node:{node.name}"].tags)
                self._connect(f"node:{node.name}", side, name, readers[name], needed)
        self._lookup_groups()
        self._sort_variables()

    def _lookup_groups(self) -> None:
        """Variables of grouped look-ups: the way that most look-ups of a group go."""
        for i, of in enumerate(exchange_pricings(self.graph, self.mesh, self.optimizer)):
            found = of.group([self.spaces[node] for node in of.nodes])
            if found is None:
                continue
            self.variables[f"way:{i}"] = NetworkVariable(found.ways, terms=found.terms)
            for node, terms in zip(of.nodes, found.more, strict=True):
                look_up = f"node:{node.name}"
                tiled = partial(np.tile, reps=len(self.variables[look_up].tags))
                self.calls.append((f"way:{i}", look_up, {name: parts.map(tiled) for name, parts in terms.items()}))

    def _sort_variables(self) -> None:
        """Sort variables next to their neighbours in program order, for the search to eliminate."""
        place = {f"node:{node.name}": float(i) for i, node in enumerate(self.graph.nodes)}
        for link in self.links:
            if link.source in place:
                place.setdefault(link.reader, place[link.source] + 0.5)
        for way, look_up, _ in reversed(self.calls):
            place[way] = place[look_up] - 0.25
        before: dict[str, float] = {}
        for link in reversed(self.links):
            if link.source not in place:
                first = place.get(link.reader, before.get(link.reader, 0.0))
                before[link.source] = min(before.get(link.source, math.inf), first - 0.25)
        place |= before
        self.variables = dict(sorted(self.variables.items(), key=lambda item: place.get(item[0], 0.0)))

    # --- operations ---

    def _needed(self) -> frozenset[str]:
        """Values that the backward may need: saved by some choice, or read by recomputation."""
        if self.offer is None:
            return frozenset()
        found: set[str] = set()
        for node in reversed(self.graph.nodes):
            keeps = self.keeps.of(node, self.spaces[node])
            again = (node.name in self.views and not found.isdisjoint(node.outputs)) or 2 in self.offer(node)
            found.update(n for n, saves in zip(node.inputs, keeps.operands, strict=True) if again or saves.any())
        return frozenset(found)

    def _tags(self, node: Node, needed: frozenset[str]) -> tuple[int, ...]:
        if self.offer is None:
            return (0,)
        if node.name not in self.views:
            return self.offer(node)
        offered = self.offer(node)
        return passive_tags(not needed.isdisjoint(node.outputs), any(offered), 0 in offered)

    def _operation(self, node: Node, space: OpSpace, tags: tuple[int, ...]) -> NetworkVariable:
        if not self.remembers:
            return NetworkVariable(space.choices, tags, {"operation": space.parts})
        key = ("operation", id(space), tags, node.name in self.views, node.name in self.tail)
        if key not in self.known:
            passive, keeps = node.name in self.views, self.keeps.of(node, space)
            work = keeps.work if node.name in self.tail else np.zeros(len(space.choices))
            own = keeps.own * self.micro_batches_held  # one micro-batch works at a time
            again = [not passive and (tag == 2 or (tag == 1 and can_redraw(node))) for tag in tags]
            terms = {"operation": space.parts.map(partial(np.tile, reps=len(tags)))}
            if any(again):
                terms["again"] = space.again.map(lambda x: np.kron(np.array(again), x))
            saved = np.concatenate([np.zeros_like(own) if passive or a else own for a in again])
            kept = saved if passive else saved + np.tile(work, len(tags))
            self.known[key] = terms, *(held if held.any() else None for held in (kept, saved))
        terms, kept, saved = self.known[key]
        return NetworkVariable(space.choices, tags, terms, kept, saved=saved)

    def _reads(self, node: Node, space: OpSpace, tags: tuple[int, ...]) -> Iterator[tuple[str, ValueEdge]]:
        key = ("reads", id(space), tags, self.remembers)
        if key not in self.known:  # equal nodes have equal readers
            found = list(operand_reads(node, space))
            of = self.keeps.of(node, space) if self.remembers else None
            keeps = [None if of is None else of.saves(node, x.position, space) for x in found]
            sides = [EdgeSide(x.placed, tags, node.name in self.views, k) for x, k in zip(found, keeps, strict=True)]
            self.known[key] = [(x.position, side, *x[3:]) for x, side in zip(found, sides, strict=True)]
        variable = f"node:{node.name}"
        for position, *rest in self.known[key]:
            yield node.inputs[position], _read_by(variable, *rest)

    def _definition(self, node: Node, slot: int, tags: tuple[int, ...]) -> EdgeSide:
        space = self.spaces[node]
        key = ("definition", id(space), slot, tags, self.remembers)
        if key not in self.known:
            holds = self.keeps.of(node, space).results[slot] if self.remembers else None
            held = holds if holds is not None and holds.any() else None
            self.known[key] = EdgeSide(space.outputs[slot], tags, node.name in self.views, holds=held)
        return self.known[key]

    # --- edges ---

    def _connect(
        self,
        variable: str,
        defined: EdgeSide,
        value: str,
        readers: list[ValueEdge],
        needed: frozenset[str],
    ) -> None:
        """Edges from a definition to its readers; several readers share a layout variable."""
        found = self._shared(value, defined, readers, needed)
        if found is not None:
            stages, fixed = self._stages(value), value in self.graph.parameters
            states, tags = found
            if stages:
                tags, stages = tags * len(stages), tuple(s for s in stages for _ in tags)
            shared, passive = f"shared:{value}", self.remembers
            self.variables[shared] = NetworkVariable(states, tags, stages=stages)
            self.links.append(
                ValueEdge(variable, defined, shared, EdgeSide(states, tags, passive, stages=stages), value)
            )
            variable, defined = shared, EdgeSide(states, tags, passive, fixed=fixed, stages=stages)
        self.sources[value] = variable, defined
        self.links += [reader._replace(source=variable, given=defined, value=value) for reader in readers]

    def _shared(
        self, value: str, defined: EdgeSide, readers: list[ValueEdge], needed: frozenset[str]
    ) -> tuple[tuple[Placements, ...], tuple[int, ...]] | None:
        """Layouts and tags of the shared layout; None: the readers convert from the definition."""
        constraint = self.constraints.get(value)
        by_hint = isinstance(constraint, Constraint) and value not in self.graph.parameters
        if len(readers) < 2 and not by_hint:
            return None
        states = self._shared_states(value, defined.placed, [r.asked.placed for r in readers])
        if by_hint and constraint is not None:
            states = constraint.allowed(states, self.graph.types[value], self.mesh)
        if not self.remembers:
            return states, (0,)
        again = any(tag >= (RECONVERTED if r.asked.passive else 1) for r in readers for tag in r.asked.tags)
        saving = [
            x.tags for x in (r.asked for r in readers) if 0 not in x.tags or (x.saves is not None and x.saves.any())
        ]
        pinned = bool(saving) and not any(0 in tags for tags in saving)  # nobody keeps a copy, so none is kept
        copies = again and value not in self.graph.parameters
        return states, passive_tags(value in needed, copies, not (copies and pinned))

    def _shared_states(
        self, value: str, defined: Sequence[Placements], read: Sequence[Sequence[Placements]]
    ) -> tuple[Placements, ...]:
        asked = isinstance(self.constraints.get(value), Constraint)
        key = (self.graph.types[value] if asked else None, id(defined), *map(id, read))
        if key not in self.known:
            union = dict.fromkeys(defined)
            for placed in read:
                union.update(dict.fromkeys(placed))
            if asked:
                union.update(dict.fromkeys(candidate_placements(self.graph.types[value], self.mesh)))
            self.known[key] = tuple(union)
        return self.known[key]

    # --- inputs and outputs ---

    def _stated(self, name: str) -> Layout:
        return input_layout(name, self.graph, self.mesh, self.given)

    def _stages(self, value: str) -> tuple[int, ...]:
        """ZeRO stages on offer for a parameter; () for other values."""
        return self.stages.get(value, (0,)) if value in self.graph.parameters else ()

    def _input(self, name: str, states: tuple[Placements, ...], stages: tuple[int, ...]) -> NetworkVariable:
        type_, count = self.graph.types[name], max(1, len(stages))
        if name in self.free:
            size = self.bytes(name, states)
            return NetworkVariable(states, kept=size, at_backward_end=size, saved=size)
        if name not in self.graph.parameters:
            return NetworkVariable(states)
        key = ("parameter", type_, id(states), count)
        if key not in self.known:
            trained = type_.grad and self.graph.training
            size = self.bytes(name, states) * type_.kept.dtype.itemsize / type_.dtype.itemsize
            shapes = [costs.local_shape(type_.shape, s, self.mesh) for s in states]
            state = np.array([optimizer_bytes(self.optimizer, x, type_.kept.dtype) if trained else 0.0 for x in shapes])
            on = self.graph, self.mesh
            seconds = np.array([update_seconds(self.optimizer, type_, placed, *on) for placed in states])
            left = costs.sparse_gradient_bytes(type_, states, self.mesh) if type_.sparse else size
            skew = np.array([costs.owner_imbalance(type_, placed, self.mesh) for placed in states])
            size, state, left = size * skew, state * skew, left * skew
            terms = {"update": StepParts(once=np.tile(seconds, count))} if type_.grad else {}
            at_backward_end = size + state + (left if trained else 0.0)
            # gradients of earlier passes are held, too
            held = at_backward_end if self.graph.passes > 1 else size + state
            self.known[key] = terms, np.tile(held, count), np.tile(at_backward_end, count)
        terms, kept, at_backward_end = self.known[key]
        return NetworkVariable(states, (0,) * count, terms, kept, at_backward_end, stages, saved=kept)

    def _input_states(self, name: str, kind: str) -> tuple[Placements, ...]:
        """Layouts of an input: as given (default replicated); parameters, states: maybe sharded."""
        whole = I if (type_ := self.graph.types[name]).grad else R
        if kind != "parameter" and name not in self.free:
            placed = self._stated(name).placements
            return self._interned(("given", placed), (placed,))
        key = ("parameter", type_, constraint := self.constraints.get(name))
        if key not in self.known:
            every = candidate_placements(type_, self.mesh, replicated=whole) + fixed_placements(type_, self.mesh)
            self.known[key] = every if constraint is None else constraint.allowed(every, type_, self.mesh, whole)
        return self.known[key]

    def _output_states(self, number: int, name: str) -> tuple[Placements, ...]:
        """Layouts of an output, the wanted one if possible; scalars replicated, no sums."""
        type_, asked = self.graph.types[name], self.given.get(f"out:{number}")
        states = candidate_placements(type_, self.mesh, replicated=I if type_.grad else R)
        if self.spaces.asked and name in self.graph.producers:
            made = [{*row, R, I} for row in self._producible_placements(name)]
            states = tuple(s for s in states if all(p in m for p, m in zip(s, made, strict=True)))
        if asked is not None and asked.placements in states:
            return self._interned(("output", asked.placements), (asked.placements,))
        return self._interned(("output", states), states)

    def _producible_placements(self, name: str) -> tuple[frozenset[Placement], ...]:
        """Per mesh axis the placements in which the producer can make a value."""
        node = self.graph.producers[name]
        states = self.spaces[node].outputs[node.outputs.index(name)]
        return tuple(frozenset(s[axis] for s in states) for axis in range(self.mesh.ndim))

    def _interned(self, key: Any, states: tuple[Placements, ...]) -> tuple[Placements, ...]:
        """One tuple object per key."""
        return self.known.setdefault(key, states)

    def bytes(self, value: str, placed: Sequence[Placements]) -> np.ndarray:
        return costs.bytes_per_layout(self.graph.types[value], placed, self.mesh)

"""Activation memory in the cost network: saved tensors, and what to recompute instead.

Every variable has *tags* beside its layouts. An operation's tag is its recompute state: 0, nothing
is recomputed; 1, its operands are converted again in the backward; 2, it is recomputed. Views hold
no memory: their tags, and those of shared layouts, say whether the backward needs the value
(``NEEDED``, ``RECONVERTED``) or not (``ABSENT``).

An edge costs memory if the backward needs its value (a saved tensor, or recompute). Read in the
layout of its definition, the value is held, unless the definition is recomputed or holds it
already. Read in another layout, the copy is held; or the conversion is repeated, which costs
seconds and needs the value in the layout of its definition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Placements, Strategy
from autoshard.passes.ir.graph import Graph, Node, TensorType
from autoshard.passes.ir.program import LocalCall
from autoshard.passes.ir.text import block_path
from autoshard.passes.propagate.op_space import OpSpace, op_site, shard_spec
from autoshard.passes.propagate.prices import roofline as costs
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.facts import is_view, saved_for_backward
from autoshard.passes.rules.interpreters import abstract_run_on
from autoshard.passes.rules.restrictions import needs_full_tensors

ABSENT, NEEDED, RECONVERTED = 0, 1, 2
"""tags of views and shared layouts: the backward does not need the value; it needs it and keeps the
converted copy; it needs it and converts again"""


@dataclass(frozen=True, eq=False)
class SavedTensors:
    """Saved tensors of one operation, per choice of its op space."""

    operands: tuple[np.ndarray, ...]
    """per operand: bool [choices]"""
    results: tuple[np.ndarray, ...]
    """per result: bool [choices]"""
    private: np.ndarray
    """bytes of other saved tensors [choices]"""
    own: np.ndarray
    """bytes of these and of saved results [choices]"""
    work: np.ndarray
    """workspace bytes while it or its backward runs, with gradients of its operands and results"""

    def saves(self, node: Node, position: int, space: OpSpace) -> np.ndarray:
        """Per choice: whether an operand is saved, here or later in the same layout."""
        result: np.ndarray = self.operands[position].copy()
        for other in range(position + 1, len(node.inputs)):
            if node.inputs[other] == node.inputs[position] and self.operands[other].any():
                pairs = zip(space.inputs[position], space.inputs[other], strict=True)
                result |= self.operands[other] & np.array([a == b for a, b in pairs])
        return result


class SavedTensorTables:
    """:class:`SavedTensors` per op space."""

    def __init__(self, graph: Graph, mesh: Mesh) -> None:
        self.graph, self.mesh = graph, mesh
        self.rehearsal = abstract_run_on(mesh)
        self.known: dict[int, SavedTensors] = {}

    def of(self, node: Node, space: OpSpace) -> SavedTensors:
        if id(space) not in self.known:
            self.known[id(space)] = self._of(node, space)
        return self.known[id(space)]

    def _of(self, node: Node, space: OpSpace) -> SavedTensors:
        count = len(space.choices)
        operands = tuple(np.zeros(count, dtype=bool) for _ in node.inputs)
        results = tuple(np.zeros(count, dtype=bool) for _ in node.outputs)
        private, own, work = np.zeros(count), np.zeros(count), np.zeros(count)
        if self.graph.training and self.graph.is_differentiable(node):
            for i, choice in enumerate(space.choices):
                placed = [p[i] for p in (*space.inputs, *space.outputs)]
                ins, outs, private[i], work[i] = self._saved_tensors(node, choice, placed)
                for position in ins:
                    operands[position][i] = True
                for position in outs:
                    results[position][i] = True
                own[i] = private[i] + sum(self._bytes(node.outputs[x], space.outputs[x][i]) for x in outs)
        return SavedTensors(operands, results, private, own, work)

    def _saved_tensors(
        self, node: Node, choice: tuple[Strategy, ...], placed: Sequence[Placements]
    ) -> tuple[frozenset[int], frozenset[int], float, float]:
        """(saved operands, saved results, bytes of other saved tensors, workspace bytes)."""
        types = self.graph.types
        pairs = list(zip(node.values, placed, strict=True))
        results = sum(self._bytes(n, p) for n, p in pairs[len(node.inputs) :] if types[n].grad)
        call = self._local_form(node, choice, placed)
        if call is not None:
            names = dict.fromkeys(node.inputs)
            local = {n: shard_spec(types[n], placed[node.inputs.index(n)], self.mesh) for n in names}
            outcome = self.rehearsal.run(call, local, True)
            if outcome is not None:
                given = list(names)
                ins = frozenset(i for i, n in enumerate(node.inputs) if given.index(n) in outcome.kept)
                made = [outcome.made[s] if s < len(outcome.made) else None for s in node.output_slots]
                outs = frozenset(i for i, m in enumerate(made) if m is not None and m.storage in outcome.kept)
                seen = {m.storage for m in made if m is not None}
                rest = sum(outcome.new[~s] for s in outcome.kept if s < 0 and s not in seen)
                return ins, outs, float(rest), max(results + outcome.backward_peak, outcome.forward_peak)
        local_types = {
            n: TensorType(costs.local_shape(types[n].shape, p, self.mesh), types[n].dtype, types[n].grad)
            for n, p in pairs
        }
        found = saved_for_backward(node, local_types)
        inside = float(sum(t.nbytes for t in found.intermediates))
        operands = sum(self._bytes(n, p) for n, p in pairs[: len(node.inputs)] if types[n].grad)
        return found.operands, found.results, inside, results + operands

    def _bytes(self, name: str, placed: Placements) -> float:
        type_ = self.graph.types[name]
        return float(costs.local_numel(type_, placed, self.mesh) * type_.dtype.itemsize)

    def _local_form(self, node: Node, choice: tuple[Strategy, ...], placed: Sequence[Placements]) -> LocalCall | None:
        """The local form, if it is not the same operation on local tensors."""
        rule = rule_for(node.op)
        if rule is None or rule.local is None or needs_full_tensors(node, self.graph.types, rule):
            return None
        call = rule.local(op_site(node, self.graph, self.mesh, choice, placed).example)
        nested = any(isinstance(x, LocalCall) for x in (*call.args, *call.kwargs.values()))
        return call if isinstance(call.fn, str) or nested else None


@dataclass(frozen=True, eq=False)
class EdgeSide:
    """One end of an edge: layouts per choice, and the meaning of each tag."""

    placed: Sequence[Placements]
    tags: tuple[int, ...] = (0,)
    passive: bool = False
    """whether it computes nothing: a view, or a shared layout"""
    saves: np.ndarray | None = None
    """of a reader: whether autograd saves the operand [choices]; None: never"""
    holds: np.ndarray | None = None
    """of a definition: whether it holds the value already [choices]; None: never"""
    fixed: bool = False
    """whether the definition always exists: an input of the graph"""
    stages: tuple[int, ...] = ()
    """of a parameter, at its readers' side: ZeRO stage of each tag"""

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Equal for sides with equal tables, while both are alive."""
        arrays = (None if a is None else a.tobytes() for a in (self.saves, self.holds))
        return (id(self.placed), self.tags, self.passive, *arrays, self.fixed, self.stages)


@dataclass(frozen=True, eq=False)
class ConversionCopies:
    """Memory of conversions from each layout of a definition (row) to each of a reader (column)."""

    made: np.ndarray
    """bytes of the copy; 0 if it shares memory or is not kept"""
    shares: np.ndarray
    """whether both share memory"""
    own: np.ndarray
    """bytes of the value per layout of the definition [rows]"""
    always_held: np.ndarray | float = 0.0
    """bytes held in any case: of a parameter gathered once for several micro-batches"""

    def __getitem__(self, cut: tuple[np.ndarray, ...]) -> ConversionCopies:
        """Select layouts of the definition (rows) and of the reader (columns)."""
        always_held = self.always_held[cut] if isinstance(self.always_held, np.ndarray) else self.always_held
        return ConversionCopies(self.made[cut], self.shares[cut], self.own[cut[0][:, 0]], always_held)


class EdgeMemory(NamedTuple):
    """Memory tables of one edge; state number = place of tag × choices + choice."""

    again: np.ndarray
    """whether the backward repeats the conversion"""
    forbidden: np.ndarray
    """whether the reader needs a value that the backward does not have"""
    held: np.ndarray
    """bytes"""


def zero_stage_table(source: EdgeSide, reader: EdgeSide) -> list[list[int | None]]:
    """ZeRO stage for each tag of the source (row) and the reader (column); None: no parameter."""
    rows, columns = source.stages or (None,) * len(source.tags), reader.stages or (None,) * len(reader.tags)
    return [[b if a is None else a for b in columns] for a in rows]


def memory_of_edge(source: EdgeSide, reader: EdgeSide, copies: Mapping[int | None, ConversionCopies]) -> EdgeMemory:
    """Memory of an edge for all tags of both sides. ``copies``: by ZeRO stage."""
    rows = []
    for tag, at in zip(source.tags, zero_stage_table(source, reader), strict=True):
        pairs = zip(reader.tags, at, strict=True)
        blocks = [_tag_block(source, tag, reader, other, copies[stage], stage is None) for other, stage in pairs]
        rows.append([np.hstack(column) for column in zip(*blocks, strict=True)])
    return EdgeMemory(*(np.vstack(column) for column in zip(*rows, strict=True)))


def _tag_block(
    source: EdgeSide, source_tag: int, reader: EdgeSide, tag: int, copies: ConversionCopies, converts: bool
) -> EdgeMemory:
    """Memory for two tags. ``converts``: whether conversions may repeat (not parameters')."""
    count = len(reader.placed)
    if reader.passive:
        needs, again = np.full(count, tag != ABSENT), converts and tag == RECONVERTED
    else:
        saves = reader.saves if reader.saves is not None else np.zeros(count, dtype=bool)
        needs, again = saves | (tag == 2), converts and tag >= 1
    never = np.zeros(copies.made.shape, dtype=bool)
    remade = needs & ~copies.shares if again else never
    there = source.fixed or source.passive or source_tag == 2
    if not there:  # a copy that is no larger is kept in its source's place
        remade = remade & (copies.made > copies.own[:, None])
    held = copies.always_held + np.where(needs & ~remade, copies.made, 0.0)
    if source.fixed or (not source.passive and source_tag == 2):
        return EdgeMemory(remade, never, held)
    present = needs & (copies.shares | remade)
    if source.passive:
        return EdgeMemory(remade, present if source_tag == ABSENT else never, held)
    own = copies.own if source.holds is None else np.where(source.holds, 0.0, copies.own)
    return EdgeMemory(remade, never, held + np.where(present, own[:, None], 0.0))


def is_memory_view(node: Node) -> bool:
    return is_view(node.op)


def passive_tags(needed: bool, again: bool, keeps: bool = True) -> tuple[int, ...]:
    """Tags of a view or shared layout; a converted copy may be repeated (``again``) or kept."""
    return (ABSENT, *([NEEDED] if keeps else []), *([RECONVERTED] if again else [])) if needed else (ABSENT,)


def nodes_after_blocks(graph: Graph) -> frozenset[str]:
    """Operations after the last repeated module: memory peaks there, so their workspace counts."""
    last = max((i for i, node in enumerate(graph.nodes) if block_path(node.fqn)), default=len(graph.nodes))
    return frozenset(node.name for node in graph.nodes[last + 1 :])

"""Strategies of one operation: per mesh axis from its rule, combined over all axes and priced."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from autoshard.errors import RuleError
from autoshard.layout import Owned, Partial, Placement, R
from autoshard.mesh import Mesh
from autoshard.passes.ir.analyses import node_signature
from autoshard.passes.ir.assignment import Placements, Strategy, cached_layout, can_combine_axes, normalize_placement
from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType, map_refs, walk
from autoshard.passes.ir.program import InternalCollective, LocalCall
from autoshard.passes.propagate.prices import roofline as costs
from autoshard.passes.propagate.prices.coalescing import GroupedConversions
from autoshard.passes.propagate.prices.collective_overheads import NO_SKEW, SkewSeconds, synchronization_skew
from autoshard.passes.propagate.prices.overlap import StepParts
from autoshard.passes.propagate.prices.roofline import Traffic, fused_traffic
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.base import Site, unsharded_strategies
from autoshard.passes.rules.families.splits import segment_strategies
from autoshard.passes.rules.interpreters import TensorSpec, abstract_run_on
from autoshard.passes.rules.restrictions import (
    keeps_unknown_unsharded,
    needs_full_tensors,
)


@dataclass(frozen=True, eq=False)
class OpSpace:
    """The combined strategies of one op; nodes with the same signature share it."""

    choices: tuple[tuple[Strategy, ...], ...]
    phases: np.ndarray
    """float64 [4, 2, choices]: seconds of compute, of its launches, which overlap with nothing, and of exposed and
    hidden collectives inside the local form; each in the forward and the backward"""
    inside_again: np.ndarray
    """float64 [choices]: of the forward's exposed collectives, those repeated when recomputed"""
    spared: Mapping[int, np.ndarray]
    """operand → float64 [choices]: seconds of collectives skipped if it was replicated"""
    inputs: tuple[tuple[Placements, ...], ...]
    """per operand, per choice"""
    outputs: tuple[tuple[Placements, ...], ...]
    ways: GroupedConversions | None = None
    """conversions of operands that share a message; None: none do"""

    @cached_property
    def parts(self) -> StepParts:
        """Seconds of every choice."""
        compute, launches, inside, hidden = self.phases.sum(axis=1)
        return StepParts(compute - launches, launches, inside, hidden=hidden)

    @cached_property
    def again(self) -> StepParts:
        """Seconds to recompute every choice."""
        compute, launches, _, hidden = self.phases[:, 0]
        return StepParts(compute - launches, launches, self.inside_again, hidden=hidden)

    @cached_property
    def seconds(self) -> np.ndarray:
        """float64 [choices]: forward plus backward."""
        return self.parts.compute + self.parts.other + self.parts.blocking

    def compute(self, choice: int = 0) -> costs.PhaseSeconds:
        ahead, back, *launches = self.phases[:2, :, choice].ravel().tolist()
        return costs.PhaseSeconds(ahead, back, (launches[0], launches[1]))

    def repeated(self, at: Sequence[int], ways: GroupedConversions, pays: Sequence[float]) -> OpSpace:
        """The choices ``at``, in this order; each waits ``pays`` seconds more in the forward."""
        phases, spared = self.phases[..., at], {i: x[at] for i, x in self.spared.items()}
        phases[2, 0] += pays
        ins, outs = (tuple(tuple(x[i] for i in at) for x in side) for side in (self.inputs, self.outputs))
        return OpSpace(tuple(self.choices[i] for i in at), phases, self.inside_again[at], spared, ins, outs, ways)


@dataclass(frozen=True, slots=True)
class OpRequest:
    """What a named strategy asks of an operation on one mesh axis: factors to shard, or none."""

    cuts: frozenset[str]
    """factors of strategies"""
    optional: bool = False
    """whether it may run unsharded, too"""
    sums: bool = True
    """whether operands may be partial sums"""
    invariant: bool = True
    """whether unsharded work may have replicated gradients (I), not only partial ones"""
    fallback: frozenset[str] = frozenset()
    """factors to shard if ``cuts`` is impossible"""

    def allows(self, strategy: Strategy) -> bool:
        if strategy.divides:
            return strategy.factor in self.cuts | self.fallback
        if strategy.label == "I" and not self.invariant:
            return False
        return self.sums or not any(isinstance(p, Partial) for p in strategy.inputs)


OpRequests = tuple[OpRequest | None, ...]
"""per mesh axis; None: free"""


class _PricedChoice(NamedTuple):
    choice: tuple[Strategy, ...]
    placed: tuple[Placements, ...]
    """of operands, then of results"""
    compute: costs.PhaseSeconds
    inside: costs.InternalSeconds
    spared: Mapping[int, float]

    @property
    def step(self) -> float:
        return self.compute.step + self.inside.step


def op_space(
    node: Node,
    graph: Graph,
    mesh: Mesh,
    asked: OpRequests = (),
    traffic: Traffic | None = None,
    waits: SkewSeconds = NO_SKEW,
) -> OpSpace:
    """Feasible combinations of per-axis strategies; of equal layouts only the cheapest. ``asked``:
    restrictions; ``fused_traffic``: :func:`costs.node_seconds`; ``waits``:
    :func:`synchronization_skew`."""
    for choices in _request_tiers(_feasible_choices(node, graph, mesh, asked), asked or (None,) * mesh.ndim):
        if best := _cheapest_by_layout(choices, node, graph, mesh, traffic, waits):
            break
    return _space_of(node, best)


def chosen_space(
    node: Node, graph: Graph, mesh: Mesh, choice: tuple[Strategy, ...], traffic: Traffic | None, waits: SkewSeconds
) -> OpSpace:
    """The space of one choice; arguments as of :func:`op_space`."""
    return _space_of(node, _cheapest_by_layout((choice,), node, graph, mesh, traffic, waits))


def _space_of(node: Node, found: Sequence[_PricedChoice]) -> OpSpace:
    placed = [tuple(x.placed[i] for x in found) for i in range(len(node.inputs) + len(node.outputs))]
    each = [(x.compute[:2], x.compute.launches, x.inside[:2], x.inside.hidden) for x in found]
    operands = sorted({i for x in found for i in x.spared})
    return OpSpace(
        choices=tuple(x.choice for x in found),
        phases=np.moveaxis(np.array(each).reshape(-1, 4, 2), 0, -1).copy(),
        inside_again=np.array([x.inside.again for x in found]),
        spared={i: np.array([x.spared.get(i, 0.0) for x in found]) for i in operands},
        inputs=tuple(placed[: len(node.inputs)]),
        outputs=tuple(placed[len(node.inputs) :]),
    )


def _feasible_choices(node: Node, graph: Graph, mesh: Mesh, asked: OpRequests) -> list[tuple[Strategy, ...]]:
    per_axis = axis_strategies(node, graph)
    wanted = asked or (None,) * mesh.ndim
    allowed = [[s for s in per_axis if a is None or a.allows(s)] for a in wanted]
    fitting = (_strategies_for_ranks(strategies, ranks) for strategies, ranks in zip(allowed, mesh.shape, strict=True))
    free = not any(s.apart or s.innermost or s.in_parts for s in per_axis)
    return [choice for choice in itertools.product(*fitting) if is_feasible(choice, mesh, free)]


def _request_tiers(choices: Sequence[tuple[Strategy, ...]], asked: OpRequests) -> Iterator[list[tuple[Strategy, ...]]]:
    """Tiers of choices: first those sharded along most axes that ask for it, then one axis less.
    One tier if several axes ask for a factor and the best choices need a layout to which no
    neighbour's converts."""
    found: dict[tuple[int, int], list[tuple[Strategy, ...]]] = {}
    for choice in choices:
        pairs = [(s, a) for s, a in zip(choice, asked, strict=True) if a is not None]
        whole_axes = sum(not a.optional and bool(a.cuts) and not s.divides for s, a in pairs)
        found.setdefault((whole_axes, sum(s.factor in a.fallback for s, a in pairs)), []).append(choice)
    tiers = [found[n] for n in sorted(found)]
    several = any(a and b and a.cuts & b.cuts for a, b in itertools.combinations(asked, 2))
    if several and tiers and all(any(s.alone or s.in_parts for s in choice) for choice in tiers[0]):
        tiers = [[choice for tier in tiers for choice in tier]]
    yield from tiers


def _cheapest_by_layout(
    choices: Sequence[tuple[Strategy, ...]],
    node: Node,
    graph: Graph,
    mesh: Mesh,
    traffic: Traffic | None,
    waits: SkewSeconds,
) -> list[_PricedChoice]:
    """For all layouts of operands and results the cheapest choice with them."""
    types = [graph.types[name] for name in node.values]
    seconds = costs.node_timer(node, graph, mesh, traffic)
    best: dict[Any, _PricedChoice] = {}
    for choice, key, placed, shapes in _with_local_shapes(choices, types, mesh):
        inside = internal_collectives(node, graph, mesh, choice, placed)
        compute = seconds(choice, shapes).slowed_by(waits.share)
        always = [c for c in inside if c.spared is None]
        spared = {c.spared: costs.internal_cost(c, mesh, waits.message)[1] for c in inside if c.spared is not None}
        found = _PricedChoice(
            choice, placed, compute, costs.inside_seconds(always, mesh, compute, waits.message), spared
        )
        if key not in best or found.step < best[key].step:
            best[key] = found
    return list(best.values())


def _with_local_shapes(
    choices: Sequence[tuple[Strategy, ...]], types: Sequence[TensorType], mesh: Mesh
) -> Iterator[tuple[tuple[Strategy, ...], Any, tuple[Placements, ...], tuple[tuple[int, ...], ...]]]:
    """Each choice with its layouts as numbers, placements and local shapes, cached per value."""
    each: dict[int, tuple[int, ...]] = {}
    numbers: list[dict[Placement, int]] = [{} for _ in types]
    for strategy in {id(s): s for choice in choices for s in choice}.values():
        own = (normalize_placement(p, t.grad) for p, t in zip(strategy.placements, types, strict=True))
        each[id(strategy)] = tuple(number.setdefault(p, len(number)) for p, number in zip(own, numbers, strict=True))
    known = [list(number) for number in numbers]
    lies: list[dict[tuple[int, ...], tuple[Placements, tuple[int, ...]]]] = [{} for _ in types]
    for choice in choices:
        key = tuple(each[id(s)] for s in choice)
        found = []
        for i, numbered in enumerate(zip(*key, strict=True)):
            if numbered not in lies[i]:
                placed = tuple(known[i][n] for n in numbered)
                lies[i][numbered] = placed, costs.local_shape(types[i].shape, placed, mesh)
            found.append(lies[i][numbered])
        yield choice, key, tuple(x for x, _ in found), tuple(x for _, x in found)


class OpSpaces:
    """Op spaces by node, shared by equal signatures. ``asked``: restrictions; ``chosen``: fixed."""

    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        asked: Mapping[str, OpRequests] | None = None,
        chosen: Mapping[str, tuple[Strategy, ...]] | None = None,
    ) -> None:
        self.graph, self.mesh, self.asked, self.chosen = graph, mesh, asked or {}, chosen
        self.traffic, self.waits = memory_traffic(graph, mesh), synchronization_skew(graph, mesh)
        self._of: dict[str, OpSpace] = {}
        found: dict[Any, OpSpace] = {}
        # With dynamic lengths, making a space records decisions about them; every search must.
        self._known = found if graph.symbols.read else graph.known.setdefault(("op spaces", mesh), found)

    def __getitem__(self, node: Node) -> OpSpace:
        if node.name not in self._of:
            traffic, what = self.traffic.get(node.name), (node, self.graph, self.mesh)
            asked: object = self.asked.get(node.name, ()) if self.chosen is None else self.chosen[node.name]
            key = node_signature(node, self.graph.types), asked, traffic
            if key not in self._known:
                self._known[key] = (
                    op_space(*what, self.asked.get(node.name, ()), traffic, self.waits)
                    if self.chosen is None
                    else chosen_space(*what, self.chosen[node.name], traffic, self.waits)
                )
            self._of[node.name] = self._known[key]
        return self._of[node.name]


def memory_traffic(graph: Graph, mesh: Mesh) -> Mapping[str, Traffic]:
    """Memory traffic per node under kernel fusion; empty if the hardware fuses nothing."""
    if not mesh.hardware.fuses:
        return {}
    if "traffic" not in graph.known:
        graph.known["traffic"] = fused_traffic(graph)
    return graph.known["traffic"]


def axis_strategies(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """Strategies of ``node`` along one axis; without a rule or a known size it runs replicated."""
    rule = rule_for(node.op)
    found: tuple[Strategy, ...] = ()
    if rule is not None and not needs_full_tensors(node, graph.types, rule):
        types = [graph.types[name] for name in node.values]
        try:
            found = tuple(s for s in rule.strategies(node, graph) if keeps_unknown_unsharded(s, types))
        except RuleError:
            if not any(t.unknown for t in types):
                raise  # else: lengths that are equal may have different estimates
    every = (*found, *segment_strategies(found, node, graph))
    return every or unsharded_strategies(len(node.inputs), len(node.outputs))


def _strategies_for_ranks(strategies: Sequence[Strategy], ranks: int) -> list[Strategy]:
    if ranks == 1:  # nothing to divide: one strategy is enough, without I/R conversions
        return [s for s in strategies if s.label == "I"] or list(strategies[:1])
    return [s for s in strategies if s.allows((ranks,)) and (s.work is None or s.work[1] >= ranks)]


def is_feasible(choice: Sequence[Strategy], mesh: Mesh, free: bool = False) -> bool:
    """Whether every rank gets a chunk of each factor, and (unless ``free``) none excludes
    another."""
    if not free and not can_combine_axes(choice):
        return False
    used: dict[str, list[int]] = {}
    for strategy, ranks in zip(choice, mesh.shape, strict=True):
        used.setdefault(strategy.factor, []).append(ranks)
        if strategy.work is not None:
            used.setdefault(strategy.work[0], []).append(ranks)
    if any(strategy.alone and len(used[strategy.factor]) > 1 for strategy in choice):
        return False
    if any(s.work is not None and s.work[1] < math.prod(used[s.work[0]]) for s in choice):
        return False
    if any(s.ranks is not None and s.ranks != math.prod(used[s.factor]) for s in choice):
        return False
    return all(strategy.allows(used[strategy.factor]) for strategy in choice)


def op_site(node: Node, graph: Graph, mesh: Mesh, choice: tuple[Strategy, ...], placed: Sequence[Placements]) -> Site:
    """The site of ``node``; ``placed``: placements of every operand, then of every result."""
    layouts = tuple(cached_layout(mesh, p) for p in placed)
    return Site(node, graph, mesh, layouts[: len(node.inputs)], layouts[len(node.inputs) :], choice)


def internal_collectives(
    node: Node, graph: Graph, mesh: Mesh, choice: tuple[Strategy, ...], placed: Sequence[Placements]
) -> tuple[InternalCollective, ...]:
    """Collectives inside the local form, recorded in an abstract run of it unless the rule states
    them. ``placed``: of every operand, then of every result."""
    rule = rule_for(node.op)
    if rule is None or rule.local is None or not rule.sends or not any(s.divides for s in choice):
        return ()
    node, graph = _with_operand_each(node, graph)
    site = op_site(node, graph, mesh, choice, placed).example
    if callable(rule.sends):
        return tuple(c for c in rule.sends(site) if c.phase == "forward" or graph.training)
    call = rule.local(site)
    if not any(isinstance(item, LocalCall) and isinstance(item.fn, str) for item in walk(call)):
        return ()  # ops of torch send nothing
    shards = {name: shard_spec(graph.types[name], p, mesh) for name, p in zip(node.inputs, placed, strict=False)}
    found = abstract_run_on(mesh).messages(call, shards, graph.training, node.output_slots)
    annotate = rule.annotate
    return found if annotate is None else tuple(annotate(site, c) for c in found)


def _with_operand_each(node: Node, graph: Graph) -> tuple[Node, Graph]:
    """``node`` with a name for every operand: a value may be read in several layouts."""
    if len(set(node.inputs)) == len(node.inputs):
        return node, graph
    names = [f"{name}.{i}" for i, name in enumerate(node.inputs)]
    own = {name: graph.types[value] for name, value in zip(names, node.inputs, strict=True)}
    supply = iter(names)
    renamed: Node = map_refs(node, lambda _: Ref(next(supply)))
    return renamed, replace(graph, types={**graph.types, **own})


def shard_spec(type_: TensorType, placed: Placements, mesh: Mesh) -> TensorSpec:
    """The form of rank 0's contiguous shard, the largest; rank 0 owns what lies on one rank."""
    shape = costs.local_shape(type_.shape, tuple(R if isinstance(p, Owned) else p for p in placed), mesh)
    strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    return TensorSpec(shape, strides, type_.dtype, type_.grad)

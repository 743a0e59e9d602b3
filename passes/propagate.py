"""Choose a layout for every definition and every use: build the cost network of a graph and solve it exactly.

Variables of the network: an op's strategy (one per mesh axis, combined), an input's layout, and for every value with
several readers its *shared* layout, which all readers convert from. So one redistribution serves all readers that want
the same layout, and the network stays pairwise. Costs are seconds: roofline compute of an op on its local shapes,
forward and backward, and the redistribution between the layouts at the two ends of an edge.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from autoshard.errors import RuleError
from autoshard.layout import I, Invariant, Layout, Placement, R, Replicate, Shard
from autoshard.mesh import Mesh
from autoshard.passes import cost as costs
from autoshard.passes.dynamic import is_rigid, leaves_whole
from autoshard.passes.hints import Constraint
from autoshard.passes.ir import Graph, Node, Ref, TensorType, map_refs
from autoshard.passes.redistribute import cost_matrix
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.base import Site, Strategy
from autoshard.passes.rules.factors import whole
from autoshard.passes.search import CostNetwork, Memory, Solution, solve

log = logging.getLogger("autoshard.plan")

Placements = tuple[Placement, ...]
"""one placement per mesh axis, nested in mesh order"""


@dataclass(frozen=True)
class Assignment:
    """A solved graph. Layouts of definitions, shared layouts, and every node's strategies (one per mesh axis)."""

    mesh: Mesh
    layouts: Mapping[str, Layout]
    """value → the layout it is defined in"""
    shared: Mapping[str, Layout]
    """value → the layout its readers convert from (only values with several readers)"""
    choices: Mapping[str, tuple[Strategy, ...]]
    """node → its strategy along every mesh axis"""
    outputs: tuple[Layout | None, ...]
    """per flat output: the layout it is returned in; None for outputs that are no tensors"""
    solution: Solution
    pinned: frozenset[str] = frozenset()
    """values with a hint: readers convert from the shared layout only, whatever else exists"""


@dataclass(frozen=True, eq=False)
class OpSpace:
    """The combined strategies of one op; shared by all nodes with the same signature."""

    choices: tuple[tuple[Strategy, ...], ...]
    seconds: np.ndarray
    inputs: tuple[tuple[Placements, ...], ...]
    """per operand, per choice"""
    outputs: tuple[tuple[Placements, ...], ...]


def propagate(
    graph: Graph, mesh: Mesh, constraints: Mapping[str, Constraint], memory_budget: float | None = None
) -> Assignment:
    """The cheapest assignment of ``graph`` on ``mesh`` that satisfies ``constraints``.

    ``memory_budget``: bytes per rank for parameters, gradients and optimizer state. Raises
    :class:`~autoshard.errors.PlanError` if nothing fits, :class:`~autoshard.errors.HintError` from constraints.
    """
    network = _Network(graph, mesh, constraints)
    network.build()
    solution = network.solve(memory_budget)
    return network.assignment(solution)


@dataclass
class _Network:
    graph: Graph
    mesh: Mesh
    constraints: Mapping[str, Constraint]
    variables: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """variable → the placements (or choices) its states stand for; names: a value, "node:…", "shared:…", "out:i" """
    seconds: list[np.ndarray] = field(default_factory=list)
    index: dict[str, int] = field(default_factory=dict)
    links: list[tuple[str, Sequence[Placements], str, Sequence[Placements], str, np.ndarray | None]] = field(
        default_factory=list
    )
    """(variable, its placements of the value, other variable, its placements, value, mask or None)"""
    spaces: dict[Any, OpSpace] = field(default_factory=dict)
    shared_states: dict[Any, tuple[Placements, ...]] = field(default_factory=dict)

    def build(self) -> None:
        graph = self.graph
        space_of = {node.name: self._space(node) for node in graph.nodes}
        readers: dict[str, list[tuple[str, Sequence[Placements], np.ndarray | None]]] = {n: [] for n in graph.types}
        for node in graph.nodes:
            self._add(f"node:{node.name}", space_of[node.name].choices, space_of[node.name].seconds)
            for name, placed, mask in _operands(node, space_of[node.name]):
                readers[name].append((f"node:{node.name}", placed, mask))
        for i, out in enumerate(graph.outputs):
            if isinstance(out, Ref):
                states = self._output_states(out.name)
                self._add(f"out:{i}", states, np.zeros(len(states)))
                readers[out.name].append((f"out:{i}", states, None))
        for fqn, name in graph.mutations.items():
            states = ((R,) * self.mesh.ndim,)
            self._add(f"mutation:{fqn}", states, np.zeros(1))
            readers[name].append((f"mutation:{fqn}", states, None))
        for value in graph.inputs:
            states = self._input_states(value.name, value.kind)
            self._add(value.name, states, np.zeros(len(states)))
            self._connect(value.name, states, value.name, readers[value.name])
        for node in graph.nodes:
            for slot, name in enumerate(node.outputs):
                self._connect(f"node:{node.name}", space_of[node.name].outputs[slot], name, readers[name])

    def _add(self, variable: str, states: Sequence[Any], seconds: np.ndarray) -> None:
        self.index[variable] = len(self.seconds)
        self.variables[variable] = tuple(states)
        self.seconds.append(seconds)

    def _connect(
        self,
        variable: str,
        defined: Sequence[Placements],
        value: str,
        readers: list[tuple[str, Sequence[Placements], np.ndarray | None]],
    ) -> None:
        """Edges from a definition to its readers, through a shared-layout variable where there are several."""
        constraint = self.constraints.get(value)
        by_hint = constraint is not None and self._kind(value) != "parameter"
        if len(readers) > 1 or by_hint:
            states = self._shared_states(value, defined, readers)
            if by_hint and constraint is not None:
                states = constraint.allowed(states, self.graph.types[value], self.mesh)
            shared = f"shared:{value}"
            self._add(shared, states, np.zeros(len(states)))
            self.links.append((variable, defined, shared, states, value, None))
            variable, defined = shared, states
        for reader, placed, mask in readers:
            self.links.append((variable, defined, reader, placed, value, mask))

    def _kind(self, value: str) -> str:
        return next((i.kind for i in self.graph.inputs if i.name == value), "")

    def _shared_states(
        self,
        value: str,
        defined: Sequence[Placements],
        readers: list[tuple[str, Sequence[Placements], np.ndarray | None]],
    ) -> tuple[Placements, ...]:
        key = (self.graph.types[value], id(defined), *(id(placed) for _, placed, _ in readers))
        if key not in self.shared_states:
            union = dict.fromkeys(defined)
            for _, placed, _ in readers:
                union.update(dict.fromkeys(placed))
            if value in self.constraints:
                union.update(dict.fromkeys(_placeable(self.graph.types[value], self.mesh)))
            self.shared_states[key] = tuple(union)
        return self.shared_states[key]

    def _input_states(self, name: str, kind: str) -> tuple[Placements, ...]:
        """An input is given whole on every rank; a parameter may be kept in shards."""
        type_ = self.graph.types[name]
        whole = I if type_.grad else R
        if kind != "parameter":
            return ((whole,) * self.mesh.ndim,)
        states = _placeable(type_, self.mesh, replicated=whole)
        if name in self.constraints:
            states = self.constraints[name].allowed(states, type_, self.mesh, whole)
        return self._canonical(("parameter", type_, self.constraints.get(name)), states)

    def _output_states(self, name: str) -> tuple[Placements, ...]:
        """Scalars come back whole; other outputs keep a layout that can be put together again."""
        type_ = self.graph.types[name]
        whole = I if type_.grad else R
        if not type_.shape:
            return self._canonical(("scalar", type_.grad), ((whole,) * self.mesh.ndim,))
        return self._canonical(("output", type_), _placeable(type_, self.mesh, replicated=whole))

    def _canonical(self, key: Any, states: tuple[Placements, ...]) -> tuple[Placements, ...]:
        """The same tuple object for the same key, so that equal layers give identical tables."""
        return self.shared_states.setdefault(key, states)

    # --- op spaces ---

    def _space(self, node: Node) -> OpSpace:
        key = signature(node, self.graph)
        if key not in self.spaces:
            self.spaces[key] = op_space(node, self.graph, self.mesh)
        return self.spaces[key]

    # --- solving ---

    def solve(self, memory_budget: float | None) -> Solution:
        tables = _EdgeTables(self.graph, self.mesh)
        for _, a, _, b, value, _ in self.links:
            tables.collect(value, a)
            tables.collect(value, b)
        edges = tuple(
            (self.index[u], self.index[v], tables.table(value, a, b, mask, self._kind(value) == "parameter"))
            for u, a, v, b, value, mask in self.links
        )
        network = CostNetwork(tuple(self.seconds), edges)
        log.info("cost network: %d variables, %d edges", len(self.seconds), len(edges))
        if memory_budget is None:
            return solve(network)
        return solve(network, memory=Memory(self._memory(), memory_budget))

    def _memory(self) -> tuple[np.ndarray, ...]:
        """Bytes per rank that each state of each variable keeps for the whole step."""
        usage = [np.zeros(len(s)) for s in self.seconds]
        for value in self.graph.inputs:
            if value.kind == "parameter":
                type_ = self.graph.types[value.name]
                states = self.variables[value.name]
                usage[self.index[value.name]] = np.array([state_bytes(type_, s, self.mesh) for s in states])
        return tuple(usage)

    def assignment(self, solution: Solution) -> Assignment:
        chosen = {v: states[solution.choice[self.index[v]]] for v, states in self.variables.items()}
        layouts: dict[str, Layout] = {}
        choices: dict[str, tuple[Strategy, ...]] = {}
        for value in self.graph.inputs:
            layouts[value.name] = Layout(self.mesh, chosen[value.name])
        for node in self.graph.nodes:
            space = self._space(node)
            state = solution.choice[self.index[f"node:{node.name}"]]
            choices[node.name] = space.choices[state]
            for slot, name in enumerate(node.outputs):
                layouts[name] = Layout(self.mesh, space.outputs[slot][state])
        shared = {v.removeprefix("shared:"): Layout(self.mesh, s) for v, s in chosen.items() if v.startswith("shared:")}
        outputs = tuple(
            Layout(self.mesh, chosen[f"out:{i}"]) if isinstance(out, Ref) else None
            for i, out in enumerate(self.graph.outputs)
        )
        return Assignment(
            self.mesh, layouts, shared, choices, outputs, solution, frozenset(self.constraints) & set(shared)
        )


def state_bytes(type_: TensorType, placements: Placements, mesh: Mesh) -> float:
    """Bytes per rank for a parameter: value, and when trained its gradient and Adam's two float32 moments."""
    numel = costs.local_numel(type_, placements, mesh)
    each = type_.dtype.itemsize
    return numel * (2 * each + 2 * max(4, each) if type_.grad else each)


@dataclass
class _EdgeTables:
    """Redistribution seconds between layouts, one matrix per tensor type, cut per edge."""

    graph: Graph
    mesh: Mesh
    known: dict[TensorType, dict[Placements, int]] = field(default_factory=dict)
    matrices: dict[tuple[TensorType, bool], np.ndarray] = field(default_factory=dict)
    codes: dict[tuple[TensorType, int], tuple[np.ndarray, Sequence[Placements]]] = field(default_factory=dict)
    tables: dict[Any, np.ndarray] = field(default_factory=dict)

    def collect(self, value: str, placed: Sequence[Placements]) -> None:
        type_ = self.graph.types[value]
        if (type_, id(placed)) in self.codes:
            return
        known = self.known.setdefault(type_, {})
        codes = np.array([known.setdefault(p, len(known)) for p in placed], dtype=np.int64)
        self.codes[type_, id(placed)] = (codes, placed)

    def table(
        self,
        value: str,
        a: Sequence[Placements],
        b: Sequence[Placements],
        mask: np.ndarray | None,
        parameter: bool,
    ) -> np.ndarray:
        type_ = self.graph.types[value]
        key = (type_, id(a), id(b), parameter, None if mask is None else mask.tobytes())
        if key not in self.tables:
            table = self._matrix(type_, parameter)[np.ix_(self.codes[type_, id(a)][0], self.codes[type_, id(b)][0])]
            self.tables[key] = table if mask is None else table * mask[None, :]
        return self.tables[key]

    def _matrix(self, type_: TensorType, parameter: bool) -> np.ndarray:
        if (type_, parameter) not in self.matrices:
            layouts = [Layout(self.mesh, p) for p in self.known[type_]]
            matrix = cost_matrix(layouts, layouts, type_.shape, type_.dtype, type_.grad, type_.unknown)
            if parameter and type_.grad:
                # A gathered parameter is not kept: it is gathered once more in the backward (FSDP).
                plain = [layout.without_gradient() for layout in layouts]
                gathered = np.array([[_gathers(a, b) for b in layouts] for a in layouts])
                matrix = matrix + gathered * cost_matrix(plain, plain, type_.shape, type_.dtype, False)
            self.matrices[type_, parameter] = matrix
        return self.matrices[type_, parameter]


def _gathers(source: Layout, target: Layout) -> bool:
    """Whether an axis that cuts the source leaves the target whole."""
    pairs = zip(source.placements, target.placements, strict=True)
    return any(isinstance(a, Shard) and is_whole(b) for a, b in pairs)


def _operands(node: Node, space: OpSpace) -> list[tuple[str, Sequence[Placements], np.ndarray | None]]:
    """(value, placements per choice, mask) per operand; a value read twice pays only where the layouts differ."""
    seen: dict[str, Sequence[Placements]] = {}
    result: list[tuple[str, Sequence[Placements], np.ndarray | None]] = []
    for name, placed in zip(node.inputs, space.inputs, strict=True):
        if name not in seen:
            seen[name] = placed
            result.append((name, placed, None))
            continue
        differs = np.array([float(p != q) for p, q in zip(seen[name], placed, strict=True)])
        if differs.any():
            result.append((name, placed, differs))
    return result


def signature(node: Node, graph: Graph) -> Any:
    """Equal for nodes that have the same strategies at the same cost."""
    numbers: dict[str, int] = {}

    def typed(ref: Ref) -> Any:
        return (numbers.setdefault(ref.name, len(numbers)), graph.types[ref.name])

    arguments = map_refs((node.args, dict(node.kwargs)), typed)
    return (node.op, repr(arguments), tuple(graph.types[o] for o in node.outputs))


def op_space(node: Node, graph: Graph, mesh: Mesh) -> OpSpace:
    """All combinations of per-axis strategies that the sizes allow; of equals in layout only the cheapest stays."""
    per_axis = axis_strategies(node, graph)
    grads_in = [graph.types[name].grad for name in node.inputs]
    grads_out = [graph.types[name].grad for name in node.outputs]
    rule = rule_for(node.op)
    flops = costs.node_flops(node, graph, rule)
    best: dict[Any, tuple[float, tuple[Strategy, ...]]] = {}
    for choice in itertools.product(*(_fitting(per_axis, ranks) for ranks in mesh.shape)):
        if not _fits(choice, mesh):
            continue
        ins = tuple(tuple(canonical(s.inputs[i], g) for s in choice) for i, g in enumerate(grads_in))
        outs = tuple(tuple(canonical(s.outputs[i], g) for s in choice) for i, g in enumerate(grads_out))
        seconds = costs.node_seconds(node, graph, mesh, choice, flops, (*ins, *outs))
        if rule is not None and rule.collectives is not None and any(s.divides for s in choice):
            internal = rule.collectives(site_of(node, graph, mesh, choice, (*ins, *outs)))
            if internal and _single_in_double(node, graph):
                continue
            seconds += sum(costs.internal_cost(c, mesh)[1] for c in internal)
        if (ins, outs) not in best or seconds < best[ins, outs][0]:
            best[ins, outs] = (seconds, choice)
    return OpSpace(
        choices=tuple(choice for _, choice in best.values()),
        seconds=np.array([seconds for seconds, _ in best.values()]),
        inputs=tuple(tuple(ins[i] for ins, _ in best) for i in range(len(grads_in))),
        outputs=tuple(tuple(outs[i] for _, outs in best) for i in range(len(grads_out))),
    )


def axis_strategies(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """The strategies of ``node`` along one axis; an op without a rule, or of unknown size, runs on full tensors."""
    rule = rule_for(node.op)
    found: tuple[Strategy, ...] = ()
    if rule is not None and not is_rigid(node, graph.types, rule):
        types = [graph.types[name] for name in (*node.inputs, *node.outputs)]
        try:
            found = tuple(s for s in rule.strategies(node, graph) if leaves_whole(s, types))
        except RuleError:
            if not any(t.unknown for t in types):
                raise  # else: lengths that are equal may have different estimates
    return _exact(found or whole(len(node.inputs), len(node.outputs)), node, graph)


_SINGLE = (torch.float32, torch.complex64)


def _exact(strategies: tuple[Strategy, ...], node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """Without those under which float32 values, or gradients of them, are summed otherwise than on one device.

    Only where the model is float64. Sums over rows are taken in an order that depends on the number of columns.
    """
    if not _single_in_double(node, graph):
        return strategies
    types = [graph.types[n] for n in (*node.inputs, *node.outputs)]
    rows = _sums_rows(node, graph)

    def is_exact(type_: TensorType, placement: Placement) -> bool:
        if type_.dtype not in _SINGLE or isinstance(placement, Invariant):
            return True
        if isinstance(placement, Shard):  # complex products round differently in a vector and at its end
            return not rows and not type_.dtype.is_complex
        return isinstance(placement, Replicate) and not type_.grad

    return tuple(s for s in strategies if all(map(is_exact, types, (*s.inputs, *s.outputs))))


def _sums_rows(node: Node, graph: Graph) -> bool:
    """Whether an operand with a gradient is broadcast over a dim before the last, so that its gradient is a sum."""
    for out in node.outputs:
        shape = graph.types[out].shape
        for type_ in (graph.types[n] for n in node.inputs):
            padded = (1,) * (len(shape) - len(type_.shape)) + type_.shape
            spread = len(padded) == len(shape) and all(a in (1, n) for a, n in zip(padded, shape, strict=True))
            if type_.grad and spread and padded[:-1] != shape[:-1]:
                return True
    return False


def _single_in_double(node: Node, graph: Graph) -> bool:
    """Whether ``node`` computes in float32 while the model is float64, as norms and losses often do.

    Whoever trains in float64 compares digits, and a float32 sum in another order differs in the eighth.
    """
    single = any(graph.types[n].dtype in _SINGLE for n in (*node.inputs, *node.outputs))
    return single and any(t.dtype == torch.float64 and t.grad for t in graph.types.values())


def canonical(placement: Placement, grad: bool) -> Placement:
    """Where no gradient flows, Invariant and Replicate are one."""
    return R if isinstance(placement, Invariant) and not grad else placement


def _fitting(strategies: Sequence[Strategy], ranks: int) -> list[Strategy]:
    if ranks == 1:  # nothing to divide: one strategy is enough, and it costs no conversion of I and R
        return [s for s in strategies if s.label == "I"] or list(strategies[:1])
    return [s for s in strategies if s.allows((ranks,))]


def _fits(choice: Sequence[Strategy], mesh: Mesh) -> bool:
    """Whether all axes on one factor together still leave a chunk for every rank."""
    used: dict[str, list[int]] = {}
    for strategy, ranks in zip(choice, mesh.shape, strict=True):
        used.setdefault(strategy.label, []).append(ranks)
    return all(strategy.allows(used[strategy.label]) for strategy in choice)


def site_of(node: Node, graph: Graph, mesh: Mesh, choice: tuple[Strategy, ...], placed: Sequence[Placements]) -> Site:
    """``node`` with its layouts; ``placed``: placements of every operand, then of every result."""
    layouts = tuple(Layout(mesh, p) for p in placed)
    return Site(node, graph, mesh, layouts[: len(node.inputs)], layouts[len(node.inputs) :], choice)


def _placeable(type_: TensorType, mesh: Mesh, replicated: Placement | None = None) -> tuple[Placements, ...]:
    """Every assignment of shards that leaves each rank a chunk; whole axes are ``replicated`` (None: R and I)."""
    whole: tuple[Placement, ...] = (replicated,) if replicated is not None else (R, I) if type_.grad else (R,)
    per_axis = [
        (*whole, *(Shard(d) for d, n in enumerate(type_.shape) if ranks > 1 and n >= ranks and not type_.unknown))
        for ranks in mesh.shape
    ]
    return tuple(p for p in itertools.product(*per_axis) if _leaves_chunks(type_.shape, p, mesh))


def _leaves_chunks(shape: tuple[int, ...], placements: Placements, mesh: Mesh) -> bool:
    ranks = (
        math.prod(r for p, r in zip(placements, mesh.shape, strict=True) if p == Shard(d)) for d in range(len(shape))
    )
    return all(n >= cut or cut == 1 for n, cut in zip(shape, ranks, strict=True))


def is_whole(placement: Placement) -> bool:
    """Whether every rank holds the whole value."""
    return isinstance(placement, Replicate | Invariant)

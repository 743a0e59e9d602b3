"""The divided dim of every value: rules along a mesh axis whose ranks run one after another and
send nothing. A replicated value is recomputed in every micro-batch, partial sums are summed at
the outputs only, and an op that needs all micro-batches in between has no strategy."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from autoshard.errors import PlanError
from autoshard.layout import Grouped, P, Partial, Placement, R, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.analyses import outputs_reached, values_reached
from autoshard.passes.ir.assignment import Strategy, normalize_placement
from autoshard.passes.ir.graph import DimSegments, Graph, Node, Ref, walk
from autoshard.passes.ir.program import SPEC_TYPES, LocalCall, Offset
from autoshard.passes.microbatch.losses import (
    averaged_loss,
    node_location,
    output_description,
    output_names,
    own_labels_reason,
)
from autoshard.passes.microbatch.strategies import as_single_dim, concat_strategies, partial_with_constant
from autoshard.passes.propagate.hints import MICRO_BATCH
from autoshard.passes.propagate.op_space import axis_strategies, internal_collectives, op_site
from autoshard.passes.propagate.prices.roofline import node_flops
from autoshard.passes.propagate.recompute import duplicable_nodes
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.facts import is_random
from autoshard.passes.rules.families.factory import FILL_OPS
from autoshard.passes.search import CostNetwork, solve


@dataclass(frozen=True)
class Separation:
    """The strategy of every node along the micro-batch axis, and the placement of outputs."""

    mesh: Mesh
    choices: dict[str, Strategy]
    placed: dict[str, Placement]
    """value → its placement; each reader of an input states its own"""
    outputs: tuple[Placement | None, ...]

    @property
    def count(self) -> int:
        return self.mesh.size


def separation(graph: Graph, count: int, asked: Mapping[str, Placement]) -> Separation:
    """Divide ``graph`` into ``count`` micro-batches. ``asked``: input → placement from hints.
    Raises :class:`PlanError` that names the op which needs the full batch."""
    network = _SeparationNetwork(graph, Mesh({MICRO_BATCH: count}), asked)
    network.build()
    return network.solved()


@dataclass
class _SeparationNetwork:
    graph: Graph
    mesh: Mesh
    asked: Mapping[str, Placement]
    variables: dict[str, Sequence[Any]] = field(default_factory=dict)
    costs: dict[str, np.ndarray] = field(default_factory=dict)
    edges: list[tuple[str, str, np.ndarray]] = field(default_factory=list)
    """(producer, reader, table: inf where impossible)"""
    joined: dict[str, DimSegments] = field(default_factory=dict)
    """value → its concatenated dim, and the ratio of segments"""
    input_free: frozenset[str] = frozenset()
    """values that depend on no input: a micro-batch may add its share to a sum"""
    sliceable: frozenset[str] = frozenset()
    """values without gradient that are made once, such as draws: a micro-batch may slice them"""

    def build(self) -> None:
        graph = self.graph
        self.input_free = _input_free_values(graph)
        self.sliceable = _sliceable_values(graph)
        free = {i.name for i in graph.of_kind("input") if not graph.types[i.name].unknown}
        made: dict[str, tuple[str, list[Placement]]] = {
            i.name: (f"input:{i.name}", [R]) for i in graph.inputs if i.name not in free
        }
        for i in graph.inputs:
            self._add(f"input:{i.name}", [R], [0.0])
        for node in graph.nodes:
            strategies = self._strategies(node)
            work = 1.0 + node_flops(node, graph) + sum(graph.types[o].numel for o in node.outputs)
            costs = [0.0 if s.divides else work for s in strategies]
            for position, name in enumerate(node.inputs):
                uses = [normalize_placement(s.inputs[position], graph.types[name].grad) for s in strategies]
                if name in free:
                    costs = [c + self._of_input(name, p) for c, p in zip(costs, uses, strict=True)]
                else:
                    self._connect(name, made[name], f"node:{node.name}", uses)
            self._add(f"node:{node.name}", strategies, costs)
            for slot, name in enumerate(node.outputs):
                placed = [normalize_placement(s.outputs[slot], graph.types[name].grad) for s in strategies]
                made[name] = (f"node:{node.name}", placed)
                self.joined.update((name, (p.dim, p.parts)) for p in placed if isinstance(p, Grouped))
        for number, out in enumerate(graph.outputs):
            if isinstance(out, Ref) and out.name in made:
                states = self._exits(out.name)
                self._add(f"out:{number}", states, [0.0] * len(states))
                self._connect(out.name, made[out.name], f"out:{number}", states)
        for fqn, name in graph.mutations.items():
            if name in made:
                self._add(f"mutation:{fqn}", [R], [0.0])
                self._connect(name, made[name], f"mutation:{fqn}", [R])

    def _add(self, variable: str, states: Sequence[Any], costs: Sequence[float]) -> None:
        self.variables[variable], self.costs[variable] = states, np.array(costs)

    def _connect(self, value: str, made: tuple[str, list[Placement]], reader: str, uses: Sequence[Placement]) -> None:
        shares, parts = value in self.input_free, value in self.sliceable and reader.startswith("node:")

        def cost(a: Placement, b: Placement) -> float:
            if a == b or (shares and (a, b) == (R, P)):
                return 0.0
            return 1.0 if parts and a == R and isinstance(b, Shard) and not isinstance(b, Grouped) else np.inf

        table = [[cost(a, b) for b in uses] for a in made[1]]
        self.edges.append((made[0], reader, np.array(table).reshape(len(made[1]), len(uses))))

    def _of_input(self, name: str, placement: Placement) -> float:
        """Cost of reading an input as ``placement``: any dim may be the batch, unless hints say."""
        if self.asked.get(name, placement) != placement:
            return np.inf
        if not isinstance(placement, Shard) or isinstance(placement, Grouped):
            return 0.0 if placement == R else np.inf
        return 1e-3 * placement.dim  # the first dim that can be divided is the batch

    def _exits(self, name: str) -> list[Placement]:
        """Placements of an output: the loss must be a sum, others may be concatenated."""
        type_ = self.graph.types[name]
        if not type_.shape and type_.grad:
            return [P]
        return [R, P, *(Shard(d) for d in range(len(type_.shape)))]

    def _strategies(self, node: Node) -> list[Strategy]:
        """Strategies of the node that need no communication between micro-batches."""
        every = axis_strategies(node, self.graph)
        if not (alone := [s for s in every if s.label != "I" and self._stands_alone(s, node)]):
            raise PlanError(f"{node_location(node)} cannot run in micro-batches")
        joined = concat_strategies(alone, node, self.graph, self.mesh.size, self.joined)
        return [*alone, *joined, *partial_with_constant(node, self.graph)]

    def _stands_alone(self, strategy: Strategy, node: Node) -> bool:
        graph, count = self.graph, self.mesh.size
        names = node.values
        placed = tuple(
            (normalize_placement(p, graph.types[n].grad),) for n, p in zip(names, strategy.placements, strict=True)
        )
        for name, (placement,) in zip(names, placed, strict=True):
            type_ = graph.types[name]
            if isinstance(placement, Shard) and (type_.shape[placement.dim] % count or type_.unknown):
                return False
            if isinstance(placement, Partial) and placement != P:
                return False
        if not strategy.divides:
            return True
        if internal_collectives(node, graph, self.mesh, (strategy,), placed):
            return False
        if is_random(node):  # draws for the full batch, then slices
            return True
        return is_torch_only(local_call(node, graph, self.mesh, strategy))

    def solved(self) -> Separation:
        chosen = self._chosen(self.costs)
        if chosen is None:
            raise PlanError(self._why_not())
        graph = self.graph
        choices = {n.name: chosen[f"node:{n.name}"] for n in graph.nodes}
        outputs = tuple(chosen.get(f"out:{i}", R) if isinstance(o, Ref) else None for i, o in enumerate(graph.outputs))
        return Separation(self.mesh, choices, self._placed(chosen, graph.nodes), outputs)

    def _chosen(self, costs: Mapping[str, np.ndarray]) -> dict[str, Any] | None:
        """The cheapest consistent states of these variables, or None."""
        place = {variable: i for i, variable in enumerate(costs)}
        edges = tuple((place[a], place[b], table) for a, b, table in self.edges if a in place and b in place)
        try:
            choice = solve(CostNetwork(tuple(costs.values()), edges)).choice
        except PlanError:
            return None
        return {variable: self.variables[variable][choice[i]] for variable, i in place.items()}

    def _placed(self, chosen: Mapping[str, Any], nodes: Sequence[Node]) -> dict[str, Placement]:
        """Value → placement, of the results of ``nodes``."""
        types = self.graph.types
        return {
            name: normalize_placement(chosen[f"node:{n.name}"].outputs[slot], types[name].grad)
            for n in nodes
            for slot, name in enumerate(n.outputs)
        }

    def _why_not(self) -> str:
        """Error text: where the full batch would be needed."""
        count, types = self.mesh.size, self.graph.types
        for i in self.graph.inputs:
            asked, shape = self.asked.get(i.name), types[i.name].shape
            if isinstance(asked, Shard) and asked.dim < len(shape) and shape[asked.dim] % count:
                return (
                    f"micro_batches={count}: the hint makes dim {asked.dim} of {i.fqn!r}, of shape {list(shape)}, "
                    f"the batch, but {shape[asked.dim]} rows do not divide into {count} micro-batches. Choose a "
                    f"number of micro-batches that divides it, or pad it to a multiple of {count}."
                )
        if self.asked:
            named = ", ".join(f"{i.fqn!r}: {self.asked[i.name]}" for i in self.graph.inputs if i.name in self.asked)
            return (
                f"micro_batches={count}: the model cannot divide its inputs into micro-batches "
                f"as the hints ask ({named}). Name other dims for the axis {MICRO_BATCH!r}, or "
                "leave the hint out: the dims are then searched."
            )
        lengths = [types[i.name].shape[0] for i in self.graph.of_kind("input") if types[i.name].shape]
        longest, others = max(lengths, default=0), any(n % count == 0 for n in lengths)
        jagged = " If its rows are jagged bags, they are not a batch: use micro_batches=1." if others else ""
        for i in self.graph.inputs:
            shape = types[i.name].shape
            if i.kind == "input" and shape and shape[0] % count and shape[0] > min(1, longest - 1):  # 1 is no batch
                return (
                    f"micro_batches={count}: input {i.fqn!r} has shape {list(shape)}, and its batch of {shape[0]} does not "
                    f"divide into {count}. Choose a number of micro-batches that divides the batch.{jagged}"
                )
        if (node := self._culprit()) is not None:
            return f"micro_batches={count}: {self._whole_for(node)}"
        for fqn in self.graph.mutations:
            if self._divided(len(self.graph.nodes), [f"mutation:{fqn}"]) is None:
                return (
                    f"micro_batches={count}: {fqn!r} is written with a value of the full batch, such as a mean, but "
                    "a micro-batch has only its own samples. Use micro_batches=1, or write a value of each sample."
                )
        return (
            f"micro_batches={count}: the loss is not a sum over micro-batches. Every operation before "
            "it must work on each sample alone, and only the last may sum or average over the batch."
        )

    def _culprit(self) -> Node | None:
        """The first op up to which a value with a gradient can be neither sharded nor Partial."""
        nodes = self.graph.nodes
        if self._divided(len(nodes)) is not None:
            return None
        return nodes[bisect.bisect(range(1, len(nodes)), False, key=lambda n: self._divided(n) is None)]

    def _divided(self, number: int, ends: Sequence[str] = ()) -> dict[str, Any] | None:
        """States in which the first ``number`` ops (and ``ends``) repeat no work, or None."""
        types = self.graph.types
        costs = {v: cost for v, cost in self.costs.items() if v.startswith("input:") or v in ends}
        for node in self.graph.nodes[:number]:
            variable = f"node:{node.name}"
            wanted = [
                slot for slot, name in enumerate(node.outputs) if name in self.batch_dependent and types[name].grad
            ]
            # products: no partial sums, since a summed dim is not the batch
            refused = {R, P} if node_flops(node, self.graph) else {R}
            wrong = [
                any(normalize_placement(s.outputs[i], True) in refused for i in wanted)
                for s in self.variables[variable]
            ]
            costs[variable] = np.where(wrong, np.inf, self.costs[variable])
        return self._chosen(costs)

    @cached_property
    def batch_dependent(self) -> frozenset[str]:
        """Values that depend on the batch: they must be sharded or Partial."""
        graph, count = self.graph, self.mesh.size
        given = (i.name for i in graph.of_kind("input"))
        found = {name for name in given if any(n % count == 0 for n in graph.types[name].shape)}
        return values_reached(graph, found) - self.input_free

    def _whole_for(self, node: Node) -> str:
        """Error text: the values that ``node`` needs of the full batch, and what to do."""
        graph, number = self.graph, self.graph.nodes.index(node)
        if (loss := averaged_loss(node, graph)) is not None:
            return own_labels_reason(loss, graph)
        placed = self._placed(self._divided(number) or {}, graph.nodes[:number])
        reads = {n: placed.get(n, R) for n in node.inputs if n in self.batch_dependent}
        sums = [f"{n} ({node_location(graph.producers[n])})" for n, p in reads.items() if p == P]
        needed = sums or [n for n, p in reads.items() if p != R] or [*(reads or node.inputs)]
        if is_random(node):
            return (
                f"{node_location(node)} draws numbers, and values of the full batch decide how many each sample takes, "
                "so a micro-batch would draw others. Use micro_batches=1, or a layer that draws one number per element."
            )
        balancing = (
            " A load-balancing loss of experts multiplies two means over the batch: leave it out "
            "(transformers: output_router_logits=False)."
        )
        return (
            f"{node_location(node)}{self._term_with(node)} needs {', '.join(needed)} of the full "
            "batch in the middle of the model, but a micro-batch has only its own samples. Use "
            "micro_batches=1, or an operation that works on each sample "
            f"alone.{balancing if len(sums) > 1 else ''}"
        )

    def _term_with(self, node: Node) -> str:
        """The output scalar besides the loss that ``node`` computes, as part of a sentence."""
        graph, names = self.graph, output_names(self.graph.out_spec)
        reached = outputs_reached(graph)
        for i, o in enumerate(graph.outputs):
            is_term = isinstance(o, Ref) and not graph.types[o.name].shape and names.get(i, "loss") != "loss"
            if is_term and any(reached[name] >> i & 1 for name in node.outputs):
                return f", for {output_description(i, names)},"
        return ""


def _input_free_values(graph: Graph) -> frozenset[str]:
    """Float values that depend on no input: parameters, buffers, penalties on weights."""
    found = {i.name for i in graph.inputs if i.kind != "input"}
    for node in graph.nodes:
        if node.op in FILL_OPS or found.issuperset(node.inputs):  # also draws: all make the same
            found.update(node.outputs)
    return frozenset(name for name in found if graph.types[name].dtype.is_floating_point)


def _sliceable_values(graph: Graph) -> frozenset[str]:
    """Values of known length without gradient that depend on random draws."""
    free, types = duplicable_nodes(graph), graph.types
    made = (name for node in graph.nodes if node.name not in free for name in node.outputs)
    return frozenset(n for n in made if not (types[n].grad or types[n].unknown) and types[n].number is None)


def local_call(node: Node, graph: Graph, mesh: Mesh, strategy: Strategy) -> LocalCall:
    """The node's local form in one micro-batch."""
    rule, strategy = rule_for(node.op), as_single_dim(strategy)
    if rule is None or rule.local is None:
        return LocalCall(node.op, node.args, node.kwargs)
    names = node.values
    pairs = zip(names, strategy.placements, strict=True)
    placed = tuple((normalize_placement(p, graph.types[n].grad),) for n, p in pairs)
    call = rule.local(replace(op_site(node, graph, mesh, (strategy,), placed), in_micro_batch=True))
    specs = [x for x in call.args if isinstance(x, LocalCall) and x.fn in SPEC_TYPES]
    kwargs = {name: value for part in (*specs, call) for name, value in part.kwargs.items()}
    if rule.named and call.fn == rule.named and kwargs.keys() <= {a.name for a in node.op._schema.arguments}:
        args = tuple(x for x in call.args if x not in specs)
        given = {a.name for a in node.op._schema.arguments[: len(args)]}
        same = {k: v for k, v in node.kwargs.items() if k not in given and not isinstance(v, Ref)}
        return LocalCall(node.op, args, {**same, **kwargs})
    return call


def is_torch_only(call: LocalCall) -> bool:
    """Whether a local form has torch ops only and does not use the micro-batch's number."""
    return not any(isinstance(x, Offset) or (isinstance(x, LocalCall) and isinstance(x.fn, str)) for x in walk(call))

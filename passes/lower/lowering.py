"""Lowering (SPMD partitioning): a graph with chosen layouts becomes a program on local tensors.
Invariant: a redistribution stands exactly where the layout of a use differs from that of the definition. Each (value, layout)
is made once, from the cheapest layout that exists at that point."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from autoshard.errors import PlanError
from autoshard.layout import Layout
from autoshard.passes.ir.assignment import Assignment, cached_layout, is_fully_replicated
from autoshard.passes.ir.graph import Graph, Node, Ref, map_refs, refs
from autoshard.passes.ir.program import LocalCall, Program, Statement
from autoshard.passes.ir.sizes import add_conditions
from autoshard.passes.lower.blocks import block_of, hoist_redistributions
from autoshard.passes.lower.bucket import bucket_parameters
from autoshard.passes.lower.channels import channels_last
from autoshard.passes.lower.coalescing import coalesce_collectives, group_look_ups
from autoshard.passes.lower.collective_matmul import fuse_collective_matmuls
from autoshard.passes.lower.liveness import free_after_last_use, write_states_in_place
from autoshard.passes.lower.mixed_precision import cast_parameters
from autoshard.passes.lower.recompute import group_recomputed
from autoshard.passes.propagate.op_space import internal_collectives
from autoshard.passes.redistribute import RedistributionStep, redistribution, runtime_call
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.base import Site
from autoshard.passes.rules.facts import is_random
from autoshard.passes.rules.restrictions import needs_full_tensors


def lower_graph(graph: Graph, assignment: Assignment) -> Program:
    return _Lowering(graph, assignment).run()


def with_length_conditions(program: Program, noted: Iterable[Any]) -> Program:
    """``program`` with decisions on lengths (see ``ir.sizes.noting``) as conditions."""
    symbols = add_conditions(program.graph.symbols, noted)
    return replace(program, graph=replace(program.graph, symbols=symbols)) if symbols.read else program


class _Lowering:
    def __init__(self, graph: Graph, assignment: Assignment) -> None:
        self.assignment = assignment
        self.mesh = assignment.mesh
        self.types = dict(graph.types)
        self.graph = replace(graph, types=self.types)
        self.layouts: dict[str, Layout] = dict(assignment.layouts)
        self.made: dict[str, dict[Layout, str]] = {}
        """redistributed value → layout → local name"""
        self.parameters = {i.name for i in graph.of_kind("parameter")}
        self.statements: list[Statement] = []
        self.pinned: set[str] = set()
        """hinted values that exist in their shared layout by now"""
        self.names = dict.fromkeys(graph.types, 0)

    def run(self) -> Program:
        for node in self.graph.nodes:
            self._node(node)
        outputs = tuple(
            Ref(self._get(out.name, layout, None)) if isinstance(out, Ref) and layout is not None else out
            for out, layout in zip(self.graph.outputs, self.assignment.outputs, strict=True)
        )
        written = self.assignment.written
        mutations = {fqn: self._get(name, written(fqn), None) for fqn, name in self.graph.mutations.items()}
        return Program(
            self.graph, self.mesh, self.assignment, tuple(self.statements), self.types, self.layouts, outputs, mutations
        )

    def _node(self, node: Node) -> None:
        choice = self.assignment.choices[node.name]
        ins: list[Layout] = []
        names: list[str] = []
        for i, value in enumerate(node.inputs):
            layout = cached_layout(self.mesh, self.assignment.use(node, i))
            ins.append(layout)
            names.append(self._get(value, layout, node))
        supply = iter(names)
        local: Node = node if tuple(names) == node.inputs else map_refs(node, lambda _: Ref(next(supply)))
        outs = tuple(self.layouts[o] for o in node.outputs)
        site = Site(local, self.graph, self.mesh, tuple(ins), outs, choice)
        rule = rule_for(node.op)
        # random values are drawn once for all ranks
        if needs_full_tensors(node, self.types, rule) and not is_random(node):
            rule = None
        if rule is not None and rule.local is not None:
            call = rule.local(site)
        elif rule is None and is_random(node):
            call = LocalCall("draw_whole", (node.op._schema.name, *local.args), local.kwargs)
        else:
            call = LocalCall(node.op, local.args, local.kwargs)
        placed = tuple(layout.placements for layout in (*ins, *outs))
        internal = internal_collectives(node, self.graph, self.mesh, choice, placed) if rule is not None else ()
        slots = dict(zip(node.output_slots, node.outputs, strict=True))
        outputs = tuple(slots.get(i, "_") for i in range(max(slots, default=-1) + 1))
        self.statements.append(
            Statement(outputs, call, tuple(map(self.layouts.get, outputs)), node, block_of(node), internal=internal)
        )

    def _get(self, value: str, layout: Layout, reader: Node | None) -> str:
        """The local name of ``value`` in ``layout``, redistributed unless it exists."""
        if layout is self.layouts[value] and value not in self.assignment.pinned:
            return value
        shared = self.assignment.shared.get(value)
        if shared is not None and value in self.assignment.pinned and value not in self.pinned:
            self.pinned.add(value)
            self.made[value] = {shared: self._get(value, shared, reader)}
        if value not in self.made:
            self.made[value] = {self.layouts[value]: value}
        made = self.made[value]
        if layout in made:
            return made[layout]
        if shared is not None and shared not in made and shared != layout:
            self._get(value, shared, reader)
        type_ = self.types[value]
        what = (type_.shape, self.mesh, type_.dtype, type_.moves)
        plans = [redistribution(src, layout, *what, minimize="seconds", closed=type_.unknown) for src in made]
        best = min(plans, key=lambda r: r.seconds)
        name = made[best.src]
        for step in best.steps:
            if step.dst in made:
                name = made[step.dst]
                continue
            name = self._step(value, name, step, reader)
        if layout not in made:
            raise PlanError(f"redistribution of {value} from {best.src} to {layout} ends in another layout: {best}")
        return name

    def _step(self, value: str, source: str, step: RedistributionStep, reader: Node | None) -> str:
        made = self.made[value]
        self.names[value] += 1
        name = f"{value}__{self.names[value]}"
        made[step.dst] = name
        self.types[name] = self.types[value]
        self.layouts[name] = step.dst
        fn, args, kwargs = runtime_call(step)
        call = LocalCall(fn, (Ref(source), *args), kwargs)
        parameter = value in self.parameters
        at = block_of(reader)
        self.statements.append(Statement((name,), call, (step.dst,), reader, at, step, value, parameter))
        return name


def count_labels_locally(program: Program) -> Program:
    """``program`` whose losses count labels locally, if these are replicated before sharding."""
    whole = {i.name: i.name for i in program.graph.inputs if _is_local_replicated(program, i.name)}
    statements = []
    for s in program.statements:
        statements.append(_with_local_count(s, program, whole))
        for name in s.outputs:
            if name != "_" and _is_local_replicated(program, name):
                whole.setdefault(program.values.get(name, name), name)
    return replace(program, statements=tuple(statements))


def _with_local_count(s: Statement, program: Program, whole: dict[str, str]) -> Statement:
    """``s`` with the replicated labels as the argument ``count_labels_locally``."""
    if not any(c.spared is not None for c in s.internal):
        return s
    labels = next(refs(s.call.args[1])).name
    name = whole.get(program.values.get(labels, labels))
    if name is None:
        return s
    call = LocalCall(s.call.fn, s.call.args, {**s.call.kwargs, "counted": Ref(name)})
    return replace(s, call=call, internal=tuple(c for c in s.internal if c.spared is None))


def _is_local_replicated(program: Program, name: str) -> bool:
    return is_fully_replicated(program.layouts[name].placements)


def lower_assignment(assignment: Assignment) -> Program:
    """The program of an assignment: redistributions are statements, merged where possible."""
    program = lower_graph(assignment.graph, assignment)
    program = count_labels_locally(program)
    program = cast_parameters(program)
    program = fuse_collective_matmuls(program)
    program = group_look_ups(program)
    program = coalesce_collectives(program)
    program = hoist_redistributions(program)
    program = bucket_parameters(program)
    program = write_states_in_place(program)
    program = channels_last(program)
    program = group_recomputed(program)
    return free_after_last_use(program)

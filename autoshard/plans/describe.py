"""A program as a plan: what a user sees, and what another compilation can reuse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autoshard.layout import Layout, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import canonical
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.program import Program, Statement
from autoshard.passes.ir.sizes import Size, free_symbols
from autoshard.passes.lower.blocks import module_of
from autoshard.passes.lower.bucket import regathered
from autoshard.passes.propagate import cost as costs
from autoshard.passes.propagate.alternatives import alternatives, cheapest_use
from autoshard.passes.propagate.network import state_bytes
from autoshard.passes.propagate.op_space import axis_strategies
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.checks import has_rule
from autoshard.passes.rules.facts import is_view
from autoshard.plans.plan import TOGETHER, Choice, Collective, Cost, Plan


def describe(program: Program, title: str = "") -> Plan:
    """The plan of a program: what a user sees, and what another compilation can reuse."""
    graph, mesh, assignment = program.graph, program.mesh, program.assignment
    found = tuple(_collectives(program))
    others = alternatives(program)
    public = {i.name: i.fqn for i in graph.inputs}
    choices = {}
    flops = share = compute = 0.0
    for node in graph.nodes:
        choice = assignment.choices[node.name]
        work = costs.node_flops(node, graph, rule_for(node.op))
        seconds = _node_seconds(node, program, work)
        flops, share, compute = flops + work, share + work * costs.divided(choice, mesh), compute + seconds
        labels = tuple(s.label for s in choice)
        choices[node.name] = Choice(
            op=str(node.op),
            fqn=node.fqn,
            source=node.source,
            labels=labels,
            flops=work,
            seconds=seconds,
            has_rule=has_rule(node, graph),
            inputs=tuple(public.get(n, n) for n in node.inputs),
            outputs=node.outputs,
            uses=tuple(str(layout) for layout in _uses(node, program)),
            alternatives=others.get(node.name, ()),
        )
    kinds = {i.fqn: i.kind for i in graph.inputs}
    layouts = {public.get(n, n): layout for n, layout in assignment.layouts.items()}
    communication = sum(c.seconds for c in found)
    memory = sum(
        state_bytes(graph.types[i.name], assignment.layouts[i.name].placements, mesh)
        for i in graph.inputs
        if i.kind == "parameter"
    ) + _activation_bytes(program)
    total = compute + communication
    return Plan(
        mesh=mesh,
        layouts=layouts,
        collectives=found,
        cost=Cost(compute, communication, total, memory, flops, share),
        lower_bound=min(assignment.solution.lower_bound, total),
        choices=choices,
        shared={public.get(n, n): layout for n, layout in assignment.shared.items()},
        outputs=assignment.outputs,
        pinned=tuple(sorted(public.get(n, n) for n in assignment.pinned)),
        shapes={public.get(n, n): t.example.shape for n, t in graph.types.items()},
        kinds={n: kinds.get(n, "value") for n in layouts},
        notes=tuple(_notes(program, choices)),
        training=graph.training,
        title=title,
        modules={path: name for node in graph.nodes for path, name in node.module_types},
        dtypes={public.get(n, n): str(t.dtype).removeprefix("torch.") for n, t in graph.types.items()},
        differentiable=tuple(public.get(n, n) for n, t in graph.types.items() if t.grad),
    )


def _uses(node: Node, program: Program) -> Iterator[Layout]:
    """Per operand: the layout ``node`` reads it in."""
    choice, types = program.assignment.choices[node.name], program.graph.types
    for i, name in enumerate(node.inputs):
        yield Layout(program.mesh, [canonical(s.inputs[i], types[name].grad) for s in choice])


def _node_seconds(node: Node, program: Program, flops: float) -> float:
    choice = program.assignment.choices[node.name]
    types = program.graph.types
    placements = [tuple(canonical(s.inputs[i], types[n].grad) for s in choice) for i, n in enumerate(node.inputs)] + [
        program.assignment.layouts[n].placements for n in node.outputs
    ]
    return costs.node_seconds(node, program.graph, program.mesh, choice, flops, placements)


def _activation_bytes(program: Program) -> float:
    """What a training step keeps for the backward: every op's results that carry a gradient, views not counted."""
    if not program.graph.training:
        return 0.0
    kept = 0.0
    for node in program.graph.nodes:
        if is_view(node.op):
            continue
        for name in node.outputs:
            type_ = program.types[name]
            if type_.grad:
                numel = costs.local_numel(type_, program.layouts[name].placements, program.mesh)
                kept += numel * type_.dtype.itemsize
    return kept


def _collectives(program: Program) -> Iterator[Collective]:
    """Forward collectives in program order, then backward ones in reverse."""
    backward: list[Collective] = []
    again = regathered(program)
    for s in program.statements:
        if s.members and not s.parameter:
            later: list[Collective] = []
            yield from _together([c for part in s.members for c in _of_step(program, part, later, False)], program)
            backward.extend(_together(later, program))
        elif s.step is not None:  # of a bucket of parameters every member is listed
            for part in s.parts:
                yield from _of_step(program, part, backward, part.outputs[0] in again)
        elif s.node is not None:
            yield from _of_node(program, s, backward)
    yield from reversed(backward)


def _together(parts: Sequence[Collective], program: Program) -> Iterator[Collective]:
    """Collectives that are made by one call: as one."""
    if parts:
        moved, first = sum(c.bytes for c in parts), parts[0]
        seconds = program.mesh.link(first.axes).seconds(moved, program.mesh.size_of(first.axes))
        yield replace(first, bytes=moved, seconds=seconds, reason=TOGETHER.join(c.reason for c in parts))


def _of_step(program: Program, s: Statement, backward: list[Collective], again: bool) -> Iterator[Collective]:
    step, mesh = s.step, program.mesh
    if step is None:
        return
    public = next((i.fqn for i in program.graph.inputs if i.name == s.value), s.value)
    op = s.node.name if s.node is not None else ""
    fqn = module_of(s, program.graph)
    reason = f"{public}: {step.src} → {step.dst}"
    moved = step.forward_bytes + step.backward_bytes
    rate = step.seconds / moved if moved else 0.0
    if step.is_collective:
        seconds = step.forward_bytes * rate
        yield Collective(step.kind, step.group, "forward", step.forward_bytes, fqn, reason, public, seconds, op)
    if step.backward and program.types[s.value].grad:
        seconds = step.backward_bytes * rate
        backward.append(
            Collective(step.backward, step.group, "backward", step.backward_bytes, fqn, reason, public, seconds, op)
        )
    if again:
        seconds = mesh.link(step.axes).seconds(step.forward_bytes, mesh.size_of(step.axes))
        why = f"{reason} (gathered again)"
        backward.append(
            Collective(step.kind, step.group, "backward", step.forward_bytes, fqn, why, public, seconds, op)
        )


def _of_node(program: Program, s: Statement, backward: list[Collective]) -> Iterator[Collective]:
    """Collectives inside an op's local form."""
    mesh, node = program.mesh, s.node
    if node is None:
        return
    for c in s.internal:
        if mesh.size_of(c.axes) == 1 or (c.phase == "backward" and not program.graph.training):
            continue
        moved, seconds = costs.internal_cost(c, mesh)
        found = Collective(
            c.kind, c.axes, c.phase, moved, node.fqn, f"{node.op}: {c.what}", node.name, seconds, node.name
        )
        if c.phase == "forward":
            yield found
        else:
            backward.append(found)


def _notes(program: Program, choices: Mapping[str, Choice]) -> Iterator[str]:
    """What a user should know before he wonders."""
    mesh = program.mesh
    yield from _notes_on_lengths(program.graph, mesh)
    for number, axis in enumerate(mesh.axes):
        if mesh.size_of(axis) > 1 and not any(isinstance(x[axis], Shard) for x in program.layouts.values()):
            yield f"axis {axis} is not used: every tensor is replicated along it, because {_why_whole(choices, number)}"
    rigid = [n for n in program.graph.nodes if _is_whole_for_its_data(n, program)]
    if rigid:
        first = rigid[0]
        yield (
            f"replicated: {len(rigid)} operations run on full tensors, because a length in them depends on the data; "
            f"the first is {first.op} in {first.fqn or '(root)'} at {first.source}"
        )
    for node in program.graph.nodes:
        if not has_rule(node, program.graph):
            yield f"replicated: no rule for {node.op} in {node.fqn or '(root)'} at {node.source}"


def _notes_on_lengths(graph: Graph, mesh: Mesh) -> Iterator[str]:
    """Which lengths are open, which stay fixed, and where an open one keeps a dim whole."""
    names = [s.name for s in graph.symbols.read]
    if names:
        yield f"one program for all {', '.join(names)}; costs, shapes and bytes are those of the example"
    yield from (f"a length that stays fixed: {text}" for text in graph.symbols.fixed)
    kept = [
        (node, s.size)
        for node in (graph.nodes if names else ())
        for s in axis_strategies(node, graph)
        if s.even and isinstance(s.size, Size) and not any(s.allows((n,)) for n in mesh.shape if n > 1)
    ]
    if kept:
        node, size = kept[0]
        s = next(s for s in graph.symbols.read if s.name in free_symbols(size))
        promise = {next(i.fqn for i in graph.inputs if i.name == s.value): {s.dim: f"{mesh.size}*{s.name}"}}
        yield (
            f"{size} need not be a multiple of the ranks: {len(kept)} operations that merge dims keep it whole, the first "
            f"is {node.op} in {node.fqn or '(root)'} at {node.source}. Promise a multiple to have it cut: dynamic={promise}"
        )


def _is_whole_for_its_data(node: Node, program: Program) -> bool:
    """Whether a length in ``node`` depends on the data and its work is not divided."""
    types, choice = program.graph.types, program.assignment.choices[node.name]
    return any(types[x].unknown for x in (*node.inputs, *node.outputs)) and not any(s.divides for s in choice)


def _why_whole(choices: Mapping[str, Choice], axis: int) -> str:
    """What the cheapest split along the unused mesh axis would cost; matmul-like operations are asked first."""
    others = {name: c.alternatives for name, c in choices.items()}
    cheapest = cheapest_use({n: a for n, a in others.items() if choices[n].flops}, axis) or cheapest_use(others, axis)
    if cheapest is None:
        return "no operation can be split along it"
    name, seconds = cheapest
    where = f"{choices[name].op} in {choices[name].fqn or '(root)'}"
    return f"splitting would cost time: {seconds * 1e6:.3g} µs more for {where}, the cheapest to split"

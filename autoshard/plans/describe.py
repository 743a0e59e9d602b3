"""A program as a plan: choices, collectives, costs and memory, to read and to reuse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from autoshard.layout import Layout, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Assignment
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.memory import Memory, Recomputed
from autoshard.passes.ir.merge import TRAVELLING
from autoshard.passes.ir.program import Program, Statement, Step
from autoshard.passes.ir.sizes import Size, free_symbols
from autoshard.passes.lower.again import redrawn
from autoshard.passes.lower.blocks import module_of
from autoshard.passes.lower.bucket import prefetched, regathered
from autoshard.passes.memory import simulate
from autoshard.passes.memory.moments import name_of
from autoshard.passes.propagate.alternatives import alternatives, cheapest_use
from autoshard.passes.propagate.edges import seconds_on_the_way
from autoshard.passes.propagate.objective import Objective, objective
from autoshard.passes.propagate.op_space import axis_strategies
from autoshard.passes.propagate.prices import cost as costs
from autoshard.passes.propagate.prices.bucketed import EachShares, latency_shares
from autoshard.passes.propagate.prices.copies import copied_on_the_way
from autoshard.passes.propagate.prices.step_time import movable_values
from autoshard.passes.propagate.prices.travelling import beside, journeys
from autoshard.passes.redistribute.pricing import ALONE, Shares
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.checks import has_rule
from autoshard.passes.rules.facts import is_view
from autoshard.plans.plan import Plan
from autoshard.report.record import TOGETHER, Choice, Collective, Cost
from autoshard.report.schedule import step_end
from autoshard.report.text import utilisation

ONCE = 0
"""in place of a count: once for all micro-batches"""

AGAIN, PART_BY_PART = "(made again)", " (part by part, beside products)"
"""ends of reasons"""


def describe(program: Program, title: str = "", optimizer: str = "adamw", memory: Memory | None = None) -> Plan:
    """The plan of a program. ``memory``: of its step with this ``optimizer``, simulated if None."""
    graph, mesh, assignment = program.graph, program.mesh, program.assignment
    searched = objective(assignment, optimizer)
    found = tuple(_collectives(program, searched))
    public = {i.name: i.fqn for i in graph.inputs}
    choices = _choices(program, searched, optimizer)
    kinds, gathered = {i.fqn: i.kind for i in graph.inputs}, _gathered(program)
    layouts = {public.get(n, n): layout for n, layout in assignment.layouts.items()}
    ties = {alias: i.fqn for i in graph.inputs for alias in i.aliases}
    memory = simulate(program, optimizer) if memory is None else memory
    local = graph.passes * sum(_step_seconds(step)[2] for step in _steps(program.statements))
    local += sum(c.copied_s for c in found)
    plan = Plan(
        mesh=mesh,
        layouts={**layouts, **{alias: layouts[fqn] for alias, fqn in ties.items()}},
        collectives=found,
        cost=Cost(
            compute_s=searched.compute_s,
            comm_s=searched.comm_s,
            total_s=searched.total_s,
            memory_bytes=memory.peak,
            flops=sum(c.flops for c in choices.values()),
            flops_per_rank=sum(_on_busiest(node, choices[node.name].flops, assignment) for node in graph.nodes),
            local_s=local,
            merged_s=searched.comm_s - sum(c.seconds for c in found) - local,
            exposed_s=searched.exposed_s,
            optimizer_s=searched.optimizer,
            lower_bound=max(0.0, assignment.solution.lower_bound),
        ),
        choices=choices,
        shared={public.get(n, n): layout for n, layout in assignment.shared.items()},
        outputs=assignment.outputs,
        given=tuple(sorted(public.get(n, n) for n in assignment.given)),
        shapes={public.get(n, n): t.example.shape for n, t in graph.types.items()},
        kinds={n: kinds.get(n, "value") for n in layouts},
        ties=ties,
        notes=(*_notes(program, choices), *_notes_on_travel(found)),
        training=graph.training,
        title=title,
        modules={path: name for node in graph.nodes for path, name in node.module_types},
        dtypes={public.get(n, n): str(t.kept.dtype).removeprefix("torch.") for n, t in graph.types.items()},
        differentiable=tuple(public.get(n, n) for n, t in graph.types.items() if t.grad),
        memory=memory,
        optimizer=optimizer,
        recomputed=tuple(_recomputed(program, memory, searched)),
        shared_again=tuple(sorted(public.get(n, n) for n in assignment.shared_again)),
        zero={public[n]: stage for n, stage in assignment.zero.items() if n in gathered},
        prefetch=max(1, prefetched(program)),
        micro_batches=graph.passes,
    )
    mfu, hfu = utilisation(plan)
    return replace(plan, cost=replace(plan.cost, mfu=mfu, hfu=hfu, schedule_s=step_end(plan)))


def _choices(program: Program, searched: Objective, optimizer: str) -> dict[str, Choice]:
    """Choice per operation."""
    graph, assignment = program.graph, program.assignment
    public, others = {i.name: i.fqn for i in graph.inputs}, alternatives(assignment, optimizer=optimizer)
    shown = cache(lambda placed: str(Layout(program.mesh, placed)))
    found = {}
    for node in graph.nodes:
        compute = searched.operations[node.name].compute
        found[node.name] = Choice(
            op=str(node.op),
            fqn=node.fqn,
            source=node.source,
            labels=tuple(s.label for s in assignment.choices[node.name]),
            flops=graph.passes * costs.node_flops(node, graph, rule_for(node.op)),
            seconds=graph.passes * compute.step,
            backward_s=graph.passes * compute.backward,
            has_rule=has_rule(node, graph),
            inputs=tuple(public.get(n, n) for n in node.inputs),
            outputs=node.outputs,
            uses=tuple(shown(assignment.use(node, i)) for i in range(len(node.inputs))),
            alternatives=others.get(node.name, ()),
            again=assignment.again.get(node.name, 0),
        )
    return found


def _on_busiest(node: Node, flops: float, assignment: Assignment) -> float:
    """FLOPs on the busiest rank, with a recomputed forward."""
    again = assignment.again.get(node.name) == 2
    forward = flops / (1.0 + costs.backward_factor(node, assignment.graph)) if again else 0.0
    return (flops + forward) * costs.divided(assignment.choices[node.name], assignment.mesh)


def _recomputed(program: Program, memory: Memory, searched: Objective) -> Iterator[Recomputed]:
    """Recomputed values in program order, without those that neither save memory nor run."""
    nodes = {n.name: n for n in program.graph.nodes}
    remade = [part for s in program.statements if s.again for part in s.parts]
    drawn = {name_of(s) for s in redrawn(program)}
    runs = {*map(name_of, remade), *drawn}
    for name in dict.fromkeys((*memory.spared, *searched.again)):
        node = nodes.get(name) or program.graph.producers.get(name)
        parts = searched.again.get(name)
        each = 0.0 if parts is None else float(parts.compute + parts.other + parts.communication())
        seconds = program.graph.passes * each
        computed = program.assignment.again.get(name) == 2 or (name in nodes and is_view(nodes[name].op))
        what = "drawn" if name in drawn else "computed" if computed else "converted"
        if memory.spared.get(name) or (seconds and name in runs):  # others save nothing, and do not run
            yield Recomputed(name, node.fqn if node is not None else "", what, memory.spared.get(name, 0.0), seconds)


def _collectives(program: Program, searched: Objective) -> Iterator[Collective]:
    """Forward collectives in program order, then backward ones in reverse."""
    found: list[Collective] = []
    graph = program.assignment.graph  # its caches are filled
    again, movable = regathered(program), movable_values(graph)
    by_name = latency_shares(graph, program.mesh)
    shares = EachShares({i.fqn: by_name[i.name] for i in program.graph.inputs if i.name in by_name}, by_name.others)

    def of_step(part: Statement, again: bool, stage: int = 0) -> Iterator[Collective]:
        moved = part.value in movable
        return (replace(c, movable=moved) for c in _of_step(program, part, again, stage, by_name[part.value]))

    def of_part(part: Statement, again: bool) -> Iterable[Collective]:
        if part.step is not None or part.node is None:
            return of_step(part, again)
        return _of_node(program, part, searched.operations[part.node.name].compute)

    for s in program.statements:
        if s.call.fn in TRAVELLING:
            found += _travelled(program, s)
        elif s.members and not s.parameter:
            found += _together([c for part in s.members for c in of_part(part, bool(s.again))], program)
        elif s.step is not None:  # of a bucket, every member is listed with its share of the time
            stage = s.call.kwargs.get("zero", 0)
            parts = [c for part in s.parts for c in of_step(part, bool(s.again) or part.outputs[0] in again, stage)]
            found += _shared(parts, program.mesh, s.parts[0].value) if s.members else parts
        elif s.node is not None:
            found += _of_node(program, s, searched.operations[s.node.name].compute)
    found = [_in_all_passes(_across_blocks(c, shares, program.mesh), program.graph) for c in found]
    yield from (c for c in found if c.phase == "forward")
    yield from (c for c in reversed(found) if c.phase == "backward")


def _across_blocks(c: Collective, shares: EachShares, mesh: Mesh) -> Collective:
    """``c`` with waiting (skew), if an operation waits for it. A gradient all-reduce over replicas
    instead has its share of the latency, since several blocks share a message."""
    if c.kind != "all_reduce" or c.phase != "backward" or c.value not in shares:
        return c if c.movable or c.hidden_s else replace(c, seconds=c.seconds + shares[c.value].waits)
    latency, per_byte = mesh.link(c.axes).rate(c.kind)
    return replace(c, seconds=shares[c.value].sums * latency + per_byte * c.bytes)


def _in_all_passes(c: Collective, graph: Graph) -> Collective:
    """``c`` for all micro-batches of a step. Gradient sums over replicas and ZeRO gathers that run
    once count once."""
    if graph.passes == 1 or c.times == ONCE:
        return c if c.times == 1 else replace(c, times=1)
    n = graph.passes
    seconds, hidden, copied = (n * x for x in (c.seconds, c.hidden_s, c.copied_s))
    return replace(c, bytes=n * c.bytes, times=n, seconds=seconds, hidden_s=hidden, copied_s=copied)


def _shared(parts: Sequence[Collective], mesh: Mesh, bucket: str = "") -> list[Collective]:
    """``parts`` with their shares of the time of one call per kind and phase. ``bucket``: its
    name."""
    calls: dict[tuple[str, str], list[Collective]] = {}
    for c in parts:
        calls.setdefault((c.kind, c.phase), []).append(c)

    def share(c: Collective) -> float:
        every = calls[c.kind, c.phase]
        size = sum(x.bytes for x in every)
        if len(every) == 1 or not size:
            return c.seconds
        apart = sum(x.seconds for x in every)  # an upper bound
        return min(apart, mesh.link(c.axes).seconds(size, c.kind)) * c.bytes / size

    return [replace(c, seconds=share(c), bucket=bucket) for c in parts]


def _together(parts: Sequence[Collective], program: Program) -> Iterator[Collective]:
    """Coalesced collectives: one per phase."""
    for phase in ("forward", "backward"):
        if same := _shared([c for c in parts if c.phase == phase], program.mesh):
            reason = TOGETHER.join(c.reason for c in same)
            size, seconds, copied = (
                sum(x) for x in zip(*((c.bytes, c.seconds, c.copied_s) for c in same), strict=True)
            )
            also = tuple(c.value for c in same[1:])
            yield replace(same[0], bytes=size, seconds=seconds, copied_s=copied, reason=reason, also=also)


def _gathered(program: Program) -> frozenset[str]:
    """Parameters that the forward gathers in buckets."""
    buckets = (s for s in program.statements if s.call.fn == "gather_parameters")
    return frozenset(part.value for s in buckets for part in s.parts)


def _steps(statements: Iterable[Statement]) -> Iterator[Step]:
    for s in statements:
        yield from _steps(s.members)
        if s.step is not None and not s.members:
            yield s.step


def _step_seconds(step: Step) -> tuple[float, float, float]:
    """Seconds of the forward collective, the backward one, and the local part without either."""
    moved = step.forward_bytes + step.backward_bytes
    if not moved:
        return 0.0, 0.0, step.seconds
    forward = step.seconds * step.forward_bytes / moved
    return forward, step.seconds - forward, 0.0


def _of_step(program: Program, s: Statement, again: bool, stage: int, share: Shares) -> Iterator[Collective]:
    """Collectives of a redistribution step; ``stage``: ZeRO stage; ``share``: of a parameter."""
    step = s.step
    if step is None:
        return
    public = program.graph.fqns.get(s.value, s.value)
    op = s.node.name if s.node is not None else ""
    reason = f"{public}: {step.src} → {step.dst}"
    forward, backward, _ = _step_seconds(step)
    graph, way = program.assignment.graph, (step.src, step.dst)
    ahead, back = copied_on_the_way(graph, program.types[s.value], *way, s.parameter, share)
    first = Collective(
        step.kind,
        step.group,
        "forward",
        step.forward_bytes,
        module_of(s, program.graph),
        reason,
        public,
        forward,
        op,
        copied_s=ahead,
    )
    if step.is_collective:
        yield replace(first, times=ONCE if stage else 1)
    if step.backward and program.types[s.value].grad:
        times = ONCE if s.parameter and (step.kind == "enter" or stage == 1) else 1
        yield replace(
            first,
            kind=step.backward,
            phase="backward",
            bytes=step.backward_bytes,
            seconds=backward,
            times=times,
            copied_s=back,
        )
    if again and step.is_collective:
        seconds = seconds_on_the_way(graph, program.graph.types[s.value], *way)
        how = "(gathered again)" if s.parameter else AGAIN
        yield replace(first, phase="backward", seconds=seconds, reason=f"{reason} {how}")


def _travelled(program: Program, s: Statement) -> Iterator[Collective]:
    """Ring steps of a collective matmul, in place of the collectives of its step."""
    part = next(part for part in s.parts if part.step is not None)
    near, step = beside(program.assignment.graph, program.mesh)[part.value], part.step
    found = None if step is None else journeys(program.graph.types[part.value], near, step.src, step.dst)
    for c in _of_step(program, part, bool(s.again or part.again), 0, ALONE):
        c = replace(c, kind="permute", fqn=module_of(s, program.graph))
        journey = None if found is None else found[c.phase == "backward"]
        if not c.reason.endswith(AGAIN) and journey is not None:
            c = replace(c, seconds=journey.seconds, hidden_s=journey.hidden, reason=f"{c.reason}{PART_BY_PART}")
        elif part.again and journey is not None:  # overlaps with the same products
            c = replace(c, hidden_s=min(program.mesh.beside(c.axes, c.kind) * c.seconds, journey.free))
        yield c


def _of_node(program: Program, s: Statement, compute: costs.Seconds) -> Iterator[Collective]:
    """Collectives inside an operation's local form; ``compute``: its own seconds."""
    mesh, node = program.mesh, s.node
    if node is None:
        return
    for c in s.internal:
        if mesh.size_of(c.axes) == 1 or (c.phase == "backward" and not program.graph.training):
            continue
        # :func:`_together` handles coalesced ones
        moved, seconds = costs.internal_cost(replace(c, share=1.0), mesh)
        reason = f"{node.op}: {c.what}"
        hidden = costs.hidden_seconds(c, mesh, compute)
        found = Collective(
            c.kind, c.axes, c.phase, moved, node.fqn, reason, node.name, seconds, node.name, hidden_s=hidden
        )
        yield found
        if s.again and c.phase == "forward" and not c.kept:
            yield replace(found, phase="backward", reason=f"{reason} {AGAIN}")


def _notes(program: Program, choices: Mapping[str, Choice]) -> Iterator[str]:
    """Notes: unused axes, data-dependent lengths, operations without a sharding rule."""
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


def _notes_on_travel(found: Iterable[Collective]) -> Iterator[str]:
    """How much of the collective matmuls is hidden (overlap)."""
    round_ = [c for c in found if c.reason.endswith(PART_BY_PART)]
    if round_:
        hidden, seconds = sum(c.hidden_s for c in round_), sum(c.seconds for c in round_)
        yield (
            f"{len(round_)} conversions of activations go {PART_BY_PART.strip(' ()')}: {hidden * 1e6:.3g} of "
            f"{seconds * 1e6:.3g} µs are hidden"
        )


def _notes_on_lengths(graph: Graph, mesh: Mesh) -> Iterator[str]:
    """Which lengths are open or fixed, and where an open one prevents sharding."""
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
    for node, size in kept[:1]:
        s = next(s for s in graph.symbols.read if s.name in free_symbols(size))
        promise = {next(i.fqn for i in graph.inputs if i.name == s.value): {s.dim: f"{mesh.size}*{s.name}"}}
        yield (
            f"{size} need not be a multiple of the ranks: {len(kept)} operations that merge dims keep it whole, the first "
            f"is {node.op} in {node.fqn or '(root)'} at {node.source}. Promise a multiple to have it cut: dynamic={promise}"
        )


def _is_whole_for_its_data(node: Node, program: Program) -> bool:
    """Whether ``node`` runs unsharded because of a data-dependent length."""
    unknown = any(program.graph.types[x].unknown for x in (*node.inputs, *node.outputs))
    return unknown and not any(s.divides for s in program.assignment.choices[node.name])


def _why_whole(choices: Mapping[str, Choice], axis: int) -> str:
    """Seconds of the cheapest split along the unused mesh axis, preferably of a matmul."""
    others = {name: c.alternatives for name, c in choices.items()}
    cheapest = cheapest_use({n: a for n, a in others.items() if choices[n].flops}, axis) or cheapest_use(others, axis)
    if cheapest is None:
        return "no operation can be split along it"
    choice, more = choices[cheapest[0]], cheapest[1] * 1e6
    where = f"for {choice.op} in {choice.fqn or '(root)'}"
    asked = f"that is what was asked for, or found: splitting would save {-more:.3g} µs {where}"
    return asked if more < 0 else f"splitting would cost time: {more:.3g} µs more {where}, the cheapest to split"

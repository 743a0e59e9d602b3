"""A program as a plan: choices, collectives, costs and memory, to read and to reuse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from autoshard.layout import Layout, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Assignment
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.memory import ON_HOST, Memory, Offloaded, Recomputed
from autoshard.passes.ir.program import COLLECTIVE_MATMULS, Program, RedistributionStep, Statement
from autoshard.passes.ir.sizes import Size, free_symbols
from autoshard.passes.ir.text import show_seconds
from autoshard.passes.lower.blocks import module_of
from autoshard.passes.lower.bucket import prefetch_depth, regathered_parameters
from autoshard.passes.lower.recompute import redrawn_dropouts
from autoshard.passes.memory import simulate_memory
from autoshard.passes.memory.offload import copy_seconds as offload_seconds
from autoshard.passes.memory.simulate import statement_name
from autoshard.passes.propagate.edges import forward_matrices, seconds_between
from autoshard.passes.propagate.objective import Objective, alternatives, cheapest_use, objective
from autoshard.passes.propagate.op_space import axis_strategies
from autoshard.passes.propagate.prices import roofline as costs
from autoshard.passes.propagate.prices.coalescing import SharesByValue, latency_shares
from autoshard.passes.propagate.prices.collective_matmul import overlapping_products, ring_transfers
from autoshard.passes.propagate.prices.collective_overheads import copy_seconds
from autoshard.passes.propagate.prices.overlap import movable_values
from autoshard.passes.redistribute.pricing import UNSHARED_MESSAGES, MessageShares
from autoshard.passes.rules.facts import is_view
from autoshard.passes.rules.families.loss import OF_LINEAR
from autoshard.passes.rules.restrictions import has_rule
from autoshard.plans.plan import Plan
from autoshard.report.record import (
    GRADIENT_SUM,
    REASON_SEPARATOR,
    RECOMPUTED_SUFFIX,
    REGATHERED_SUFFIX,
    Choice,
    Collective,
    Cost,
    axes_without_work,
)
from autoshard.report.schedule import step_end
from autoshard.report.summary import with_rates
from autoshard.report.text import show_layout

ONCE_PER_STEP = 0
"""in place of a count: once for all micro-batches"""

COLLECTIVE_MATMUL_SUFFIX = " (collective matmul)"
"""end of reasons"""


def describe_program(program: Program, title: str = "", optimizer: str = "adamw", memory: Memory | None = None) -> Plan:
    """The plan of a program. ``memory``: of its step with this ``optimizer``, simulated if None."""
    graph, mesh, assignment = program.graph, program.mesh, program.assignment
    searched = objective(assignment, optimizer)
    found = tuple(_program_collectives(program, searched))
    public = graph.fqns
    choices = _plan_choices(program, searched, optimizer)
    kinds, gathered = {i.fqn: i.kind for i in graph.inputs}, _bucketed_parameters(program)
    layouts = {public.get(n, n): layout for n, layout in assignment.layouts.items()}
    ties = {alias: i.fqn for i in graph.inputs for alias in i.aliases}
    memory = simulate_memory(program, optimizer) if memory is None else memory
    local = graph.passes * sum(_step_seconds(step)[2] for step in _redistribution_steps(program.statements))
    local += sum(c.copied_s for c in found)
    offloaded = tuple(_offloaded(assignment, optimizer, memory, searched))
    plan = Plan(
        mesh=mesh,
        layouts={**layouts, **{alias: layouts[fqn] for alias, fqn in ties.items()}},
        collectives=found,
        cost=Cost(
            compute_s=searched.compute_s,
            comm_s=searched.comm_s,
            total_s=searched.total_s + sum(part.exposed_s for part in offloaded if part.blocks),
            memory_bytes=memory.peak,
            flops=sum(c.flops for c in choices.values()),
            flops_per_rank=sum(_busiest_rank_flops(node, choices[node.name].flops, assignment) for node in graph.nodes),
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
        notes=(*_plan_notes(program, choices), *_collective_matmul_notes(found)),
        training=graph.training,
        title=title,
        modules={path: name for node in graph.nodes for path, name in node.module_types},
        dtypes={public.get(n, n): str(t.kept.dtype).removeprefix("torch.") for n, t in graph.types.items()},
        differentiable=tuple(public.get(n, n) for n, t in graph.types.items() if t.grad),
        memory=memory,
        optimizer=optimizer,
        recomputed=tuple(_recomputed_values(program, memory, searched)),
        offloaded=offloaded,
        shared_again=tuple(sorted(public.get(n, n) for n in assignment.shared_again)),
        zero={public[n]: stage for n, stage in assignment.zero.items() if n in gathered},
        prefetch=max(1, prefetch_depth(program)),
        micro_batches=graph.passes,
    )
    plan = with_rates(plan)
    return replace(plan, cost=replace(plan.cost, schedule_s=step_end(plan)))


def _offloaded(assignment: Assignment, optimizer: str, memory: Memory, searched: Objective) -> Iterator[Offloaded]:
    if memory.on_host:
        resident = objective(assignment, optimizer.removesuffix(ON_HOST)).optimizer
        taken = assignment.mesh.hardware.host_seconds(memory.on_host)
        yield Offloaded("optimizer states", memory.on_host, taken, searched.optimizer - resident)
    if blocks := memory.offloaded:
        taken, exposed = offload_seconds(blocks, assignment, searched)
        yield Offloaded("activations", sum(blocks.values()), taken, exposed, tuple(blocks))


def _plan_choices(program: Program, searched: Objective, optimizer: str) -> dict[str, Choice]:
    graph, assignment = program.graph, program.assignment
    public, others = graph.fqns, alternatives(assignment, optimizer=optimizer)
    shown = cache(lambda placed: show_layout(Layout(program.mesh, placed)))
    found = {}
    for node in graph.nodes:
        compute = searched.spaces[node].compute()
        found[node.name] = Choice(
            op=str(node.op),
            fqn=node.fqn,
            source=node.source,
            labels=tuple(s.label for s in assignment.choices[node.name]),
            flops=graph.passes * costs.node_flops(node, graph),
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


def _busiest_rank_flops(node: Node, flops: float, assignment: Assignment) -> float:
    """FLOPs on the busiest rank, with a recomputed forward."""
    again = assignment.again.get(node.name) == 2 or (node.op is OF_LINEAR and assignment.graph.is_differentiable(node))
    forward = flops / (1.0 + costs.backward_factor(node, assignment.graph)) if again else 0.0
    return (flops + forward) * costs.work_share(assignment.choices[node.name], assignment.mesh)


def _recomputed_values(program: Program, memory: Memory, searched: Objective) -> Iterator[Recomputed]:
    """Recomputed values in program order, without those that neither save memory nor run."""
    nodes = {n.name: n for n in program.graph.nodes}
    remade = [part for s in program.statements if s.again for part in s.parts]
    drawn = {statement_name(s) for s in redrawn_dropouts(program)}
    runs = {*map(statement_name, remade), *drawn}
    for name in dict.fromkeys((*memory.spared, *searched.again)):
        node = nodes.get(name) or program.graph.producers.get(name)
        parts = searched.again.get(name)
        each = 0.0 if parts is None else float(parts.compute + parts.other + parts.communication())
        seconds = program.graph.passes * each
        computed = program.assignment.again.get(name) == 2 or (name in nodes and is_view(nodes[name].op))
        what = "drawn" if name in drawn else "computed" if computed else "converted"
        if memory.spared.get(name) or (seconds and name in runs):  # others save nothing, and do not run
            yield Recomputed(name, node.fqn if node is not None else "", what, memory.spared.get(name, 0.0), seconds)


def _program_collectives(program: Program, searched: Objective) -> Iterator[Collective]:
    """Forward collectives in program order, then backward ones in reverse."""
    found: list[Collective] = []
    graph = program.assignment.graph  # its caches are filled
    again, movable = regathered_parameters(program), movable_values(graph)
    by_name = latency_shares(graph, program.mesh)
    shares = SharesByValue({i.fqn: by_name[i.name] for i in program.graph.inputs if i.name in by_name}, by_name.others)

    def of_step(part: Statement, again: bool, stage: int = 0) -> Iterator[Collective]:
        moved = part.value in movable
        return (replace(c, movable=moved) for c in _step_collectives(program, part, again, stage, by_name[part.value]))

    def of_part(part: Statement, again: bool) -> Iterable[Collective]:
        if part.step is not None or part.node is None:
            return of_step(part, again)
        return _node_collectives(program, part, searched.spaces[part.node].compute())

    for s in program.statements:
        if s.call.fn in COLLECTIVE_MATMULS:
            found += _collective_matmul_steps(program, s)
        elif s.members and not s.parameter:
            found += _coalesced_collectives([c for part in s.members for c in of_part(part, bool(s.again))], program)
        elif s.step is not None:  # of a bucket, every member is listed with its share of the time
            stage = s.call.kwargs.get("zero", 0)
            parts = [c for part in s.parts for c in of_step(part, bool(s.again) or part.outputs[0] in again, stage)]
            found += _time_shares(parts, program.mesh, s.parts[0].value) if s.members else parts
        elif s.node is not None:
            found += _node_collectives(program, s, searched.spaces[s.node].compute())
    found = [_over_micro_batches(_at_bucket_share(c, shares, program.mesh), program.graph) for c in found]
    yield from (c for c in found if c.phase == "forward")
    yield from (c for c in reversed(found) if c.phase == "backward")


def _at_bucket_share(c: Collective, shares: SharesByValue, mesh: Mesh) -> Collective:
    """``c`` with waiting (skew), if an operation waits for it. A gradient all-reduce over replicas
    instead has its share of the latency, since several blocks share a message."""
    if c.kind != "all_reduce" or c.phase != "backward" or c.value not in shares:
        return c if c.movable or c.hidden_s else replace(c, seconds=c.seconds + shares[c.value].waits)
    latency, per_byte = mesh.link(c.axes).rate(c.kind)
    return replace(c, seconds=shares[c.value].sums * latency + per_byte * c.bytes)


def _over_micro_batches(c: Collective, graph: Graph) -> Collective:
    """``c`` for all micro-batches of a step. Gradient sums over replicas and ZeRO gathers that run
    once count once."""
    if graph.passes == 1 or c.times == ONCE_PER_STEP:
        return c if c.times == 1 else replace(c, times=1)
    n = graph.passes
    seconds, hidden, copied = (n * x for x in (c.seconds, c.hidden_s, c.copied_s))
    return replace(c, bytes=n * c.bytes, times=n, seconds=seconds, hidden_s=hidden, copied_s=copied)


def _time_shares(parts: Sequence[Collective], mesh: Mesh, bucket: str = "") -> list[Collective]:
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


def _coalesced_collectives(parts: Sequence[Collective], program: Program) -> Iterator[Collective]:
    for phase in ("forward", "backward"):
        if same := _time_shares([c for c in parts if c.phase == phase], program.mesh):
            reason = REASON_SEPARATOR.join(c.reason for c in same)
            size, seconds, copied = (
                sum(x) for x in zip(*((c.bytes, c.seconds, c.copied_s) for c in same), strict=True)
            )
            also = tuple(c.value for c in same[1:])
            yield replace(same[0], bytes=size, seconds=seconds, copied_s=copied, reason=reason, also=also)


def _bucketed_parameters(program: Program) -> frozenset[str]:
    """Parameters that the forward gathers in buckets."""
    buckets = (s for s in program.statements if s.call.fn == "gather_parameters")
    return frozenset(part.value for s in buckets for part in s.parts)


def _redistribution_steps(statements: Iterable[Statement]) -> Iterator[RedistributionStep]:
    for s in statements:
        yield from _redistribution_steps(s.members)
        if s.step is not None and not s.members:
            yield s.step


def _step_seconds(step: RedistributionStep) -> tuple[float, float, float]:
    """Seconds of the forward collective, the backward one, and the local part without either."""
    moved = step.forward_bytes + step.backward_bytes
    if not moved:
        return 0.0, 0.0, step.seconds
    forward = step.seconds * step.forward_bytes / moved
    return forward, step.seconds - forward, 0.0


def _step_collectives(
    program: Program, s: Statement, again: bool, stage: int, share: MessageShares
) -> Iterator[Collective]:
    """Collectives of a redistribution step; ``stage``: ZeRO stage; ``share``: of a parameter."""
    step = s.step
    if step is None:
        return
    public = program.graph.fqns.get(s.value, s.value)
    op = s.node.name if s.node is not None else ""
    before, after = show_layout(step.src), show_layout(step.dst)
    reason = f"{public}: {GRADIENT_SUM if before == after else f'{before} → {after}'}"
    forward, backward, _ = _step_seconds(step)
    graph, way = program.assignment.graph, (step.src, step.dst)
    ahead, back = seconds_between(graph, copy_seconds, program.types[s.value], *way, s.parameter, share)
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
        yield replace(first, times=ONCE_PER_STEP if stage else 1)
    if step.backward and program.types[s.value].grad:
        times = ONCE_PER_STEP if s.parameter and (step.kind == "enter" or stage == 1) else 1
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
        seconds = sum(seconds_between(graph, forward_matrices, program.graph.types[s.value], *way))
        how = REGATHERED_SUFFIX if s.parameter else RECOMPUTED_SUFFIX
        yield replace(first, phase="backward", seconds=seconds, reason=f"{reason} {how}")


def _collective_matmul_steps(program: Program, s: Statement) -> Iterator[Collective]:
    """Ring steps of a collective matmul, in place of the collectives of its step."""
    part = next(part for part in s.parts if part.step is not None)
    near, step = overlapping_products(program.assignment.graph, program.mesh)[part.value], part.step
    found = None if step is None else ring_transfers(program.graph.types[part.value], near, step.src, step.dst)
    for c in _step_collectives(program, part, bool(s.again or part.again), 0, UNSHARED_MESSAGES):
        c = replace(c, kind="permute", fqn=module_of(s, program.graph))
        journey = None if found is None else found[c.phase == "backward"]
        if not c.reason.endswith(RECOMPUTED_SUFFIX) and journey is not None:
            c = replace(
                c, seconds=journey.seconds, hidden_s=journey.hidden, reason=f"{c.reason}{COLLECTIVE_MATMUL_SUFFIX}"
            )
        elif part.again and journey is not None:  # overlaps with the same products
            c = replace(c, hidden_s=min(program.mesh.beside(c.axes, c.kind) * c.seconds, journey.free))
        yield c


def _node_collectives(program: Program, s: Statement, compute: costs.PhaseSeconds) -> Iterator[Collective]:
    """Collectives inside an operation's local form; ``compute``: its own seconds."""
    mesh, node = program.mesh, s.node
    if node is None:
        return
    for c in s.internal:
        if mesh.size_of(c.axes) == 1 or (c.phase == "backward" and not program.graph.training):
            continue
        # :func:`_coalesced_collectives` handles coalesced ones
        moved, seconds = costs.internal_cost(replace(c, share=1.0), mesh)
        reason = f"{node.op}: {c.what}"
        hidden = costs.hidden_seconds(c, mesh, compute)
        found = Collective(
            c.kind, c.axes, c.phase, moved, node.fqn, reason, node.name, seconds, node.name, hidden_s=hidden
        )
        yield found
        if s.again and c.phase == "forward" and not c.kept:
            yield replace(found, phase="backward", reason=f"{reason} {RECOMPUTED_SUFFIX}")


def _plan_notes(program: Program, choices: Mapping[str, Choice]) -> Iterator[str]:
    """Notes: unused axes, data-dependent lengths, operations without a sharding rule."""
    mesh = program.mesh
    yield from _length_notes(program.graph, mesh)
    for axis in axes_without_work(mesh, choices):
        why = _why_replicated(choices, mesh.index(axis))
        if any(isinstance(x[axis], Shard) for x in program.layouts.values()):
            yield f"axis {axis} divides no work: tensors are sharded along it, but its ranks compute the same, because {why}"
        else:
            yield f"axis {axis} is not used: every tensor is replicated along it, because {why}"
    rigid = [n for n in program.graph.nodes if _has_data_dependent_length(n, program)]
    if rigid:
        first = rigid[0]
        yield (
            f"replicated: {len(rigid)} operations run on full tensors, because a length in them "
            f"depends on the data. The first is {first.op} in {first.fqn or '(root)'} at {first.source}"
        )
    for node in program.graph.nodes:
        if not has_rule(node, program.graph):
            yield f"replicated: no rule for {node.op} in {node.fqn or '(root)'} at {node.source}"


def _collective_matmul_notes(found: Iterable[Collective]) -> Iterator[str]:
    """How much of the collective matmuls is hidden (overlap)."""
    round_ = [c for c in found if c.reason.endswith(COLLECTIVE_MATMUL_SUFFIX)]
    if round_:
        hidden, seconds = sum(c.hidden_s for c in round_), sum(c.seconds for c in round_)
        yield (
            f"collective matmul (asynchronous TP) hides {show_seconds(hidden)} of the {show_seconds(seconds)} of "
            f"{len(round_)} redistributions of activations"
        )


def _length_notes(graph: Graph, mesh: Mesh) -> Iterator[str]:
    """Which lengths are open or fixed, and where an open one prevents sharding."""
    names = [s.name for s in graph.symbols.read]
    if names:
        yield f"one program for all {', '.join(names)}. Costs, shapes and bytes are those of the example"
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
            f"{size} need not be a multiple of the ranks, so {len(kept)} operations that merge "
            f"dims replicate it. The first is {node.op} in {node.fqn or '(root)'} at "
            f"{node.source}. To shard it, promise a multiple: dynamic={promise}"
        )


def _has_data_dependent_length(node: Node, program: Program) -> bool:
    """Whether ``node`` runs unsharded because of a data-dependent length."""
    unknown = any(program.graph.types[x].unknown for x in node.values)
    return unknown and not any(s.divides for s in program.assignment.choices[node.name])


def _why_replicated(choices: Mapping[str, Choice], axis: int) -> str:
    """Seconds of the cheapest split along the unused mesh axis, preferably of a matmul."""
    others = {name: c.alternatives for name, c in choices.items()}
    cheapest = cheapest_use({n: a for n, a in others.items() if choices[n].flops}, axis) or cheapest_use(others, axis)
    if cheapest is None:
        return "no operation can be sharded along it"
    choice, more = choices[cheapest[0]], cheapest[1]
    where = f"for {choice.op} in {choice.fqn or '(root)'}"
    asked = f"this was asked for, or found: sharding would save {show_seconds(-more)} {where}"
    return (
        asked if more < 0 else f"sharding would take longer: {show_seconds(more)} more {where}, the cheapest to shard"
    )

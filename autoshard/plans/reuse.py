"""Plan reuse: a saved plan's choices for a graph; a stage's plan for an equal stage."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from autoshard.errors import PlanError
from autoshard.layout import I, Invariant, Layout, R
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import (
    Assignment,
    Placements,
    Strategy,
    input_layout,
    operand_placements,
    result_placements,
)
from autoshard.passes.ir.graph import Graph, Ref, TensorType, map_refs
from autoshard.passes.propagate.hints import resolve_hints
from autoshard.passes.propagate.op_space import axis_strategies, is_feasible
from autoshard.passes.search.network import Solution
from autoshard.plans.options import CompileOptions, KnownLayouts
from autoshard.plans.plan import Plan


def assignment_of(
    plan: Plan, graph: Graph, mesh: Mesh, given: Mapping[str, Layout], optimizer: str = "adamw"
) -> Assignment:
    """The choices of ``plan`` for ``graph``; ``given``: layouts of inputs that arrive sharded. The
    plan's bound is kept if costs are the same: sizes, hardware, ``optimizer``.
    Raises :class:`PlanError` if the plan was made for another model, mesh or mode, or for
    stages."""
    check_mesh(plan, mesh)
    if plan.staged is not None:
        raise PlanError(f"the plan was made for stages: compile with stages={plan.staged.axis!r}")
    check_training(plan, graph.training)
    public = graph.fqns
    _check_names(plan, graph, public)
    choices = {}
    for node in graph.nodes:
        by_label, labels = {s.label: s for s in axis_strategies(node, graph)}, plan.choices[node.name].labels
        choices[node.name] = tuple(by_label[label] for label in labels if label in by_label)
        if not len(choices[node.name]) == len(labels) == mesh.ndim or not is_feasible(choices[node.name], mesh):
            raise PlanError(
                f"the plan shards {node.op} in {node.fqn or '(root)'} at {node.source} along "
                f"{', '.join(labels)}, which these sizes do not allow"
            )
    layouts, shared, outputs = _plan_layouts(plan, graph, mesh, choices)
    stating = (i.name for i in graph.inputs if i.kind == "input" or i.name in given)
    inputs = {name: input_layout(name, graph, mesh, given) for name in stating}
    alike = inputs.items() <= layouts.items() and plan.optimizer == optimizer and _has_same_costs(plan, graph, mesh)
    layouts |= inputs
    fqns = {fqn: n for n, fqn in public.items()}
    bound = plan.lower_bound if alike else 0.0
    hinted = frozenset(fqns.get(n, n) for n in plan.given)
    solution = Solution((), plan.cost.total_s, bound, False)
    again = {name: choice.again for name, choice in plan.choices.items() if choice.again}
    shared_again = frozenset(fqns.get(n, n) for n in plan.shared_again)
    zero = {fqns[n]: stage for n, stage in plan.zero.items()}
    found = layouts, shared, choices, outputs, solution, hinted, again, shared_again, zero
    return Assignment(graph, mesh, *found, tuple(block for part in plan.offloaded for block in part.blocks))


def _plan_layouts(
    plan: Plan, graph: Graph, mesh: Mesh, choices: Mapping[str, tuple[Strategy, ...]]
) -> tuple[dict[str, Layout], dict[str, Layout], tuple[Layout | None, ...]]:
    """Layouts of definitions, shared reads and outputs, for gradients other than the plan's.
    Without a gradient I and R are R. A value with a gradient only here (formerly frozen) is I if
    its operation makes I and no reader needs R."""
    public, had, whole = graph.fqns, set(plan.differentiable), (I,) * mesh.ndim

    def fitted(name: str, layout: Layout, meant: Placements) -> Layout:
        layout = layout.on(mesh)
        if not graph.types[name].grad:
            return layout.replace(dict.fromkeys(layout.axes_with(Invariant), R))
        if public.get(name, name) in had:
            return layout
        return layout.replace({a: I for a, p in zip(mesh.axes, meant, strict=True) if (layout[a], p) == (R, I)})

    def read(name: str) -> Placements:
        users = [(choices[n.name], i) for n in graph.uses[name] for i, x in enumerate(n.inputs) if x == name]
        each = [operand_placements(choice, i, True) for choice, i in users]
        return tuple(R if any(p[axis] == R for p in each) else I for axis in range(mesh.ndim))

    makes = {
        n: result_placements(choices[node.name], i, True) for node in graph.nodes for i, n in enumerate(node.outputs)
    }
    layouts = {n: fitted(n, plan.layouts[public.get(n, n)], makes.get(n, whole)) for n in graph.types}
    shared = {n: fitted(n, x, read(n)) for n in graph.types if (x := plan.shared.get(public.get(n, n))) is not None}
    pairs = zip(graph.outputs, plan.outputs, strict=True)
    outputs = tuple(fitted(o.name, x, whole) if x is not None and isinstance(o, Ref) else None for o, x in pairs)
    return layouts, shared, outputs


def check_mesh(plan: Plan, mesh: Mesh) -> None:
    """Raise :class:`PlanError` if the plan was made for other axes."""
    if (plan.mesh.axes, plan.mesh.shape) != (mesh.axes, mesh.shape):
        raise PlanError(f"the plan was made for the mesh {plan.mesh}, not {mesh}")


def check_training(plan: Plan, training: bool) -> None:
    """Raise :class:`PlanError` if the plan was made for the other mode."""
    if plan.training != training:
        made, asked = ("training", "inference") if plan.training else ("inference", "training")
        raise PlanError(
            f"the plan was made for {made}, but the model is compiled for {asked}. Plan again, with training={training}"
        )


def _check_names(plan: Plan, graph: Graph, public: Mapping[str, str]) -> None:
    """Raise :class:`PlanError` unless operations, tensors and outputs match ``graph``."""
    other = [n.name for n in graph.nodes if n.name not in plan.choices or plan.choices[n.name].op != str(n.op)]
    if not other and len(graph.nodes) == len(plan.choices):
        dims = {public.get(n, n): len(t.shape) for n, t in graph.types.items()}
        other = [n for n, d in dims.items() if n not in plan.layouts or len(plan.shapes.get(n, d * "_")) != d]
        trained = {i.fqn for i in graph.of_kind("parameter")}
        other += [*sorted(plan.zero.keys() - trained), *sorted(set(plan.shared_again) - plan.shared.keys())]
        other += ["output"] * (len(plan.outputs) != len(graph.outputs))
    if other or len(graph.nodes) != len(plan.choices):
        raise PlanError(
            "the plan was made for another model or other input shapes: it has "
            f"{len(plan.choices)} operations, but the model has {len(graph.nodes)}"
            + (f", and {other[0]!r} differs" if other else "")
        )


def check_whole_plan(plan: Plan, opts: CompileOptions, mesh: Mesh) -> None:
    """Raise :class:`PlanError` if mixed precision, named strategy or mesh differ."""
    precision = str(opts.mixed_precision or "")
    if plan.mixed_precision != precision:
        raise PlanError(
            f"the plan was made for mixed_precision ({plan.mixed_precision or 'none'}), but the "
            f"model is compiled for ({precision or 'none'}). Plan again, with the same policy"
        )
    if opts.like is not None and not is_same_strategy(opts.like, plan.like, mesh):
        raise PlanError(
            f"like={opts.like!r}: the given plan was made "
            f"{f'for like={plan.like}' if plan.like else 'without like='}. Leave like= out, or plan again"
        )
    check_mesh(plan, mesh)


def check_plan_options(plan: Plan, opts: CompileOptions, known: KnownLayouts, graph: Graph, mesh: Mesh) -> None:
    """Raise :class:`PlanError` if mixed precision, named strategy, mesh or hints differ, but for
    hints on parameters that an earlier program laid out."""
    check_whole_plan(plan, opts, mesh)
    public = graph.fqns
    for value, hint in resolve_hints(opts.hints, graph, mesh, known=known.later).items():
        name = public.get(value, value)
        read = {} if value in graph.parameters else plan.shared  # other hints fix the shared layout of readers
        layout = read.get(name, plan.layouts.get(name))
        if name in (known.parameters or {}) or layout is None:
            continue
        if not hint.meets(layout.placements, mesh):
            raise PlanError(
                f"hint {hint.pattern!r}: in the given plan {hint.name!r} has layout {layout.without_gradient()}. "
                "Leave the hint out, or plan again with it"
            )


def is_same_strategy(like: Any, text: str, mesh: Mesh) -> bool:
    """Whether ``like`` is the named strategy ``text``, in any order of axes and modules."""
    try:
        found = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return repr(like) == text
    each, all_ = (dict.fromkeys(mesh.axes, x) if isinstance(x, str) else x for x in (like, found))
    return each == all_


def _has_same_costs(plan: Plan, graph: Graph, mesh: Mesh) -> bool:
    """Whether the plan's bound is valid here: same hardware, sizes, dtypes and gradients."""
    public, trained = graph.fqns, set(plan.differentiable)

    def is_alike(name: str, type_: TensorType) -> bool:
        dtype = str(type_.kept.dtype).removeprefix("torch.")
        found = (plan.shapes.get(name), plan.dtypes.get(name), name in trained)
        return found == (type_.example.shape, dtype, type_.grad)

    return plan.mesh.hardware == mesh.hardware and all(is_alike(public.get(n, n), t) for n, t in graph.types.items())


RenamedEntry = TypeVar("RenamedEntry")


def graph_renaming(a: Graph, b: Graph) -> dict[str, str] | None:
    """Public names of values and operations of ``a`` → those of ``b``; None if the graphs differ,
    have constants or write buffers."""
    if a.constants or b.constants or a.mutations or b.mutations:
        return None
    if (len(a.nodes), len(a.inputs), len(a.outputs)) != (len(b.nodes), len(b.inputs), len(b.outputs)):
        return None
    names: dict[str, str] = {}

    def define(x: str, y: str) -> bool:
        names[x] = y
        return a.types[x] == b.types[y]

    for x, y in zip(a.inputs, b.inputs, strict=True):
        if x.kind != y.kind or not define(x.name, y.name):
            return None
    nodes: dict[str, str] = {}
    for m, n in zip(a.nodes, b.nodes, strict=True):
        nodes[m.name] = n.name
        moved = map_refs((m.args, dict(m.kwargs)), lambda ref: Ref(names[ref.name]))
        if m.op is not n.op or m.output_slots != n.output_slots or moved != (n.args, dict(n.kwargs)):
            return None
        if not all(define(x, y) for x, y in zip(m.outputs, n.outputs, strict=True)):
            return None
    if map_refs(a.outputs, lambda ref: Ref(names[ref.name])) != b.outputs:
        return None
    public = a.fqns, b.fqns
    return nodes | {public[0].get(x, x): public[1].get(y, y) for x, y in names.items()}


def rename_plan(plan: Plan, names: Mapping[str, str]) -> Plan:
    """``plan`` under other names, to be followed and not shown: reasons and notes keep the old
    names."""

    def keys(found: Mapping[str, RenamedEntry]) -> dict[str, RenamedEntry]:
        return {names.get(name, name): x for name, x in found.items()}

    def each(found: Iterable[str]) -> tuple[str, ...]:
        return tuple(names.get(name, name) for name in found)

    choices = {n: replace(c, inputs=each(c.inputs), outputs=each(c.outputs)) for n, c in plan.choices.items()}
    return replace(
        plan,
        layouts=keys(plan.layouts),
        shared=keys(plan.shared),
        choices=keys(choices),
        shapes=keys(plan.shapes),
        kinds=keys(plan.kinds),
        ties={},
        dtypes=keys(plan.dtypes),
        given=each(plan.given),
        differentiable=each(plan.differentiable),
        shared_again=each(plan.shared_again),
        zero=keys(plan.zero),
    )

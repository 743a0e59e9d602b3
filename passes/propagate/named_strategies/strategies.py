"""Named strategies (``like="fsdp"``) as requests to operations and parameters.
The search chooses what a name leaves free. A hint on a parameter wins over the named strategy
(:func:`without_hinted`). Where memory is tight, :func:`baseline_strategies` are searched too.
:func:`axes_by_role` names mesh axes of a plan by their use (dp, tp, …)."""

from __future__ import annotations

import difflib
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from autoshard.errors import PlanError
from autoshard.layout import Owned, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.analyses import cached_per_graph
from autoshard.passes.ir.assignment import Assignment
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.propagate.hints import OWNER_DIM, Constraint, DimLimit, candidate_placements, fixed_placements
from autoshard.passes.propagate.named_strategies.families import (
    Families,
    Family,
    WeightProduct,
    batch_of,
    weight_products,
)
from autoshard.passes.propagate.named_strategies.module_styles import style_requests
from autoshard.passes.propagate.named_strategies.sparse_models import (
    expert_parallel_requests,
    table_requests,
    unplaced_note,
)
from autoshard.passes.propagate.named_strategies.tensor_sequence import (
    infeasible_sequence_notes,
    megatron_sp_requests,
    ring_strategies,
    sequence_families,
    sequence_requests,
    tensor_parallel_families,
)
from autoshard.passes.propagate.op_space import OpRequest, OpRequests, axis_strategies
from autoshard.passes.rules.families.context_parallel import ATTENTION_OPS
from autoshard.passes.rules.families.embedding import LOOKUP_OPS, TABLE_SHARDING_LABELS, TABLE_WISE_LABEL
from autoshard.passes.rules.families.experts import STACKED

NO_DIMS: frozenset[int] = frozenset()


@dataclass(frozen=True)
class NamedStrategy:
    """Requests of a named strategy on a graph and mesh."""

    asked: Mapping[str, OpRequests] = field(default_factory=dict)
    """node name → allowed strategies"""
    limits: Mapping[str, Constraint | DimLimit] = field(default_factory=dict)
    """value → allowed layouts"""
    regathers: bool = False
    """whether products convert operands again in the backward (Megatron sequence parallelism)"""
    zero: Mapping[str, int] = field(default_factory=dict)
    """see :attr:`~autoshard.passes.ir.assignment.Assignment.zero`"""
    notes: tuple[str, ...] = ()
    """parts of the strategy that the graph or the runtime lacks"""
    text: str = ""
    """the strategy as the user named it"""
    like: Any = None
    """the same as it was given; None: nothing is asked for"""


FREE = NamedStrategy()
"""asks for nothing"""


@dataclass(frozen=True)
class AxisRequest:
    """Requests along one mesh axis; what is absent is free."""

    asked: Mapping[str, OpRequest]
    dims: Mapping[str, frozenset[int]]
    """parameter → dims that may be sharded; empty: replicated"""
    outputs: Mapping[str, Constraint] = field(default_factory=dict)
    """value → the layout that its readers convert from"""
    note: str = ""


@dataclass
class StrategyContext:
    """Facts about a graph that strategies ask for, computed once."""

    graph: Graph

    @cached_property
    def families(self) -> Families:
        return Families(self.graph)

    @cached_property
    def batch(self) -> frozenset[Family]:
        return batch_of(self.families)

    @cached_property
    def products(self) -> tuple[WeightProduct, ...]:
        return weight_products(self.families)

    def along(self, wanted: frozenset[Family]) -> dict[str, OpRequest]:
        """Every operation sharded along ``wanted`` where its rule allows, unsharded elsewhere."""
        families = self.families
        return {n.name: families.asked(n, families.labels(n, wanted)) for n in self.graph.nodes}

    def by_batch(self) -> dict[str, OpRequest]:
        """Every operation sharded along the batch where its rule allows. Values without inputs
        (looked-up positions) are replicated: their partial gradients are reduced with
        parameters'."""
        families, found = self.families, self.along(self.batch)
        for node in self.graph.nodes:
            if families.from_inputs.isdisjoint(node.outputs) and _can_be_summed(node, self.graph):
                found[node.name] = replace(found[node.name], invariant=False)
        return found

    def everywhere(self, dims: frozenset[int]) -> dict[str, frozenset[int]]:
        return dict.fromkeys(self.graph.parameters, dims)


@cached_per_graph
def _strategy_context(graph: Graph) -> StrategyContext:
    return StrategyContext(graph)


def _replicate(context: StrategyContext, ranks: int) -> AxisRequest:
    return AxisRequest(context.along(frozenset()), context.everywhere(NO_DIMS))


def _ddp(context: StrategyContext, ranks: int) -> AxisRequest:
    return AxisRequest(context.by_batch(), context.everywhere(NO_DIMS), note=_without_batch(context, ranks))


def _fsdp(context: StrategyContext, ranks: int) -> AxisRequest:
    """Parameters are stored sharded and read gathered; :data:`ZERO_STAGES` says for how long."""
    types = context.graph.types
    dims = {p: frozenset(range(len(types[p].shape))) for p in context.graph.parameters}
    return AxisRequest(context.by_batch(), dims, note=_without_batch(context, ranks))


def _can_be_summed(node: Node, graph: Graph) -> bool:
    """Whether a gradient of ``node`` may be a partial sum."""
    trained = graph.is_differentiable(node)
    return trained and any(s.label == "R" for s in axis_strategies(node, graph))


def _without_batch(context: StrategyContext, ranks: int) -> str:
    lengths = [context.families.length(f) for f in context.batch]
    if not lengths:
        return "no dim of the inputs is a batch, so every rank does all the work"
    if min(lengths) < ranks:
        return f"a batch of {min(lengths)} cannot be sharded over {ranks} ranks, so every rank does all the work"
    return ""


def _megatron(context: StrategyContext, ranks: int) -> AxisRequest:
    chosen = tensor_parallel_families(context.families, context.products, ranks)
    return AxisRequest(context.along(chosen), _sharded_dims(chosen, context), note=_without_pairs(chosen, ranks))


def _megatron_sp(context: StrategyContext, ranks: int) -> AxisRequest:
    chosen = tensor_parallel_families(context.families, context.products, ranks)
    asked = megatron_sp_requests(context.families, chosen, context.products, context.batch)
    return AxisRequest(dict(asked), _sharded_dims(chosen, context), note=_without_pairs(chosen, ranks))


def _without_pairs(chosen: frozenset[Family], ranks: int) -> str:
    return "" if chosen else f"no product of an activation and a weight can be sharded over {ranks} ranks"


def _ulysses(context: StrategyContext, ranks: int) -> AxisRequest:
    return _sequence_on_axis(context, ranks, around=False)


def _ring(context: StrategyContext, ranks: int) -> AxisRequest:
    on_axis = _sequence_on_axis(context, ranks, around=True)
    if any(ring_strategies(n, context.families) for n in context.graph.nodes):
        return on_axis
    why = "no operation is known as attention, so no ring is used"
    if any(n.op in ATTENTION_OPS for n in context.graph.nodes):
        why = "no attention can run in a ring (a trained mask prevents it), so heads are sharded"
    return replace(on_axis, note="; ".join(filter(None, (why, on_axis.note))))


def _sequence_on_axis(context: StrategyContext, ranks: int, around: bool) -> AxisRequest:
    given = context.families, context.products, context.batch, around
    asked = dict(sequence_requests(*given))
    held = {n: a for n, a in asked.items() if a is not None}
    free = {v for node in context.graph.nodes if node.name not in held for v in node.inputs}
    note = "; ".join(infeasible_sequence_notes(*given, ranks))
    if not any(a.cuts for a in held.values()):
        note = "no dim of the activations is a sequence of 2 or more positions, so all layouts are searched"
    return AxisRequest(held, {p: NO_DIMS for p in context.graph.parameters if p not in free}, note=note)


def _expert_parallelism(context: StrategyContext, ranks: int) -> AxisRequest:
    """Experts' weights are sharded by expert; the search places other parameters."""
    asked, dims = expert_parallel_requests(context.families, context.batch)
    if not dims:
        why = "no operation runs experts, so fsdp is planned (docs/how-to/experts.md shows how to write a routing)"
        return replace(_fsdp(context, ranks), note=why)
    types, few = context.graph.types, ""
    if (fewest := min(types[p].tables or int(types[p].shape[0]) for p in dims)) < ranks:
        few = f"{fewest} experts cannot occupy {ranks} ranks, so tokens stay and weights are sharded as in fsdp"
        dims = {p: frozenset(range(len(types[p].shape))) for p in dims}
    return AxisRequest(asked, dims, note="; ".join(filter(None, (few, _without_batch(context, ranks)))))


def _table_parallel(label: str, dims: frozenset[int], context: StrategyContext, ranks: int) -> AxisRequest:
    """Tables that only look-ups read are placed as asked; all else is data parallel."""
    asked, found, left = table_requests(context.graph, label, dims, ranks)
    notes, batch = unplaced_note(left, context.graph), _without_batch(context, ranks)
    if not found:
        notes = f"{notes}; ddp is planned instead" if notes else "no parameter is a table, so ddp is planned"
        return replace(_ddp(context, ranks), note="; ".join(filter(None, (notes, batch))))
    few = (
        ""
        if ranks <= len(found) or label != TABLE_WISE_LABEL
        else f"{len(found)} tables on {ranks} ranks: some ranks have none"
    )
    notes = "; ".join(filter(None, (notes, few, batch)))
    return AxisRequest({**context.along(context.batch), **asked}, {**context.everywhere(NO_DIMS), **found}, note=notes)


def _sharded_dims(chosen: frozenset[Family], context: StrategyContext) -> dict[str, frozenset[int]]:
    types, families = context.graph.types, context.families
    return {
        p: frozenset(d for d in range(len(types[p].shape)) if families.of(p, d) in chosen)
        for p in context.graph.parameters
    }


NAMED_STRATEGIES: dict[str, Callable[[StrategyContext, int], AxisRequest]] = {
    "replicate": _replicate,
    "ddp": _ddp,
    "zero1": _fsdp,
    "zero2": _fsdp,
    "fsdp": _fsdp,
    "megatron": _megatron,
    "megatron-sp": _megatron_sp,
    "ulysses": _ulysses,
    "ring": _ring,
    "expert": _expert_parallelism,
    "table-wise": partial(_table_parallel, TABLE_WISE_LABEL, frozenset({OWNER_DIM})),
    "row-wise": partial(_table_parallel, "vocab", frozenset({0})),
    "column-wise": partial(_table_parallel, "embed", frozenset({1})),
}
ZERO_STAGES = {"zero1": 1, "zero2": 2, "fsdp": 3}
"""ZeRO stages: sharded are optimizer state (1), also gradients (2), also parameters (3)"""
STRATEGY_NAMES = (*NAMED_STRATEGIES, "hsdp")


def resolve_like(like: Any, graph: Graph, mesh: Mesh, *, known: bool = False) -> NamedStrategy:
    """The requests of ``like`` (a name, or styles by module; for all axes or per axis). ``known``:
    checked with an earlier program; styles may match nothing here. Raises
    :class:`~autoshard.errors.PlanError`."""
    if like is None:
        return NamedStrategy()
    context = _strategy_context(graph)
    found: dict[str, AxisRequest] = {}
    for axis, asked in _like_per_axis(like, mesh).items():
        if isinstance(asked, str):
            found[axis] = NAMED_STRATEGIES[asked](context, mesh.size_of(axis))
        elif asked is not None:
            styles = style_requests(asked, axis, context.families, context.products, known)
            found[axis] = AxisRequest(styles.asked, styles.dims, styles.outputs)
    of_nodes = {
        node.name: tuple(found[a].asked.get(node.name) if a in found else None for a in mesh.axes)
        for node in graph.nodes
    }
    limits: dict[str, Constraint | DimLimit] = {
        p: DimLimit(tuple(found[a].dims.get(p) if a in found else None for a in mesh.axes)) for p in graph.parameters
    }
    for on_axis in found.values():
        limits.update(on_axis.outputs)
    notes = tuple(f"like={like!r} on {axis}: {x.note}" for axis, x in found.items() if x.note)
    names = [x for x in _like_per_axis(like, mesh).values() if isinstance(x, str)]
    regathers, stage = "megatron-sp" in names, max((ZERO_STAGES.get(x, 0) for x in names), default=0)
    zero = dict.fromkeys(graph.parameters, stage) if stage in (1, 2) else {}
    return NamedStrategy(
        {n: asked for n, asked in of_nodes.items() if any(asked)}, limits, regathers, zero, notes, repr(like), like
    )


class InfeasibleStrategyError(PlanError):
    """A named strategy leaves an operation without layouts."""


def given_up(expert: NamedStrategy) -> NamedStrategy:
    """In place of ``expert``, for which layouts of earlier programs leave no room."""
    note = f"like={expert.text}: it does not fit the present layouts of the parameters, so all layouts are searched"
    return NamedStrategy(notes=(*expert.notes, note), text=expert.text)


def _like_per_axis(like: Any, mesh: Mesh) -> dict[str, Any]:
    """Mesh axis → name, or styles by module. Styles alone apply to axis tp, else the last axis."""
    if isinstance(like, str):
        named: dict[str, Any] = dict.fromkeys(mesh.axes, like)
    elif not isinstance(like, Mapping) or not like:
        raise PlanError(f"like={like!r}: {_LIKE_USAGE}")
    elif any(key in mesh.axes for key in like) or all(value in STRATEGY_NAMES for value in like.values()):
        named = dict(like)
    else:
        named = {"tp" if "tp" in mesh.axes else mesh.axes[-1]: like}
    for axis, asked in named.items():
        if axis not in mesh.axes:
            raise PlanError(f"like names axis {axis!r}, but the mesh has {', '.join(mesh.axes)}")
        if asked is not None and not isinstance(asked, Mapping):
            _check_name(asked)
    hybrid = [a for a in mesh.axes if named.get(a) == "hsdp"]
    for axis in hybrid:  # replicas outside, shards inside
        named[axis] = "fsdp" if axis == hybrid[-1] else "ddp"
    return named


def expand_tp_plan(model: object, like: Any) -> Any:
    """``like`` with "tp_plan" replaced by the model's own plan (transformers)."""
    if like == "tp_plan":
        found = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
        if not found:
            raise PlanError(f"like='tp_plan': {type(model).__name__} has no tp_plan. Name one, such as 'megatron'")
        return dict(found)
    return {key: expand_tp_plan(model, x) for key, x in like.items()} if isinstance(like, Mapping) else like


_LIKE_USAGE = "give a name, {mesh axis: name}, or {pattern of modules: style}"


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name not in STRATEGY_NAMES:
        near = difflib.get_close_matches(str(name), STRATEGY_NAMES, n=1)
        meant = f"do you mean {near[0]!r}? " if near else ""
        raise PlanError(f"like={name!r} is not a strategy: {meant}{_LIKE_USAGE}. Names: {', '.join(STRATEGY_NAMES)}")


HintConflict = tuple[str, int, bool]
"""(parameter, number of the mesh axis, whether the strategy wants an owner rank there)"""


def without_hinted(expert: NamedStrategy, hinted: Mapping[str, Constraint], graph: Graph, mesh: Mesh) -> NamedStrategy:
    """``expert`` without requests to look-ups in tables that hints place otherwise. Raises
    :class:`InfeasibleStrategyError` if hints move only some experts off their owners."""
    found = tuple(_hint_conflicts(expert, hinted, graph, mesh))
    if not found:
        return expert
    _check_expert_lists(expert, hinted, found, graph, mesh)
    asked: dict[str, OpRequests] = dict(expert.asked)
    for name, axis, _ in found:
        for node in graph.uses[name]:
            if node.op in LOOKUP_OPS and node.inputs[0] == name and node.name in asked:
                each = enumerate(asked[node.name])
                asked[node.name] = tuple(
                    None if i == axis and a and a.cuts & TABLE_SHARDING_LABELS else a for i, a in each
                )
    return replace(expert, asked={n: axes for n, axes in asked.items() if any(axes)})


def _hint_conflicts(
    expert: NamedStrategy, hinted: Mapping[str, Constraint], graph: Graph, mesh: Mesh
) -> Iterator[HintConflict]:
    """Places where the strategy shards a parameter and its hint does not allow that."""
    for name, hint in hinted.items():
        limit = expert.limits.get(name)
        for axis, dims in enumerate(limit.dims if isinstance(limit, DimLimit) else ()):
            if dims and not _hint_allows(hint, name, axis, dims, graph, mesh):
                yield name, axis, OWNER_DIM in dims


def _hint_allows(hint: Constraint, name: str, axis: int, dims: frozenset[int], graph: Graph, mesh: Mesh) -> bool:
    """Whether some layout that meets the hint is sharded along one of ``dims`` there."""
    if isinstance(dict(hint.axes).get(mesh.axes[axis]), Owned):  # fixed by an earlier program
        return OWNER_DIM in dims
    states = candidate_placements(graph.types[name], mesh) + fixed_placements(graph.types[name], mesh)
    placed = (state[axis] for state in states if hint.meets(state, mesh))
    return any(isinstance(p, Shard) and (OWNER_DIM if isinstance(p, Owned) else p.dim) in dims for p in placed)


def _check_expert_lists(
    expert: NamedStrategy, hinted: Mapping[str, Constraint], found: Collection[HintConflict], graph: Graph, mesh: Mesh
) -> None:
    owned = {(n, axis): None for n, axis, has_owner in found if has_owner}
    names = graph.fqns
    for node in graph.nodes if owned else ():
        for name, axis in owned if node.op == STACKED else ():
            left = [n for n in node.inputs if (n, axis) not in owned]
            if name in node.inputs and left:
                raise InfeasibleStrategyError(
                    f"hint {hinted[name].pattern!r} moves parameter {names[name]!r} away from its rank along "
                    f"{mesh.axes[axis]!r}, which like={expert.text} assigned, but {names.get(left[0], left[0])!r} "
                    "stays. All experts are computed together and need the same layout. Hint all of them, by "
                    f"{_common_pattern([names[n] for n in node.inputs if n in names])!r}, or none"
                )


def _common_pattern(names: list[str]) -> str:
    """A pattern that matches names which differ in some parts."""
    parts = zip(*(name.split(".") for name in names), strict=False)
    return ".".join(part[0] if len(set(part)) == 1 else "*" for part in parts)


OUTER_BASELINES, INNER_BASELINES = ("ddp", "fsdp"), ("megatron", "megatron-sp", "ulysses")
"""along all axes but the last; along the last"""


def baseline_strategies(graph: Graph, mesh: Mesh, asked: NamedStrategy) -> Iterator[NamedStrategy]:
    """Baselines: every name on all axes, and data with tensor or sequence parallelism inside. None
    if a strategy was ``asked`` for, or the graph lacks what a strategy needs."""
    if asked.text:
        return
    each: list[Any] = [name for name in STRATEGY_NAMES if name != "hsdp" or mesh.ndim > 1]
    if mesh.ndim > 1:
        *outer, inner = mesh.axes
        each += [
            {**dict.fromkeys(outer, data), inner: tensor} for data in OUTER_BASELINES for tensor in INNER_BASELINES
        ]
    for like in each:
        try:
            expert = resolve_like(like, graph, mesh)
        except PlanError:
            continue
        if not expert.notes:  # else it is another strategy under this name
            yield expert


def axes_by_role(graph: Graph, assignment: Assignment) -> dict[str, int]:
    """Axis name → size, in the order of the assignment's mesh.
    Named by the factor that most work of products is sharded along: batch (``dp``; ``fsdp`` if most
    parameter bytes are), sequence (``cp``), features (``tp``), weights (``ep``), or ``idle``."""
    mesh, (families, found, batch, sequence) = assignment.mesh, _families_with_roles(graph)
    names: dict[str, int] = {}
    for number, size in enumerate(mesh.shape):
        work: Counter[str] = Counter()
        for p in found:
            strategy = assignment.choices[p.node.name][number]
            if strategy.divides:
                family = families.cut(p.node, strategy)
                features = family in (p.sums, p.makes)
                role = "tp" if features else "dp" if family in batch else "cp" if family in sequence else "ep"
                work[role] += int(p.work)
        role = work.most_common(1)[0][0] if work else "idle"
        if role == "dp" and _is_mostly_sharded(graph, assignment, number):
            role = "fsdp"
        names[_unused_axis_name(role, names)] = size
    return names


@cached_per_graph
def _families_with_roles(
    graph: Graph,
) -> tuple[Families, tuple[WeightProduct, ...], frozenset[Family], frozenset[Family]]:
    """(families, products, batch, sequence) of ``graph``, independent of the mesh."""
    families = Families(graph)
    found, batch = weight_products(families), batch_of(families)
    return families, found, batch, sequence_families(families, found, batch)


def _is_mostly_sharded(graph: Graph, assignment: Assignment, number: int) -> bool:
    """Whether most parameter bytes are sharded along a mesh axis."""
    cut = whole = 0
    for name in graph.parameters:
        is_cut = isinstance(assignment.layouts[name].placements[number], Shard)
        cut, whole = cut + is_cut * graph.types[name].nbytes, whole + (not is_cut) * graph.types[name].nbytes
    return cut > whole


def _unused_axis_name(name: str, taken: dict[str, int]) -> str:
    return next(n for n in itertools.chain((name,), (f"{name}{i}" for i in itertools.count(2))) if n not in taken)

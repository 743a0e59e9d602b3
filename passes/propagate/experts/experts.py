"""``like=``: named strategies as requests to operations and parameters; the rest is searched."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

from autoshard.errors import PlanError
from autoshard.mesh import Mesh
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.propagate.experts.data import batch_of
from autoshard.passes.propagate.experts.families import Families, Family, Product, products
from autoshard.passes.propagate.experts.lookups import by_table, told
from autoshard.passes.propagate.experts.mixture import by_expert
from autoshard.passes.propagate.experts.patterns import styled
from autoshard.passes.propagate.experts.sequence import along_sequence, rings_of, without_room
from autoshard.passes.propagate.experts.tensor import paired, with_sequence
from autoshard.passes.propagate.hints import OWNER, Constraint, Limit
from autoshard.passes.propagate.op_space import Asked, AskedOf, axis_strategies
from autoshard.passes.rules.families.embedding import TABLE
from autoshard.passes.rules.families.ring import ATTENTION

WHOLE: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Expert:
    """Requests of a named strategy on a graph and mesh."""

    asked: Mapping[str, AskedOf] = field(default_factory=dict)
    """node name → allowed strategies"""
    limits: Mapping[str, Constraint | Limit] = field(default_factory=dict)
    """value → allowed layouts"""
    regathers: bool = False
    """whether products convert operands again in the backward (Megatron sequence parallelism)"""
    zero: Mapping[str, int] = field(default_factory=dict)
    """see :attr:`~autoshard.passes.ir.assignment.Assignment.zero`"""
    notes: tuple[str, ...] = ()
    """parts of the strategy that the graph or the runtime lacks"""
    text: str = ""
    """the strategy as the user named it"""


@dataclass(frozen=True)
class OnAxis:
    """Requests along one mesh axis; what is absent is free."""

    asked: Mapping[str, Asked]
    dims: Mapping[str, frozenset[int]]
    """parameter → dims that may be sharded; empty: replicated"""
    outputs: Mapping[str, Constraint] = field(default_factory=dict)
    """value → the layout that its readers convert from"""
    note: str = ""


@dataclass
class Context:
    """Facts about a graph that strategies ask for, computed once."""

    graph: Graph

    @cached_property
    def families(self) -> Families:
        return Families(self.graph)

    @cached_property
    def batch(self) -> frozenset[Family]:
        return batch_of(self.families)

    @cached_property
    def products(self) -> tuple[Product, ...]:
        return products(self.families)

    def along(self, wanted: frozenset[Family]) -> dict[str, Asked]:
        """Every operation sharded along ``wanted`` where its rule allows, unsharded elsewhere."""
        families = self.families
        return {n.name: families.asked(n, families.labels(n, wanted)) for n in self.graph.nodes}

    def by_batch(self) -> dict[str, Asked]:
        """Every operation sharded along the batch where its rule allows.

        Values without inputs (looked-up positions) are replicated with partial gradients: these are
        reduced with the parameters' gradients, without a message of their own.
        """
        families, found = self.families, self.along(self.batch)
        for node in self.graph.nodes:
            if families.from_inputs.isdisjoint(node.outputs) and _can_be_summed(node, self.graph):
                found[node.name] = replace(found[node.name], invariant=False)
        return found

    def everywhere(self, dims: frozenset[int]) -> dict[str, frozenset[int]]:
        return dict.fromkeys(self.graph.parameters, dims)


def _replicate(context: Context, ranks: int) -> OnAxis:
    return OnAxis(context.along(frozenset()), context.everywhere(WHOLE))


def _ddp(context: Context, ranks: int) -> OnAxis:
    return OnAxis(context.by_batch(), context.everywhere(WHOLE), note=_without_batch(context, ranks))


def _fsdp(context: Context, ranks: int) -> OnAxis:
    """Parameters are stored sharded and read gathered; :data:`ZERO` says for how long."""
    types = context.graph.types
    dims = {p: frozenset(range(len(types[p].shape))) for p in context.graph.parameters}
    return OnAxis(context.by_batch(), dims, note=_without_batch(context, ranks))


def _can_be_summed(node: Node, graph: Graph) -> bool:
    """Whether a gradient of ``node`` may be a partial sum."""
    trained = any(graph.types[o].grad for o in node.outputs)
    return trained and any(s.label == "R" for s in axis_strategies(node, graph))


def _without_batch(context: Context, ranks: int) -> str:
    lengths = [context.families.length(f) for f in context.batch]
    if not lengths:
        return "no dim of the inputs is a batch, so that every rank does all the work"
    if min(lengths) < ranks:
        return f"a batch of {min(lengths)} cannot be cut over {ranks} ranks, so that every rank does all the work"
    return ""


def _megatron(context: Context, ranks: int) -> OnAxis:
    chosen = paired(context.families, context.products, ranks)
    return OnAxis(context.along(chosen), _cut_along(chosen, context), note=_without_pairs(chosen, ranks))


def _megatron_sp(context: Context, ranks: int) -> OnAxis:
    chosen = paired(context.families, context.products, ranks)
    asked = with_sequence(context.families, chosen, context.products, context.batch)
    return OnAxis(dict(asked), _cut_along(chosen, context), note=_without_pairs(chosen, ranks))


def _without_pairs(chosen: frozenset[Family], ranks: int) -> str:
    return "" if chosen else f"no product of an activation and a weight can be cut in {ranks}"


def _ulysses(context: Context, ranks: int) -> OnAxis:
    return _along_sequence(context, ranks, around=False)


def _ring(context: Context, ranks: int) -> OnAxis:
    on_axis = _along_sequence(context, ranks, around=True)
    if any(rings_of(n, context.families) for n in context.graph.nodes):
        return on_axis
    why = "no operation is known as attention, so that nothing goes along a ring"
    if any(n.op in ATTENTION for n in context.graph.nodes):
        why = "no attention can go along a ring (none can whose mask is trained), so that heads are cut"
    return replace(on_axis, note="; ".join(filter(None, (why, on_axis.note))))


def _along_sequence(context: Context, ranks: int, around: bool) -> OnAxis:
    given = context.families, context.products, context.batch, around
    asked = dict(along_sequence(*given))
    held = {n: a for n, a in asked.items() if a is not None}
    free = {v for node in context.graph.nodes if node.name not in held for v in node.inputs}
    note = "; ".join(without_room(*given, ranks))
    if not any(a.cuts for a in held.values()):
        note = "no dim of the activations is a sequence of 2 positions or more, so that all is searched"
    return OnAxis(held, {p: WHOLE for p in context.graph.parameters if p not in free}, note=note)


def _expert(context: Context, ranks: int) -> OnAxis:
    """Experts' weights are sharded by expert; the search places other parameters."""
    asked, dims = by_expert(context.families, context.batch)
    if not dims:
        why = "no operation runs experts, so that it is planned as fsdp (docs/experts.md: how a routing is written)"
        return replace(_fsdp(context, ranks), note=why)
    types, few = context.graph.types, ""
    if (fewest := min(types[p].tables or int(types[p].shape[0]) for p in dims)) < ranks:
        few = f"{fewest} experts on {ranks} ranks, some of which would have none: rows stay, and weights are cut as in fsdp"
        dims = {p: frozenset(range(len(types[p].shape))) for p in dims}
    return OnAxis(asked, dims, note="; ".join(filter(None, (few, _without_batch(context, ranks)))))


def _tables(label: str, dims: frozenset[int], context: Context, ranks: int) -> OnAxis:
    """Tables that only look-ups read are placed as asked; all else is data parallel."""
    asked, found, left = by_table(context.graph, label, dims, ranks)
    notes, batch = told(left, context.graph), _without_batch(context, ranks)
    if not found:
        notes = (
            f"{notes}; so it is planned as ddp" if notes else "no parameter is a table, so that it is planned as ddp"
        )
        return replace(_ddp(context, ranks), note="; ".join(filter(None, (notes, batch))))
    few = "" if ranks <= len(found) or label != TABLE else f"{len(found)} tables on {ranks} ranks: some own none"
    notes = "; ".join(filter(None, (notes, few, batch)))
    return OnAxis({**context.along(context.batch), **asked}, {**context.everywhere(WHOLE), **found}, note=notes)


def _cut_along(chosen: frozenset[Family], context: Context) -> dict[str, frozenset[int]]:
    types, families = context.graph.types, context.families
    return {
        p: frozenset(d for d in range(len(types[p].shape)) if families.of(p, d) in chosen)
        for p in context.graph.parameters
    }


EXPERTS: dict[str, Callable[[Context, int], OnAxis]] = {
    "replicate": _replicate,
    "ddp": _ddp,
    "zero1": _fsdp,
    "zero2": _fsdp,
    "fsdp": _fsdp,
    "megatron": _megatron,
    "megatron-sp": _megatron_sp,
    "ulysses": _ulysses,
    "ring": _ring,
    "expert": _expert,
    "table-wise": partial(_tables, TABLE, frozenset({OWNER})),
    "row-wise": partial(_tables, "vocab", frozenset({0})),
    "column-wise": partial(_tables, "embed", frozenset({1})),
}
ZERO = {"zero1": 1, "zero2": 2, "fsdp": 3}
"""ZeRO stages: sharded are optimizer state (1), also gradients (2), also parameters (3)"""
NAMES = (*EXPERTS, "hsdp")


def asked_by(like: Any, graph: Graph, mesh: Mesh, *, known: bool = False) -> Expert:
    """The requests of ``like`` (a name, or styles by module; for all axes or per axis).

    ``known``: styles were checked with an earlier program; they may match nothing here. Raises
    :class:`~autoshard.errors.PlanError` for an unknown strategy.
    """
    if like is None:
        return Expert()
    context = Context(graph)
    found: dict[str, OnAxis] = {}
    for axis, asked in _per_axis(like, mesh).items():
        if isinstance(asked, str):
            found[axis] = EXPERTS[asked](context, mesh.size_of(axis))
        elif asked is not None:
            styles = styled(asked, axis, context.families, context.products, known)
            found[axis] = OnAxis(styles.asked, styles.dims, styles.outputs)
    of_nodes = {
        node.name: tuple(found[a].asked.get(node.name) if a in found else None for a in mesh.axes)
        for node in graph.nodes
    }
    limits: dict[str, Constraint | Limit] = {
        p: Limit(tuple(found[a].dims.get(p) if a in found else None for a in mesh.axes)) for p in graph.parameters
    }
    for on_axis in found.values():
        limits.update(on_axis.outputs)
    notes = tuple(f"like={like!r} on {axis}: {x.note}" for axis, x in found.items() if x.note)
    names = [x for x in _per_axis(like, mesh).values() if isinstance(x, str)]
    regathers, stage = "megatron-sp" in names, max((ZERO.get(x, 0) for x in names), default=0)
    zero = dict.fromkeys(graph.parameters, stage) if stage in (1, 2) else {}
    return Expert({n: asked for n, asked in of_nodes.items() if any(asked)}, limits, regathers, zero, notes, repr(like))


class AskedTooMuchError(PlanError):
    """A named strategy leaves an operation without layouts."""


Found = TypeVar("Found")


def met(expert: Expert, known: bool, search: Callable[[Expert], Found]) -> tuple[Expert, Found]:
    """(strategy used, result of ``search``): search with fallback to a free search.

    The fallback needs ``known``: parameters have layouts of an earlier program.
    """
    try:
        return expert, search(expert)
    except AskedTooMuchError:
        if not known:
            raise
    note = f"like={expert.text}: not beside the layouts that the parameters have, so that all is searched"
    free = Expert(notes=(*expert.notes, note), text=expert.text)
    return free, search(free)


def _per_axis(like: Any, mesh: Mesh) -> dict[str, Any]:
    """Mesh axis → name, or styles by module. Styles alone apply to axis tp, else the last axis."""
    if isinstance(like, str):
        named: dict[str, Any] = dict.fromkeys(mesh.axes, like)
    elif not isinstance(like, Mapping) or not like:
        raise PlanError(f"like={like!r}: {_KINDS}")
    elif any(key in mesh.axes for key in like) or all(value in NAMES for value in like.values()):
        named = dict(like)
    else:
        named = {"tp" if "tp" in mesh.axes else mesh.axes[-1]: like}
    for axis, asked in named.items():
        if axis not in mesh.axes:
            raise PlanError(f"like names axis {axis!r}; the mesh has {', '.join(mesh.axes)}")
        if asked is not None and not isinstance(asked, Mapping):
            _check_name(asked)
    hybrid = [a for a in mesh.axes if named.get(a) == "hsdp"]
    for axis in hybrid:  # replicas outside, shards inside
        named[axis] = "fsdp" if axis == hybrid[-1] else "ddp"
    return named


def like_of(model: object, like: Any) -> Any:
    """``like`` with "tp_plan" replaced by the model's own plan (transformers)."""
    if like == "tp_plan":
        found = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
        if not found:
            raise PlanError(f"like='tp_plan': {type(model).__name__} has no tp_plan. Name a plan, such as 'megatron'")
        return dict(found)
    return {key: like_of(model, x) for key, x in like.items()} if isinstance(like, Mapping) else like


_KINDS = "give a name, {mesh axis: name}, or {pattern of modules: style}"


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name not in NAMES:
        near = difflib.get_close_matches(str(name), NAMES, n=1)
        meant = f"do you mean {near[0]!r}? " if near else ""
        raise PlanError(f"like={name!r} is no expert's plan: {meant}{_KINDS}. Names: {', '.join(NAMES)}")

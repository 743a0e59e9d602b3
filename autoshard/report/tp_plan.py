"""Export of a plan as transformers' ``tp_plan``, for engines that read one."""

from __future__ import annotations

import re
from collections.abc import Iterator

from autoshard.errors import PlanError
from autoshard.layout import Owned, Shard
from autoshard.report.record import Choice, Record

OUTPUT_FEATURE_DIMS = {
    "aten.linear.default": 0,
    "aten.addmm.default": 1,
    "aten.mm.default": 1,
    "aten.matmul.default": 1,
}
"""operation → the dim of its weight with output features"""
EMBEDDING_OPS = ("aten.embedding.default",)


class TpPlan(dict[str, str]):
    """Module pattern → style, as transformers takes for ``tp_plan``."""

    unsaid: tuple[str, ...] = ()
    """decisions of the plan that a ``tp_plan`` cannot express"""


def tp_plan(plan: Record, axis: str | None = None) -> TpPlan:
    """``plan`` along one mesh axis (``axis``, default: the only one, or ``tp``, else
    :class:`PlanError`). Modules that differ in their number only and are sharded alike are one
    pattern with ``*``."""
    axis = _axis(plan, axis)
    found, covered = dict[str, str](), set[str]()
    for choice in plan.choices.values():
        for name, style in _styles(plan, choice, axis):
            covered.add(name)
            if style:
                found[choice.fqn] = style
    made = TpPlan(module_patterns(found, {c.fqn for c in plan.choices.values()}))
    made.unsaid = tuple(_inexpressible(plan, axis, covered))
    return made


def _axis(plan: Record, axis: str | None) -> str:
    axes = [a for a in plan.mesh.axes if plan.mesh.size_of(a) > 1]
    if axis is None and len(axes) == 1:
        return axes[0]
    wanted = "tp" if axis is None else axis
    if wanted not in plan.mesh.axes:
        raise PlanError(f"to_tp_plan: the mesh ({plan.mesh}) has no axis {wanted!r}. Name the axis of the modules")
    return wanted


def _styles(plan: Record, choice: Choice, axis: str) -> Iterator[tuple[str, str]]:
    """(parameter, style) of an operation's sharded parameters; "" for a bias."""
    for name in (n for n in choice.inputs if plan.kinds.get(n) == "parameter"):
        placed, ndim = plan.layouts[name][axis], len(plan.shapes[name])
        if not isinstance(placed, Shard) or isinstance(placed, Owned):
            continue
        if choice.op in EMBEDDING_OPS:
            yield name, "embedding_rowwise" if placed.dim == 0 else "embedding_colwise"
        elif choice.op in OUTPUT_FEATURE_DIMS and ndim == 2:
            makes = placed.dim == OUTPUT_FEATURE_DIMS[choice.op]
            gathered = makes and any(_is_returned_sharded(plan, value, axis) for value in choice.outputs)
            yield name, "colwise_gather_output" if gathered else "colwise" if makes else "rowwise"
        elif choice.op in OUTPUT_FEATURE_DIMS and ndim == 1:
            yield name, ""  # a bias goes with its weight


def _is_returned_sharded(plan: Record, value: str, axis: str) -> bool:
    """Whether a sharded value is a result of the model, so that the style must gather it."""
    read = {n for c in plan.choices.values() for n in c.inputs}
    return value not in read and isinstance(plan.layouts[value][axis], Shard)


def module_patterns(found: dict[str, str], modules: set[str]) -> dict[str, str]:
    """Styles by pattern: numbers as ``*`` where all modules of a pattern have one style."""
    groups: dict[str, list[str]] = {}
    for module in modules:
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module), []).append(module)
    made: dict[str, str] = {}
    for pattern, members in groups.items():
        styles = {found.get(m, "") for m in members}
        made |= {pattern: styles.pop()} if len(styles) == 1 else {m: found[m] for m in members if m in found}
    order = {module: i for i, module in enumerate(found)}
    first = {
        p: min((order[m] for m in groups.get(p, [p]) if m in order), default=0) for p, style in made.items() if style
    }
    return {p: made[p] for p in sorted(first, key=first.__getitem__)}


def _inexpressible(plan: Record, axis: str, covered: set[str]) -> Iterator[str]:
    for other in plan.mesh.axes:
        if other != axis and any(isinstance(x[other], Shard) for x in plan.layouts.values()):
            yield f"shards along {other!r}: a tp_plan knows one axis"
    for name, kind in plan.kinds.items():
        if kind in ("parameter", "buffer") and name not in covered and isinstance(plan.layouts[name][axis], Shard):
            yield f"{kind} {name} has layout {plan.layouts[name].without_gradient()}"

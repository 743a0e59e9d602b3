"""Plans in words: ``plan.explain(name)`` says why, ``plan.diff(other)`` compares two plans."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest

from autoshard.errors import PlanError
from autoshard.passes.ir.assignment import is_dividing_label
from autoshard.passes.ir.text import enclosing_modules, show_bytes, show_flops, show_seconds
from autoshard.report.record import Choice, Collective, Record, local_bytes
from autoshard.report.text import layer_glob, ranged_name, reasons_text, short_op, show_layout, shown_labels

MOST_LISTED = 12
"""most parameters and operations of a module, or collectives, that are listed"""


def explain(plan: Record, name: str) -> str:
    """Layout or strategy of ``name``, the reason, alternatives and collectives, as text.
    ``name``: a parameter, buffer or input; an operation or value of the graph; or an fnmatch
    pattern of modules, else of parameters. Raises :class:`PlanError` with the nearest names for
    anything else."""
    if not isinstance(name, str):
        raise PlanError(f"explain takes a name or a pattern of modules, got {name!r}")
    if (first := plan.ties.get(name)) is not None:
        return f"{name} is tied to {first}\n{explain(plan, first)}"
    if plan.kinds.get(name, "value") != "value":
        return "\n".join(_tensor_lines(plan, name))
    if node := (
        name if name in plan.choices else next((n for n, c in plan.choices.items() if name in c.outputs), None)
    ):
        return "\n".join(_operation_lines(plan, node))
    found = [m for m in sorted(plan.modules) if m and fnmatch.fnmatchcase(m, name)]
    found = found or [m for m in _container_modules(plan) if fnmatch.fnmatchcase(m, name)]
    named = [n for n, kind in plan.kinds.items() if kind != "value" and fnmatch.fnmatchcase(n, name)]
    if not found and not named:
        known = [n for n, kind in plan.kinds.items() if kind != "value"]
        known += [*plan.ties, *dict.fromkeys([*filter(None, plan.modules), *_container_modules(plan)])]
        near = difflib.get_close_matches(name, [*known, *plan.choices], n=3, cutoff=0.3)
        raise PlanError(
            f"{name!r} is not a parameter, buffer, input, module or operation of this plan. "
            f"Nearest: {', '.join(near or known[:3])}"
        )
    lines = [_module_lines(plan, module) for module in found] or [_tensor_lines(plan, n) for n in named]
    return "\n".join(line for part in lines for line in part)


def _container_modules(plan: Record) -> list[str]:
    """Container modules, such as ``nn.ModuleList``, which need not be called themselves."""
    held = (n for n, kind in plan.kinds.items() if kind in ("parameter", "buffer"))
    return enclosing_modules([*held, *filter(None, plan.modules)])


def _operations_text(operations: int) -> str:
    return "1 operation" if operations == 1 else f"{operations} operations"


def _layout_reason(plan: Record, name: str) -> str:
    if plan.staged is not None:
        return _staged_layout_reason(plan.staged.plans, name)
    if name in plan.given:
        return (
            f"asked for by like={plan.like}"
            if plan.like
            else "asked for by a hint, or chosen by an earlier compilation"
        )
    if plan.lower_bound <= 0:
        return "part of the plan found, which has no bound"
    exact = plan.cost.total_s <= plan.lower_bound * (1 + 1e-9)
    return "part of the cheapest plan" if exact else "part of the best plan found"


def _staged_layout_reason(stages: Sequence[Record], name: str) -> str:
    """The reason in the first stage that has ``name``: later stages take its layout."""
    stage = next(p for p in stages if name in p.kinds)
    searched = any(p.lower_bound > 0 for p in stages)
    follows = searched and stage.lower_bound <= 0 and name not in stage.given
    return "as in an equal earlier stage" if follows else _layout_reason(stage, name)


def _explained_layout(plan: Record, name: str) -> str:
    """Layout of ``name``; with stages that on a stage's mesh, and which stages hold it."""
    if plan.staged is None:
        return show_layout(plan.layouts[name])
    axis, plans = plan.staged.axis, plan.staged.plans
    there = [str(i) for i, p in enumerate(plans) if name in p.kinds]
    layout = next(p.layouts[name] for p in plans if name in p.kinds)
    how = "unsharded" if layout.mesh.axes == (axis,) else show_layout(layout)
    return f"{how} in stage{'s' * (len(there) > 1)} {' and '.join(there)} of {len(plans)}"


def _tensor_lines(plan: Record, name: str) -> Iterator[str]:
    shape, layout = plan.shapes[name], plan.layouts[name]
    yield f"{name}: {plan.kinds[name]}, {plan.dtypes.get(name, '')}{list(shape)}"
    each = "per rank" if plan.staged is None else "on each of its ranks"
    held = show_bytes(local_bytes(plan, name))
    yield f"  layout {_explained_layout(plan, name)}: {held} {each}; {_layout_reason(plan, name)}"
    yield from _note_lines(plan, [name])
    shared = show_layout(plan.shared.get(name, layout))
    if shared != show_layout(layout):
        yield f"  its readers convert from {shared}"
    for node, choice in plan.choices.items():
        for value, use in zip(choice.inputs, choice.uses, strict=True):
            if value == name:
                yield f"  read as {use} by {node} ({_choice_text(choice)}), {_sharding_text(plan, choice)}"
                yield from _alternative_lines(plan, choice, "    ")
    yield from _collective_lines(c for c in plan.collectives if _is_moved_by(c, {name}))


def _note_lines(plan: Record, names: Collection[str]) -> Iterator[str]:
    """Notes that name one of these parameters: why it deviates from the named strategy."""
    yield from (f"  {note}" for note in plan.notes if not {*names}.isdisjoint(re.split(r"[ ,;:]+", note)))


def _operation_lines(plan: Record, node: str) -> Iterator[str]:
    choice = plan.choices[node]
    yield f"{node}: {_choice_text(choice)}" + (f" at {choice.source}" if choice.source else "")
    yield f"  runs {_sharding_text(plan, choice)} in {show_seconds(choice.seconds)}; {_choice_reason(plan, choice)}"
    for value, use in zip(choice.inputs, choice.uses, strict=True):
        yield f"  reads {value} {list(plan.shapes[value])} as {use}"
    for value in choice.outputs:
        yield f"  makes {value} {list(plan.shapes[value])} as {show_layout(plan.layouts[value])}"
    made = {node, *choice.outputs}
    sent = [c for c in plan.collectives if c.op == node or _is_moved_by(c, made)]
    if (
        plan.folded
        and any("zigzag" in label for label in choice.labels)
        and not any("halves" in c.reason for c in sent)
    ):
        yield f"  the sequence is in zigzag order of {plan.folded} ranks here: no exchange is needed"
    yield from _alternative_lines(plan, choice, "  ")
    yield from _collective_lines(sent)


def _module_lines(plan: Record, module: str) -> Iterator[str]:
    inside = {n: c for n, c in plan.choices.items() if c.fqn == module or c.fqn.startswith(module + ".")}
    owned = [n for n, kind in plan.kinds.items() if kind in ("parameter", "buffer") and n.startswith(module + ".")]
    seconds = sum(c.seconds for c in inside.values())
    called = f" ({plan.modules[module]})" if module in plan.modules else ""
    yield f"{module}{called}: {_operations_text(len(inside))}, {show_seconds(seconds)}"
    for name in owned[:MOST_LISTED]:
        yield f"  {name} {list(plan.shapes[name])} has layout {_explained_layout(plan, name)}; {_layout_reason(plan, name)}"
    yield from _note_lines(plan, owned)
    heavy = sorted(inside, key=lambda n: -inside[n].seconds)[:MOST_LISTED]
    for node in (n for n in inside if n in heavy):
        choice = inside[node]
        yield f"  {node} ({short_op(choice)}) runs {_sharding_text(plan, choice)} in {show_seconds(choice.seconds)}"
        yield from _alternative_lines(plan, choice, "    ", 1)
    left = max(0, len(owned) - MOST_LISTED) + max(0, len(inside) - MOST_LISTED)
    if left:
        yield f"  and {left} more"
    yield from _collective_lines(
        c
        for c in plan.collectives
        if c.fqn == module or c.fqn.startswith(module + ".") or c.value in owned or {*inside, *owned} & {*c.also}
    )


def _is_moved_by(c: Collective, names: Iterable[str]) -> bool:
    return not {c.value, *c.also}.isdisjoint(names)


def _choice_text(choice: Choice) -> str:
    return f"{short_op(choice)} in {choice.fqn or '(root)'}"


def _choice_reason(plan: Record, choice: Choice) -> str:
    if not choice.has_rule:
        return "it has no rule"
    return f"like={plan.like} asks for it, if it names this operation" if plan.like else "part of the plan found"


def _sharding_text(plan: Record, choice: Choice, labels: tuple[str, ...] = ()) -> str:
    """``sharded along n@tp``, ``replicated …``, ``on partial sums …``."""
    pairs = list(zip(labels or choice.labels, plan.mesh.axes, strict=True))
    cut = [f"{label.replace('...', 'd')}@{axis}" for label, axis in pairs if is_dividing_label(label)]
    summed = [axis for label, axis in pairs if label.startswith("P(")]
    parts = [f"sharded along {', '.join(cut)}"] if cut else []
    parts += [f"on partial sums along {', '.join(summed)}"] if summed else []
    return " and ".join(parts) or "replicated on every rank"


def _alternative_lines(plan: Record, choice: Choice, indent: str, most: int = 3) -> Iterator[str]:
    """Other strategies of the operation, and the seconds that each change alone would cost."""
    now = _sharding_text(plan, choice)
    seconds_by_text: dict[str, float] = {}
    for labels, seconds in choice.alternatives:
        what = _sharding_text(plan, choice, labels)
        if what != now:
            seconds_by_text[what] = min(seconds, seconds_by_text.get(what, seconds))
    for what, seconds in list(seconds_by_text.items())[:most]:
        more = "more" if seconds >= 0 else "less"
        yield f"{indent}instead {what}: {show_seconds(abs(seconds))} {more} per step, with all else unchanged"


def _collective_lines(collectives: Iterable[Collective]) -> Iterator[str]:
    found = list(collectives)
    for c in found[:MOST_LISTED]:
        yield (
            f"  sends {show_bytes(c.bytes)} by {c.kind_on_axes} {c.phase}, {show_seconds(c.seconds)}: "
            f"{reasons_text(c.reasons)}"
        )
    if rest := found[MOST_LISTED:]:
        more = "1 collective" if len(rest) == 1 else f"{len(rest)} collectives"
        yield f"  and {more} more, {show_bytes(sum(c.bytes for c in rest))}"
    if not found:
        yield "  nothing is sent for it"


COMPARED_MEMORY_PARTS = ("parameters", "gradients", "optimizer", "buffers", "activations", "temporaries")
"""compared fields of :class:`~autoshard.passes.ir.memory.Memory`"""


def diff(plan: Record, other: Record) -> str:
    """Costs, memory, layouts and collectives of ``plan`` (left) and ``other`` (right), as text."""
    if not isinstance(other, Record):
        raise PlanError(f"diff takes another plan, got {other!r}")
    heading = ("", _plan_heading(plan, "this plan"), _plan_heading(other, "other plan"))
    parts = [_aligned_columns([heading, *_cost_rows(plan, other)])]
    layouts = _layout_differences(plan, other)
    parts.append(
        "Layouts that differ\n" + _aligned_columns(layouts)
        if layouts
        else "All parameters, buffers and inputs have the same layouts"
    )
    if work := _operation_differences(plan, other):
        parts.append("Operations that run differently\n" + _aligned_columns(work))
    if sent := _collective_differences(plan, other):
        parts.append("Collectives of a step\n" + _aligned_columns(sent))
    return "\n\n".join(parts)


def _plan_heading(plan: Record, side: str) -> str:
    step = "training" if plan.training else "inference"
    parts = f"{plan.micro_batches} micro-batches" if plan.micro_batches > 1 else ""
    like = f"like={plan.like}" if plan.like else ""
    return f"{side}: " + ", ".join(filter(None, (str(plan.mesh), step, like, parts, plan.mixed_precision)))


def _cost_rows(plan: Record, other: Record) -> list[tuple[str, str, str]]:
    a, b = plan.cost, other.cost
    sent = [sum(c.bytes for c in p.collectives) for p in (plan, other)]
    return [
        ("step", show_seconds(a.total_s), f"{show_seconds(b.total_s)}{_cost_ratio_text(a.total_s, b.total_s)}"),
        ("compute", show_seconds(a.compute_s), show_seconds(b.compute_s)),
        ("communication", show_seconds(a.comm_s), show_seconds(b.comm_s)),
        ("of it hidden", show_seconds(a.hidden_s), show_seconds(b.hidden_s)),
        *([("waiting", show_seconds(a.bubble_s), show_seconds(b.bubble_s))] if a.bubble_s or b.bubble_s else []),
        ("sent per rank", show_bytes(sent[0]), show_bytes(sent[1])),
        ("memory per rank", show_bytes(a.memory_bytes), show_bytes(b.memory_bytes)),
        *(
            (f"  {x}", show_bytes(getattr(plan.memory, x)), show_bytes(getattr(other.memory, x)))
            for x in COMPARED_MEMORY_PARTS
        ),
        ("busiest rank", show_flops(a.flops_per_rank), show_flops(b.flops_per_rank)),
    ]


def _cost_ratio_text(a: float, b: float) -> str:
    return f" (× {b / a:.3g})" if a > 0 else ""


def _layout_differences(plan: Record, other: Record) -> list[tuple[str, str, str]]:
    """(name, left, right) of parameters, buffers, inputs that differ in layout, layers folded."""

    def shown(p: Record, name: str) -> str:
        return show_layout(p.layouts[name]) if name in p.layouts else "–"

    names = [n for n, kind in (*plan.kinds.items(), *other.kinds.items()) if kind in ("parameter", "buffer", "input")]
    pairs = {n: (shown(plan, n), shown(other, n)) for n in dict.fromkeys(names)}
    return _merged_differences({n: pair for n, pair in pairs.items() if pair[0] != pair[1]})


def _operation_differences(plan: Record, other: Record) -> list[tuple[str, str, str]]:
    """(operation, left, right) of operations with FLOPs that are sharded along other factors."""

    def shown(p: Record, node: str) -> str:
        labels = shown_labels(p.choices[node].labels)
        return " ".join(f"{x}@{axis}" for x, axis in zip(labels, p.mesh.axes, strict=True))

    shared = [n for n, c in plan.choices.items() if c.flops and n in other.choices and other.choices[n].op == c.op]
    pairs = {n: (shown(plan, n), shown(other, n)) for n in shared}
    differ = {n: pair for n, pair in pairs.items() if pair[0] != pair[1]}
    return _merged_differences(differ, {n: plan.choices[n].fqn or n for n in differ})


def _merged_differences(
    differ: Mapping[str, tuple[str, str]], called: Mapping[str, str] | None = None
) -> list[tuple[str, str, str]]:
    """(names with ranges of layer numbers, left, right)."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, pair in differ.items():
        shown = called[name] if called else name
        groups.setdefault((layer_glob(shown), *pair), []).append(shown)
    return [(ranged_name(names), left, right) for (_, left, right), names in groups.items()]


def _collective_differences(plan: Record, other: Record) -> list[tuple[str, str, str]]:
    """(kind, axes and phase; number × bytes left; right)."""

    def counted(p: Record) -> tuple[Counter[str], Counter[str]]:
        count: Counter[str] = Counter()
        sent: Counter[str] = Counter()
        for c in p.collectives:
            key = f"{c.kind_on_axes} {c.phase}"
            count[key] += 1
            sent[key] += c.bytes  # type: ignore[assignment]
        return count, sent

    (n, a), (m, b) = counted(plan), counted(other)

    def shown(count: Counter[str], sent: Counter[str], key: str) -> str:
        return f"{count[key]} × {show_bytes(sent[key] / count[key])}" if count[key] else "–"

    return [(key, shown(n, a, key), shown(m, b, key)) for key in dict.fromkeys((*n, *m))]


def _aligned_columns(rows: Iterable[tuple[str, str, str]]) -> str:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)

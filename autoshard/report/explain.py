"""Reasons of layouts and strategies: ``plan.explain(name)``."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from autoshard.errors import PlanError
from autoshard.passes.ir.paths import holders
from autoshard.passes.ir.units import show_bytes, show_seconds
from autoshard.report.record import Choice, Collective, Record, local_bytes
from autoshard.report.text import short_op, show_layout, together

MOST = 12
"""most parameters and operations of a module, or collectives, that are listed"""


def explain(plan: Record, name: str) -> str:
    """Layout or strategy of ``name``, the reason, alternatives and collectives, as text.

    ``name``: a parameter, buffer or input; an operation or value of the graph; or an fnmatch
    pattern of modules, else of parameters. Raises :class:`PlanError` with the nearest names for
    anything else.
    """
    if not isinstance(name, str):
        raise PlanError(f"explain takes a name, or a pattern of modules, got {name!r}")
    if (first := plan.ties.get(name)) is not None:
        return f"{name} is tied to {first}\n{explain(plan, first)}"
    if plan.kinds.get(name, "value") != "value":
        return "\n".join(_of_input(plan, name))
    if node := _making(plan, name):
        return "\n".join(_of_operation(plan, node))
    found = [m for m in sorted(plan.modules) if m and fnmatch.fnmatchcase(m, name)]
    found = found or [m for m in _holders(plan) if fnmatch.fnmatchcase(m, name)]
    named = [n for n, kind in plan.kinds.items() if kind != "value" and fnmatch.fnmatchcase(n, name)]
    if not found and not named:
        known = [n for n, kind in plan.kinds.items() if kind != "value"]
        known += [*plan.ties, *dict.fromkeys([*filter(None, plan.modules), *_holders(plan)])]
        near = difflib.get_close_matches(name, [*known, *plan.choices], n=3, cutoff=0.3)
        raise PlanError(
            f"{name!r} is no parameter, buffer, input, module or operation of this plan. "
            f"Nearest: {', '.join(near or known[:3])}"
        )
    lines = [_of_module(plan, module) for module in found] or [_of_input(plan, n) for n in named]
    return "\n".join(line for part in lines for line in part)


def _holders(plan: Record) -> list[str]:
    """Container modules, such as ``nn.ModuleList``, which need not be called themselves."""
    held = (n for n, kind in plan.kinds.items() if kind in ("parameter", "buffer"))
    return holders([*held, *filter(None, plan.modules)])


def _count(operations: int) -> str:
    return "1 operation" if operations == 1 else f"{operations} operations"


def _making(plan: Record, name: str) -> str | None:
    """The operation with this name, or that computes the value with this name."""
    return name if name in plan.choices else next((n for n, c in plan.choices.items() if name in c.outputs), None)


def _why(plan: Record, name: str) -> str:
    if plan.staged is not None:
        return _why_in_stages(plan.staged.plans, name)
    if name in plan.given:
        return (
            f"asked for by like={plan.like}"
            if plan.like
            else "asked for by a hint, or laid out by an earlier compilation"
        )
    if plan.lower_bound <= 0:
        return "as the plan that was given says"
    exact = plan.cost.total_s <= plan.lower_bound * (1 + 1e-9)
    return "part of the cheapest plan" if exact else "part of the best plan found"


def _why_in_stages(stages: Sequence[Record], name: str) -> str:
    """The reason in the first stage that has ``name``: later stages take its layout."""
    stage = next(p for p in stages if name in p.kinds)
    searched = any(p.lower_bound > 0 for p in stages)
    follows = searched and stage.lower_bound <= 0 and name not in stage.given
    return "as in a stage before that is equal" if follows else _why(stage, name)


def _lies(plan: Record, name: str) -> str:
    """Layout of ``name``; with stages that on a stage's mesh, and which stages hold it."""
    if plan.staged is None:
        return show_layout(plan.layouts[name])
    axis, plans = plan.staged.axis, plan.staged.plans
    there = [str(i) for i, p in enumerate(plans) if name in p.kinds]
    layout = next(p.layouts[name] for p in plans if name in p.kinds)
    how = "whole" if layout.mesh.axes == (axis,) else show_layout(layout)
    return f"{how} in stage{'s' * (len(there) > 1)} {' and '.join(there)} of {len(plans)}"


def _of_input(plan: Record, name: str) -> Iterator[str]:
    shape, layout = plan.shapes[name], plan.layouts[name]
    yield f"{name}: {plan.kinds[name]}, {plan.dtypes.get(name, '')}{list(shape)}"
    each = "per rank" if plan.staged is None else "on each of its ranks"
    yield f"  lies {_lies(plan, name)}: {show_bytes(local_bytes(plan, name))} {each}; {_why(plan, name)}"
    yield from _noted(plan, [name])
    shared = show_layout(plan.shared.get(name, layout))
    if shared != show_layout(layout):
        yield f"  its readers convert from {shared}"
    for node, choice in plan.choices.items():
        for value, use in zip(choice.inputs, choice.uses, strict=True):
            if value == name:
                yield f"  read as {use.replace('I@', 'R@')} by {node} ({_what(choice)}), {_labels(plan, choice)}"
                yield from _alternatives(plan, choice, "    ")
    yield from _sent(c for c in plan.collectives if _moves(c, {name}))


def _noted(plan: Record, names: Collection[str]) -> Iterator[str]:
    """Notes that name one of these parameters: why it deviates from the named strategy."""
    yield from (f"  {note}" for note in plan.notes if not {*names}.isdisjoint(re.split(r"[ ,;:]+", note)))


def _of_operation(plan: Record, node: str) -> Iterator[str]:
    choice = plan.choices[node]
    yield f"{node}: {_what(choice)}" + (f" at {choice.source}" if choice.source else "")
    yield f"  runs {_labels(plan, choice)} in {show_seconds(choice.seconds)}; {_reason(plan, choice)}"
    for value, use in zip(choice.inputs, choice.uses, strict=True):
        yield f"  reads {value} {list(plan.shapes[value])} as {use.replace('I@', 'R@')}"
    for value in choice.outputs:
        yield f"  makes {value} {list(plan.shapes[value])} as {show_layout(plan.layouts[value])}"
    made = {node, *choice.outputs}
    sent = [c for c in plan.collectives if c.op == node or _moves(c, made)]
    if (
        plan.folded
        and any("folded" in label for label in choice.labels)
        and not any("halves" in c.reason for c in sent)
    ):
        yield f"  the sequence comes, and goes on, in folded order of {plan.folded} ranks: nothing is swapped for it"
    yield from _alternatives(plan, choice, "  ")
    yield from _sent(sent)


def _of_module(plan: Record, module: str) -> Iterator[str]:
    inside = {n: c for n, c in plan.choices.items() if c.fqn == module or c.fqn.startswith(module + ".")}
    owned = [n for n, kind in plan.kinds.items() if kind in ("parameter", "buffer") and n.startswith(module + ".")]
    seconds = sum(c.seconds for c in inside.values())
    called = f" ({plan.modules[module]})" if module in plan.modules else ""
    yield f"{module}{called}: {_count(len(inside))}, {show_seconds(seconds)}"
    for name in owned[:MOST]:
        yield f"  {name} {list(plan.shapes[name])} lies {_lies(plan, name)}; {_why(plan, name)}"
    yield from _noted(plan, owned)
    heavy = sorted(inside, key=lambda n: -inside[n].seconds)[:MOST]
    for node in (n for n in inside if n in heavy):
        yield f"  {node} ({short_op(inside[node])}) runs {_labels(plan, inside[node])} in {show_seconds(inside[node].seconds)}"
        yield from _alternatives(plan, inside[node], "    ", 1)
    left = max(0, len(owned) - MOST) + max(0, len(inside) - MOST)
    if left:
        yield f"  and {left} more"
    yield from _sent(
        c
        for c in plan.collectives
        if c.fqn == module or c.fqn.startswith(module + ".") or c.value in owned or {*inside, *owned} & {*c.also}
    )


def _moves(c: Collective, names: Iterable[str]) -> bool:
    """Whether ``c`` moves one of these values."""
    return not {c.value, *c.also}.isdisjoint(names)


def _shown(reason: str) -> str:
    """``reason`` with I shown as R, except for gradient sums, where only I and R differ."""
    value, _, change = reason.partition(": ")
    before, arrow, after = change.replace("I@", "R@").partition(" → ")
    return f"{value}: gradients added ({change})" if arrow and before == after else reason.replace("I@", "R@")


def _what(choice: Choice) -> str:
    return f"{short_op(choice)} in {choice.fqn or '(root)'}"


def _reason(plan: Record, choice: Choice) -> str:
    if not choice.has_rule:
        return "it has no rule"
    return f"like={plan.like} asks for it where it names it" if plan.like else "part of the plan that was found"


def _labels(plan: Record, choice: Choice, labels: tuple[str, ...] = ()) -> str:
    """``cut along n@tp``, ``whole``, ``on summands``."""
    pairs = list(zip(labels or choice.labels, plan.mesh.axes, strict=True))
    cut = [f"{label.replace('...', 'd')}@{axis}" for label, axis in pairs if _divides(label)]
    summed = [axis for label, axis in pairs if label.startswith("P(")]
    parts = [f"cut along {', '.join(cut)}"] if cut else []
    parts += [f"on summands along {', '.join(summed)}"] if summed else []
    return " and ".join(parts) or "whole on every rank"


def _divides(label: str) -> bool:
    return label not in ("I", "R", "–") and not label.startswith("P(")


def _alternatives(plan: Record, choice: Choice, indent: str, most: int = 3) -> Iterator[str]:
    """Other strategies of the operation, and the seconds that each change alone would cost."""
    now = _labels(plan, choice)
    told: dict[str, float] = {}
    for labels, seconds in choice.alternatives:
        what = _labels(plan, choice, labels)
        if what != now:
            told[what] = min(seconds, told.get(what, seconds))
    for what, seconds in list(told.items())[:most]:
        more = "more" if seconds >= 0 else "less"
        yield f"{indent}instead {what}: {show_seconds(abs(seconds))} {more} a step, all else as it is"


def _sent(collectives: Iterable[Collective]) -> Iterator[str]:
    found = list(collectives)
    for c in found[:MOST]:
        yield (
            f"  sends {show_bytes(c.bytes)} by {c.kind}@{','.join(c.axes)} {c.phase}, {show_seconds(c.seconds)}: "
            f"{together(map(_shown, c.reasons))}"
        )
    if rest := found[MOST:]:
        more = "1 collective" if len(rest) == 1 else f"{len(rest)} collectives"
        yield f"  and {more} more, {show_bytes(sum(c.bytes for c in rest))}"
    if not found:
        yield "  nothing is sent for it"

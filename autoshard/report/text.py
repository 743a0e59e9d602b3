"""A plan as tables for a terminal: layouts, collectives, memory, hot spots and notes."""

from __future__ import annotations

import io
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.errors import PlanError
from autoshard.layout import Layout
from autoshard.passes.ir.memory import Recomputed
from autoshard.passes.ir.text import is_number, show_bytes, show_flops, show_seconds
from autoshard.report.pipeline import stage_rows
from autoshard.report.record import (
    GRADIENT_SUM,
    REASON_SEPARATOR,
    Choice,
    Collective,
    Record,
    local_bytes,
    serving_text,
)
from autoshard.report.summary import UNLIMITED_BYTES, compared_rows, setting_text, summary_rows, work_seconds

TEXT_WIDTH = 120
"""columns of text that does not go to a terminal"""
SHORT_PARAMETERS, SHORT_ROWS = 8, 5
"""most rows of a table in a short report: of parameters, of others"""


def plan_text(plan: Record, width: int | None = None, level: str = "full") -> str:
    """``plan`` as plain text tables. ``width``: columns; default: the terminal's, else 120.
    ``level``: "short" (one screen) or "full"; :class:`PlanError` for another."""
    if level not in ("short", "full"):
        raise PlanError(f'a report is "short" or "full", not {level!r}')
    if width is None:
        width = max(80, shutil.get_terminal_size().columns) if sys.stdout.isatty() else TEXT_WIDTH
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(plan_table(plan, full=level == "full"))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def short_text(plan: Record) -> str:
    """``plan`` in one line: ``Llama on h100, mesh dp=2, tp=8: 122 ms a step, 51.9 GB per rank``."""
    cost = plan.cost
    where = f"{plan.title or 'a model'} on {plan.mesh.hardware.name}, mesh {plan.mesh}"
    return f"{where}: {show_seconds(cost.total_s)} a step, {show_bytes(cost.memory_bytes)} per rank"


def plan_html(plan: Record) -> str:
    """``plan`` as HTML for notebooks: the tables of :func:`plan_text`, which scroll sideways."""
    console = Console(file=io.StringIO(), width=TEXT_WIDTH, record=True, legacy_windows=False)
    console.print(plan_table(plan))
    style = "font-family: monospace; line-height: 1.3; white-space: pre; overflow-x: auto"
    return console.export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')


def plan_table(plan: Record, full: bool = True) -> RenderableType:
    """``plan`` as a rich renderable; unless ``full``, tables have their first rows only."""
    return Group(*_full_parts(plan) if full else _short_parts(plan))


def _full_parts(plan: Record) -> Iterator[RenderableType]:
    yield _headline(plan)
    yield _details(plan)
    yield from (Text(line) for line in (serving_text(plan.serving) if plan.serving is not None else ()))
    if len(plan.known_compared) > 1:
        yield _compared_table(plan)
    if plan.staged:
        yield _stages_table(plan)
    yield _parameters_table(plan)
    if plan.collectives:
        yield _collectives_table(plan)
    yield _memory_table(plan)
    if plan.recomputed:
        yield _recomputed_table(plan)
    yield _hot_spots_table(plan)
    if any(not c.has_rule for c in plan.choices.values()):
        yield _without_rule_table(plan)
    yield from (Text(f"\n{note}", "yellow") for note in _shown_notes(plan))


def _short_parts(plan: Record) -> Iterator[RenderableType]:
    """A screen: the summary, and of each table the rows that say most."""
    yield _headline(plan)
    yield from (Text(line) for line in (serving_text(plan.serving)[:2] if plan.serving is not None else ()))
    tables = [(_parameters_table(plan), SHORT_PARAMETERS, "parameters"), (_hot_spots_table(plan), SHORT_ROWS, "costs")]
    if plan.collectives:
        tables.insert(1, (_collectives_table(plan), SHORT_ROWS, "collectives"))
    if plan.staged:
        tables.insert(0, (_stages_table(plan), SHORT_ROWS, "stages"))
    folded = ["memory by use"]
    for table, most, what in tables:
        shown, left = table.first(most)
        yield shown
        folded += [f"{left} more rows of {what}"] if left else []
    notes = _shown_notes(plan)
    yield from (Text(f"\n{note if len(note) <= 230 else note[:230] + ' …'}", "yellow") for note in notes[:1])
    unruled = sum(not c.has_rule for c in plan.choices.values())
    folded += [f"{unruled} operations without a rule"] if unruled else []
    folded += [f"{len(notes) - 1} notes"] if len(notes) > 1 else []
    yield Text(f'\nplan.report("full"): {", ".join(folded)}')


def _shown_notes(plan: Record) -> list[str]:
    return [note for note in plan.notes if not note.startswith("replicated: no rule")]


# --- names ---


def show_layout(layout: Layout) -> str:
    """``layout`` as users see it: sharded axes first; Replicate and Invariant are both R."""
    return str(layout.without_gradient())


def shown_labels(labels: Sequence[str]) -> list[str]:
    """Labels of a strategy, one per mesh axis, in the letters of :func:`show_layout`."""
    return ["R" if label == "I" else label for label in labels]


def layer_glob(fqn: str) -> str:
    return ".".join("*" if is_number(part) else part for part in fqn.split("."))


def layer_numbers(fqns: Iterable[str]) -> str:
    """Layer numbers of names that share a glob, as ranges: ``0-3,7``."""
    first = (next(filter(is_number, fqn.split(".")), None) for fqn in fqns)
    found = sorted({int(number) for number in first if number is not None})
    ranges: list[list[int]] = []
    for n in found:
        if ranges and n == ranges[-1][1] + 1:
            ranges[-1][1] = n
        else:
            ranges.append([n, n])
    return ",".join(f"{a}-{b}" if a != b else str(a) for a, b in ranges)


# --- the tables ---


def ranged_name(names: Sequence[str]) -> str:
    """Names that share a glob as one, with ranges of numbers: ``blocks.{0-3}.mlp.2.weight``."""
    places = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(parts[0] if len(set(parts)) == 1 else "{" + layer_numbers(parts) + "}" for parts in places)


@dataclass
class TextTable:
    """A table of a report; a column that begins with ">" is aligned to the right."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def first(self, most: int) -> tuple[TextTable, int]:
        """(the first ``most`` rows, number of the others); one more row counts as none."""
        left = len(self.rows) - most
        return (self, 0) if left <= 1 else (replace(self, rows=self.rows[:most]), left)

    def __rich__(self) -> Table:
        title = Text(f"\n{self.title}")
        table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1))
        for column in self.columns:  # Text, so that names are not read as rich markup
            right = column.startswith(">")
            table.add_column(Text(column.removeprefix(">")), justify="right" if right else "left", no_wrap=right)
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table


def _new_table(title: str, *columns: str) -> TextTable:
    return TextTable(title, columns)


def _add_row(table: TextTable, *cells: str) -> None:
    table.rows.append(cells)


def _headline(plan: Record) -> Table:
    title = Text(f"{plan.title or 'Plan'} on {setting_text(plan)}")
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for row in summary_rows(plan):
        table.add_row(*map(Text, row))
    return table


def _details(plan: Record) -> Text:
    cost = plan.cost
    lines = [f"{show_flops(cost.flops)} in all, {show_flops(cost.flops_per_rank)} on the busiest rank"]
    if abs(cost.merged_s) > 1e-9 * cost.total_s:
        lines.append(f"merged on top: {show_seconds(-cost.merged_s).replace('-', '−')}")
    if plan.folded:
        into, back = (", ".join(values) or "nothing" for values in plan.folds)
        lines.append(f"the sequence is in zigzag order of {plan.folded} ranks: {into} brought into it, {back} back")
    return Text("\n".join(lines))


def _stages_table(plan: Record) -> TextTable:
    staged = plan.staged
    assert staged is not None
    title = f"Stages along {staged.axis}: {staged.schedule}, {staged.micro_batches} micro-batches"
    columns = (">stage", ">rank", "modules", ">forward", ">backward", ">sends", ">in flight", ">memory/rank")
    table = _new_table(title, *columns)
    for row in stage_rows(plan):
        globs: dict[str, list[str]] = {}
        for path in row.modules:
            globs.setdefault(layer_glob(path), []).append(path)
        modules = ", ".join(map(ranged_name, globs.values()))
        seconds = [show_seconds(s) for s in (row.times.batch.forward, row.times.batch.backward)]
        sizes = show_bytes(row.sent), str(row.flying), show_bytes(row.memory.peak)
        _add_row(table, str(row.number), str(row.rank), modules, *seconds, *sizes)
    return table


@dataclass(frozen=True)
class ParameterRow:
    """Parameters with the same glob, shape and layout."""

    glob: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    layout: Layout


def parameter_rows(plan: Record) -> tuple[ParameterRow, ...]:
    """Rows of parameters, buffers and inputs, equal layers folded."""
    groups: dict[tuple[str, tuple[int, ...], str], list[str]] = {}
    for name, kind in plan.kinds.items():
        if kind in ("parameter", "buffer", "input"):
            groups.setdefault((layer_glob(name), plan.shapes[name], show_layout(plan.layouts[name])), []).append(name)
    split = Counter(glob for glob, _, _ in groups)
    return tuple(
        ParameterRow(
            glob if split[glob] == 1 < len(names) else ranged_name(names), tuple(names), shape, plan.layouts[names[0]]
        )
        for (glob, shape, _), names in groups.items()
    )


def _parameters_table(plan: Record) -> TextTable:
    table = _new_table("Parameters, buffers and inputs", "name", "", "shape", "layout", ">bytes/rank")
    for row in parameter_rows(plan):
        count = f"×{len(row.names)}" if len(row.names) > 1 else ""
        size = sum(local_bytes(plan, n) for n in row.names)
        _add_row(table, row.glob, count, str(list(row.shape)), show_layout(row.layout), show_bytes(size))
    return table


@dataclass(frozen=True)
class CollectiveRow:
    """Collectives of one kind for equal modules; ``count``, ``bytes``, ``seconds`` are totals."""

    kind: str
    axes: tuple[str, ...]
    phase: str
    where: str
    reason: str
    count: int
    bytes: float
    seconds: float
    first: Collective


def collective_rows(collectives: Iterable[Collective]) -> tuple[CollectiveRow, ...]:
    """Rows of collectives, equal layers folded, most expensive first."""
    groups: dict[tuple[str, tuple[str, ...], str, str, str], list[Collective]] = {}
    for c in collectives:
        groups.setdefault((c.kind, c.axes, c.phase, layer_glob(c.fqn), _layout_change_text(c)), []).append(c)
    rows = [
        CollectiveRow(
            *key[:3],
            key[3] if len(found) > 1 else found[0].fqn,
            key[4],
            sum(c.times for c in found),
            sum(c.bytes for c in found),
            sum(c.seconds for c in found),
            found[0],
        )
        for key, found in groups.items()
    ]
    return tuple(sorted(rows, key=lambda t: (-t.seconds, -t.bytes)))


def _layout_change_text(c: Collective) -> str:
    """The redistribution and its value without layer numbers: ``linear P@tp → S(1)@tp``."""
    reason, *others = c.reasons
    value, colon, change = reason.partition(": ")
    if not colon or (" → " not in change and not change.startswith(GRADIENT_SUM)):
        return reasons_text(c.reasons)
    more = f" and {len(others)} more" if others else ""
    what = value.rpartition(".")[2] if "." in value else re.sub(r"_\d+$", "", value)
    if change.startswith(GRADIENT_SUM):
        return f"{what}: {change}{more}"
    change, again, _ = change.partition(" (")
    src, dst = (side.split() for side in change.split(" → "))
    before, after = " ".join(x for x in src if x not in dst), " ".join(x for x in dst if x not in src)
    if not before and not after:  # in another order
        before, after = " ".join(src), " ".join(dst)
    return f"{what} {before} → {after}" + (" again" if again else "") + more


def reasons_text(reasons: Iterable[str]) -> str:
    """The reasons of one collective, equal ones once: ``embedding: rows of tables ×26``."""
    found = Counter(reason.replace("aten.", "", 1).replace(".default", "", 1) for reason in reasons)
    return REASON_SEPARATOR.join(f"{reason} ×{count}" if count > 1 else reason for reason, count in found.items())


def _collectives_table(plan: Record) -> TextTable:
    rows, work = collective_rows(plan.collectives), work_seconds(plan)
    calls, sent = sum(c.times for c in plan.collectives), show_bytes(sum(r.bytes for r in rows))
    title = f"Collectives of a step: {calls} per rank, {sent} sent"
    table = _new_table(title, "kind", "axis", "phase", "module", "", "why", ">bytes", ">time", ">of work")
    for row in rows:
        count = f"×{row.count}" if row.count > 1 else ""
        share = row.seconds / work if work else 0.0
        where = row.where or "(root)"
        cells = (row.kind, ",".join(row.axes), row.phase, where, count, row.reason)
        _add_row(table, *cells, show_bytes(row.bytes), show_seconds(row.seconds), f"{share:.1%}")
    return table


def memory_parts(plan: Record) -> dict[str, float]:
    """Bytes of the fullest rank at the step's peak by part; they sum to the peak."""
    names = {"optimizer": f"optimizer state ({plan.optimizer})", "activations": "activations kept for the backward"}
    parts = {names.get(what, what): size for what, size in plan.memory.at_peak.items()}
    return {k: v for k, v in parts.items() if v or k == "parameters"}


def _memory_table(plan: Record) -> TextTable:
    limit = plan.mesh.hardware.memory_bytes
    table = _new_table("Memory per rank at the peak", "what", ">bytes", ">share")
    parts = memory_parts(plan)
    total = sum(parts.values())
    for what, size in parts.items():
        _add_row(table, what, show_bytes(size), f"{size / total:.0%}" if total else "")
    room = f"{total / limit:.0%} of {show_bytes(limit)}" if limit < UNLIMITED_BYTES else ""
    _add_row(table, f"together, at {plan.memory.moment}", show_bytes(total), room)
    return table


def recomputed_rows(plan: Record) -> list[tuple[str, str, int, float, float]]:
    """Recomputation: (module, operations, count, bytes saved, seconds), equal layers folded."""
    rows: dict[str, list[Recomputed]] = {}
    for r in plan.recomputed:
        rows.setdefault(layer_glob(r.fqn) or "(root)", []).append(r)

    def names(found: list[Recomputed]) -> str:
        ops = dict.fromkeys(
            short_op(plan.choices[r.name]) if r.what != "converted" and r.name in plan.choices else "conversions"
            for r in found
        )
        return ", ".join(ops)

    folded = [
        (where, names(found), len(found), sum(r.bytes for r in found), sum(r.seconds for r in found))
        for where, found in rows.items()
    ]
    return sorted(folded, key=lambda row: -row[3])


def _compared_table(plan: Record) -> TextTable:
    table = _new_table("Compared: named strategies and runners-up", "plan", ">step", ">", ">peak/rank", "")
    for row in compared_rows(plan.known_compared):
        _add_row(table, *row)
    return table


def _recomputed_table(plan: Record) -> TextTable:
    table = _new_table("Recomputed in the backward", "module", "what", "", ">bytes saved", ">time")
    for where, what, count, size, seconds in recomputed_rows(plan):
        _add_row(table, where, what, f"×{count}" if count > 1 else "", show_bytes(size), show_seconds(seconds))
    return table


def hot_spots(plan: Record, limit: int = 6) -> tuple[tuple[str, int, float], ...]:
    """(what, count, total seconds) of the costliest operations and collectives, layers folded."""
    seconds: dict[str, list[float]] = {}
    for choice in plan.choices.values():
        seconds.setdefault(f"{short_op(choice)} in {layer_glob(choice.fqn) or '(root)'}", []).append(choice.seconds)
    for c in plan.collectives:
        what = f"{c.kind_on_axes} {c.phase} in {layer_glob(c.fqn) or '(root)'}"
        seconds.setdefault(what, []).append(c.seconds)
    ordered = sorted(((k, len(v), sum(v)) for k, v in seconds.items()), key=lambda x: -x[2])
    return tuple(x for x in ordered[:limit] if x[2] > 0)


def short_op(choice: Choice) -> str:
    """``linear`` of ``aten.linear.default``."""
    return choice.op.removeprefix("aten.").removesuffix(".default")


def _hot_spots_table(plan: Record) -> TextTable:
    table = _new_table("What dominates", "what", "", ">time", ">of work")
    work = work_seconds(plan)
    for what, count, seconds in hot_spots(plan):
        share = f"{seconds / work:.1%}" if work else ""
        _add_row(table, what, f"×{count}" if count > 1 else "", show_seconds(seconds), share)
    return table


def _replicated_rows(plan: Record) -> Iterator[tuple[str, int, Choice, float]]:
    groups: dict[tuple[str, str, str], list[Choice]] = {}
    for c in plan.choices.values():
        if not c.has_rule:
            groups.setdefault((c.op, layer_glob(c.fqn), c.source), []).append(c)
    for (op, _, _), found in groups.items():
        yield op, len(found), found[0], sum(c.seconds * (1 - 1 / plan.mesh.size) for c in found)


def _without_rule_table(plan: Record) -> TextTable:
    table = _new_table(
        "Replicated: no rule (correct, but every rank does all the work)", "op", "", "module", "at", ">lost"
    )
    for op, count, first, seconds in sorted(_replicated_rows(plan), key=lambda x: -x[3]):
        where = layer_glob(first.fqn) if count > 1 else first.fqn
        _add_row(table, op, f"×{count}" if count > 1 else "", where or "(root)", first.source, show_seconds(seconds))
    return table

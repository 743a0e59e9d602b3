"""Comparison of two plans: ``plan.diff(other)``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import zip_longest

from autoshard.errors import PlanError
from autoshard.passes.ir.units import show_bytes, show_flops, show_seconds
from autoshard.report.record import Record
from autoshard.report.text import folded, globbed, show_layout

PARTS = ("parameters", "gradients", "optimizer", "buffers", "activations", "temporaries")
"""compared fields of :class:`~autoshard.passes.ir.memory.Memory`"""


def diff(plan: Record, other: Record) -> str:
    """Costs, memory, layouts and collectives of ``plan`` (left) and ``other`` (right), as text."""
    if not isinstance(other, Record):
        raise PlanError(f"diff takes another plan, got {other!r}")
    heading = ("", _name(plan, "this plan"), _name(other, "other plan"))
    parts = [_columns([heading, *_costs(plan, other)])]
    layouts = _layouts(plan, other)
    parts.append(
        "Layouts that differ\n" + _columns(layouts) if layouts else "All parameters, buffers and inputs lie alike"
    )
    if work := _work(plan, other):
        parts.append("Operations that run otherwise\n" + _columns(work))
    if sent := _sent(plan, other):
        parts.append("Collectives of a step\n" + _columns(sent))
    return "\n\n".join(parts)


def _name(plan: Record, side: str) -> str:
    step = "training" if plan.training else "inference"
    parts = f"{plan.micro_batches} micro-batches" if plan.micro_batches > 1 else ""
    like = f"like={plan.like}" if plan.like else ""
    return f"{side}: " + ", ".join(filter(None, (str(plan.mesh), step, like, parts, plan.mixed_precision)))


def _costs(plan: Record, other: Record) -> list[tuple[str, str, str]]:
    a, b = plan.cost, other.cost
    sent = [sum(c.bytes for c in p.collectives) for p in (plan, other)]
    return [
        ("step", show_seconds(a.total_s), f"{show_seconds(b.total_s)}{_times(a.total_s, b.total_s)}"),
        ("compute", show_seconds(a.compute_s), show_seconds(b.compute_s)),
        ("communication", show_seconds(a.comm_s), show_seconds(b.comm_s)),
        ("of it hidden", show_seconds(a.hidden_s), show_seconds(b.hidden_s)),
        *([("waiting", show_seconds(a.bubble_s), show_seconds(b.bubble_s))] if a.bubble_s or b.bubble_s else []),
        ("sent per rank", show_bytes(sent[0]), show_bytes(sent[1])),
        ("memory per rank", show_bytes(a.memory_bytes), show_bytes(b.memory_bytes)),
        *((f"  {x}", show_bytes(getattr(plan.memory, x)), show_bytes(getattr(other.memory, x))) for x in PARTS),
        ("busiest rank", show_flops(a.flops_per_rank), show_flops(b.flops_per_rank)),
    ]


def _times(a: float, b: float) -> str:
    return f" (× {b / a:.3g})" if a > 0 else ""


def _layouts(plan: Record, other: Record) -> list[tuple[str, str, str]]:
    """(name, left, right) of parameters, buffers, inputs that differ in layout, layers folded."""

    def shown(p: Record, name: str) -> str:
        return show_layout(p.layouts[name]) if name in p.layouts else "–"

    names = [n for n, kind in (*plan.kinds.items(), *other.kinds.items()) if kind in ("parameter", "buffer", "input")]
    pairs = {n: (shown(plan, n), shown(other, n)) for n in dict.fromkeys(names)}
    return _grouped({n: pair for n, pair in pairs.items() if pair[0] != pair[1]})


def _work(plan: Record, other: Record) -> list[tuple[str, str, str]]:
    """(operation, left, right) of operations with FLOPs that are sharded along other factors."""

    def shown(p: Record, node: str) -> str:
        return " ".join(f"{x}@{axis}" for x, axis in zip(p.choices[node].labels, p.mesh.axes, strict=True)).replace(
            "I@", "R@"
        )

    shared = [n for n, c in plan.choices.items() if c.flops and n in other.choices and other.choices[n].op == c.op]
    pairs = {n: (shown(plan, n), shown(other, n)) for n in shared}
    differ = {n: pair for n, pair in pairs.items() if pair[0] != pair[1]}
    return _grouped(differ, {n: plan.choices[n].fqn or n for n in differ})


def _grouped(
    differ: Mapping[str, tuple[str, str]], called: Mapping[str, str] | None = None
) -> list[tuple[str, str, str]]:
    """(names with ranges of layer numbers, left, right)."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, pair in differ.items():
        shown = called[name] if called else name
        groups.setdefault((globbed(shown), *pair), []).append(shown)
    return [(folded(names), left, right) for (_, left, right), names in groups.items()]


def _sent(plan: Record, other: Record) -> list[tuple[str, str, str]]:
    """(kind, axes and phase; number × bytes left; right)."""

    def counted(p: Record) -> tuple[Counter[str], Counter[str]]:
        count: Counter[str] = Counter()
        sent: Counter[str] = Counter()
        for c in p.collectives:
            key = f"{c.kind}@{','.join(c.axes)} {c.phase}"
            count[key] += 1
            sent[key] += c.bytes  # type: ignore[assignment]
        return count, sent

    (n, a), (m, b) = counted(plan), counted(other)

    def shown(count: Counter[str], sent: Counter[str], key: str) -> str:
        return f"{count[key]} × {show_bytes(sent[key] / count[key])}" if count[key] else "–"

    return [(key, shown(n, a, key), shown(m, b, key)) for key in dict.fromkeys((*n, *m))]


def _columns(rows: Iterable[tuple[str, str, str]]) -> str:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)

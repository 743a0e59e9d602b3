"""Timeline of a pipeline for pictures: actions per rank, messages, memory of the fullest rank."""

from __future__ import annotations

from typing import Any

from autoshard.passes.pipeline.timeline import Timeline
from autoshard.report.pipeline import pipeline
from autoshard.report.record import Record

NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
CATEGORIES = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}


def chart(plan: Record) -> dict[str, Any] | None:
    """Pipeline chart of the page: per rank (kind, stage, micro-batch, start, end), and messages."""
    if plan.staged is None:
        return None
    step = pipeline(plan)
    return {
        "axis": plan.staged.axis,
        "schedule": plan.staged.schedule,
        "batches": plan.staged.micro_batches,
        "end": step.step_s,
        "ranks": [[[*span.action, span.start, span.end] for span in spans] for spans in step.ranks],
        "messages": [[m.source, m.target, m.start, m.end] for m in step.messages],
        "idle": [1 - sum(s.end - s.start for s in spans) / step.step_s for spans in step.ranks],
    }


def trace_rows(plan: Record) -> list[dict[str, object]]:
    """Events in Chrome's trace format (microseconds), one process per rank along the stage axis."""
    staged = plan.staged
    assert staged is not None
    step, rows = pipeline(plan), list[dict[str, object]]()
    for rank, spans in enumerate(step.ranks):
        name = f"{plan.title or 'model'}: predicted, {staged.axis} {rank}"
        rows.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}})
        for tid, stream in enumerate(("compute", "messages")):
            rows.append({"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": stream}})
        for (kind, stage, batch), start, end in spans:
            args = {"stage": stage, "micro-batch": batch}
            rows.append(_event(rank, 0, f"{NAMES[kind]} {batch}, stage {stage}", CATEGORIES[kind], start, end, args))
    for (kind, stage, batch), source, target, start, end in step.messages:
        size = staged.sent[stage if kind == "F" else stage - 1][kind != "F"]
        sent = {"stage": stage, "micro-batch": batch, "bytes": size}
        rows.append(_event(source, 1, f"send to {target}", CATEGORIES[kind], start, end, sent))
    rank, points = memory_over_steps(plan, step)
    rows += [{"ph": "C", "pid": rank, "name": "memory", "ts": at * 1e6, "args": {"bytes": n}} for at, n in points]
    return rows


def _event(
    pid: int, tid: int, name: str, category: str, start: float, end: float, args: dict[str, Any]
) -> dict[str, object]:
    row = {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": category}
    return {**row, "ts": start * 1e6, "dur": (end - start) * 1e6, "args": args}


def memory_over_steps(plan: Record, step: Timeline) -> tuple[int, tuple[tuple[float, float], ...]]:
    """(fullest rank, (seconds, bytes) after each action): states, and activations in flight."""
    staged = plan.staged
    assert staged is not None
    ranks = len(step.ranks)
    plans = [[staged.plans[i] for i in range(rank, len(staged.plans), ranks)] for rank in range(ranks)]
    rank = max(range(ranks), key=lambda r: sum(p.memory.peak for p in plans[r]))
    parts = ("parameters", "optimizer", "buffers", "gradients", "gathered")
    stay = sum(getattr(p.memory, part) for p in plans[rank] for part in parts)
    held = {i: staged.plans[i].memory for i in range(rank, len(staged.plans), ranks)}
    kept = {i: (own.activations - own.gathered) / max(1, staged.flying[i]) for i, own in held.items()}
    last = "W" if any(span.action.kind == "W" for span in step.ranks[rank]) else "B"
    points, now = [(0.0, stay)], stay
    for action, _, end in step.ranks[rank]:
        now += kept[action.stage] * ((action.kind == "F") - (action.kind == last))
        points.append((end, now))
    return rank, tuple(points)

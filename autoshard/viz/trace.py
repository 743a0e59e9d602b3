"""Timelines of a plan: Chrome's trace format for Perfetto, pipeline chart, memory over time."""

from __future__ import annotations

import json
from typing import Any

from autoshard.passes.pipeline.schedules import Timeline
from autoshard.report.pipeline import pipeline_timeline
from autoshard.report.record import Record
from autoshard.report.schedule import COMPUTE_STREAM, step_timeline
from autoshard.report.text import hot_spots

ACTION_NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
ACTION_CATEGORIES = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}


def pipeline_chart(plan: Record) -> dict[str, Any] | None:
    """Pipeline chart of the page: per rank (kind, stage, micro-batch, start, end), and messages."""
    if plan.staged is None:
        return None
    step = pipeline_timeline(plan)
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
    step, rows = pipeline_timeline(plan), list[dict[str, object]]()
    for rank, spans in enumerate(step.ranks):
        name = f"{plan.title or 'model'}: predicted, {staged.axis} {rank}"
        rows.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}})
        for tid, stream in enumerate(("compute", "messages")):
            rows.append({"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": stream}})
        for (kind, stage, batch), start, end in spans:
            args = {"stage": stage, "micro-batch": batch}
            rows.append(
                _trace_event(
                    rank, 0, f"{ACTION_NAMES[kind]} {batch}, stage {stage}", ACTION_CATEGORIES[kind], start, end, args
                )
            )
    for (kind, stage, batch), source, target, start, end in step.messages:
        size = staged.sent[stage if kind == "F" else stage - 1][kind != "F"]
        sent = {"stage": stage, "micro-batch": batch, "bytes": size}
        rows.append(_trace_event(source, 1, f"send to {target}", ACTION_CATEGORIES[kind], start, end, sent))
    rank, points = memory_over_steps(plan, step)
    rows += [{"ph": "C", "pid": rank, "name": "memory", "ts": at * 1e6, "args": {"bytes": n}} for at, n in points]
    return rows


def _trace_event(
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


def memory_over_time(plan: Record) -> tuple[tuple[float, float], ...]:
    """(seconds, bytes of the fullest rank) at the end of each operation's forward and backward."""
    if plan.staged is not None:
        return memory_over_steps(plan, pipeline_timeline(plan))[1]
    ends = {(e.op, e.phase): e.start + e.seconds for e in step_timeline(plan) if e.stream == COMPUTE_STREAM}
    held = sum(plan.memory.at_peak.get(part, 0.0) for part in ("parameters", "optimizer", "buffers"))
    points = [(0.0, held)]
    for op, phase, size in plan.memory.curve:
        points.append((ends.get((op, phase), points[-1][0]), size))
    return (*points, (points[-1][0], held))


def trace_json(plan: Record) -> str:
    """The timeline as Chrome trace JSON, in microseconds."""
    top = [what for what, _, _ in hot_spots(plan)]
    if plan.staged is not None:
        rows = trace_rows(plan)
        return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms", "otherData": {"dominates": top}})
    events = step_timeline(plan)
    streams = list(dict.fromkeys([COMPUTE_STREAM, *sorted({e.stream for e in events})]))
    rows = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": f"{plan.title or 'model'}: predicted, one rank"}}
    ]
    rows += [
        {"ph": "M", "pid": 0, "tid": i, "name": "thread_name", "args": {"name": stream}}
        for i, stream in enumerate(streams)
    ]
    for e in events:
        args: dict[str, object] = {"module": e.fqn, "phase": e.phase, "at": e.source}
        if e.stream != COMPUTE_STREAM:
            args["bytes"] = e.bytes
        row = {"ph": "X", "pid": 0, "tid": streams.index(e.stream), "name": e.name, "cat": e.phase}
        rows.append({**row, "ts": e.start * 1e6, "dur": e.seconds * 1e6, "args": args})
    for at, size in memory_over_time(plan):
        rows.append({"ph": "C", "pid": 0, "name": "memory", "ts": at * 1e6, "args": {"bytes": size}})
    return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms", "otherData": {"dominates": top}})

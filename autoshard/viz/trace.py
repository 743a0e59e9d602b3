"""Timelines of a plan: Chrome's trace format for Perfetto, pipeline chart, memory over time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
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


TraceRow = dict[str, Any]
"""an event in Chrome's trace format; times in microseconds"""


def trace_json(plan: Record) -> str:
    """The timeline as Chrome trace JSON, in microseconds."""
    rows = _step_rows(plan) if plan.staged is None else trace_rows(plan)
    top = [what for what, _, _ in hot_spots(plan)]
    return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms", "otherData": {"dominates": top}})


def trace_rows(plan: Record) -> list[TraceRow]:
    """Events of a pipelined step, one process per rank along the stage axis."""
    staged = plan.staged
    assert staged is not None
    step, rows = pipeline_timeline(plan), list[TraceRow]()
    for rank, spans in enumerate(step.ranks):
        rows += _name_rows(rank, plan, f"{staged.axis} {rank}", ("compute", "messages"))
        for (kind, stage, batch), start, end in spans:
            name, args = f"{ACTION_NAMES[kind]} {batch}, stage {stage}", {"stage": stage, "micro-batch": batch}
            rows.append(_trace_event(rank, 0, name, ACTION_CATEGORIES[kind], start, end - start, args))
    for (kind, stage, batch), source, target, start, end in step.messages:
        size = staged.sent[stage if kind == "F" else stage - 1][kind != "F"]
        sent = {"stage": stage, "micro-batch": batch, "bytes": size}
        rows.append(_trace_event(source, 1, f"send to {target}", ACTION_CATEGORIES[kind], start, end - start, sent))
    rank, points = memory_over_steps(plan, step)
    return rows + _memory_rows(rank, points)


def _step_rows(plan: Record) -> list[TraceRow]:
    """Events of a step of one rank, a thread per stream."""
    events = step_timeline(plan)
    streams = list(dict.fromkeys([COMPUTE_STREAM, *sorted({e.stream for e in events})]))
    rows = _name_rows(0, plan, "one rank", streams)
    for e in events:
        args: TraceRow = {"module": e.fqn, "phase": e.phase, "at": e.source}
        args |= {} if e.stream == COMPUTE_STREAM else {"bytes": e.bytes}
        rows.append(_trace_event(0, streams.index(e.stream), e.name, e.phase, e.start, e.seconds, args))
    return rows + _memory_rows(0, memory_over_time(plan))


def _name_rows(pid: int, plan: Record, process: str, threads: Sequence[str]) -> list[TraceRow]:
    names: list[tuple[str, TraceRow, str]] = [("process_name", {}, f"{plan.title or 'model'}: predicted, {process}")]
    names += [("thread_name", {"tid": i}, thread) for i, thread in enumerate(threads)]
    return [{"ph": "M", "pid": pid, **tid, "name": what, "args": {"name": name}} for what, tid, name in names]


def _trace_event(
    pid: int, tid: int, name: str, category: str, start: float, seconds: float, args: TraceRow
) -> TraceRow:
    row = {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": category}
    return {**row, "ts": start * 1e6, "dur": seconds * 1e6, "args": args}


def _memory_rows(pid: int, points: Iterable[tuple[float, float]]) -> list[TraceRow]:
    return [{"ph": "C", "pid": pid, "name": "memory", "ts": at * 1e6, "args": {"bytes": n}} for at, n in points]


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

"""The timeline of a plan in Chrome's trace format, for ui.perfetto.dev and chrome://tracing.

One row per stream of :mod:`autoshard.report.schedule`, and one for memory. With pipeline stages one
process per rank along the stage axis, with its actions and messages.
"""

from __future__ import annotations

import json

from autoshard.report.pipeline import pipeline
from autoshard.report.record import Record
from autoshard.report.schedule import COMPUTE, timeline
from autoshard.report.text import hot_spots
from autoshard.viz.stages import memory_over_steps, trace_rows


def memory_over_time(plan: Record) -> tuple[tuple[float, float], ...]:
    """(seconds, bytes of the fullest rank) at the end of each operation's forward and backward."""
    if plan.staged is not None:
        return memory_over_steps(plan, pipeline(plan))[1]
    ends = {(e.op, e.phase): e.start + e.seconds for e in timeline(plan) if e.stream == COMPUTE}
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
    events = timeline(plan)
    streams = list(dict.fromkeys([COMPUTE, *sorted({e.stream for e in events})]))
    rows = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": f"{plan.title or 'model'}: predicted, one rank"}}
    ]
    rows += [
        {"ph": "M", "pid": 0, "tid": i, "name": "thread_name", "args": {"name": stream}}
        for i, stream in enumerate(streams)
    ]
    for e in events:
        args: dict[str, object] = {"module": e.fqn, "phase": e.phase, "at": e.source}
        if e.stream != COMPUTE:
            args["bytes"] = e.bytes
        row = {"ph": "X", "pid": 0, "tid": streams.index(e.stream), "name": e.name, "cat": e.phase}
        rows.append({**row, "ts": e.start * 1e6, "dur": e.seconds * 1e6, "args": args})
    for at, size in memory_over_time(plan):
        rows.append({"ph": "C", "pid": 0, "name": "memory", "ts": at * 1e6, "args": {"bytes": size}})
    return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms", "otherData": {"dominates": top}})

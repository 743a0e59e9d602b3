"""The predicted step as a timeline: one stream for compute, one per set of mesh axes for communication.

Written in Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open. The order is that of the
cost model: nothing overlaps, so the end is the predicted step time, less what collectives save by going together.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autoshard.plans.record import Choice, Collective, Record
from autoshard.plans.report import hot_spots, short_op
from autoshard.runtime import profiling

_BACKWARD_SHARE = 2 / 3
"""of an operation's predicted time, where a gradient flows: two products against one, twice the memory traffic"""


@dataclass(frozen=True)
class Event:
    """Something that takes time on a rank. ``start``, ``seconds``: seconds; ``stream``: compute or an axis list."""

    name: str
    stream: str
    phase: str
    start: float
    seconds: float
    fqn: str
    op: str
    """key of ``plan.choices``, or ""; for a collective the operation it is made for"""
    bytes: float = 0.0
    source: str = ""


def collective_name(c: Collective) -> str:
    """``all_gather@tp blocks.0.attention.q forward``, as in a profile of a run."""
    return profiling.collective_name(c.kind, c.axes, c.fqn, c.phase)


def timeline(plan: Record) -> tuple[Event, ...]:
    """Every event of one step in order; the last one ends at ``total_s - merged_s - local_s`` of ``plan.cost``."""
    events: list[Event] = []
    now = 0.0
    for event in _sequence(plan, _trained(plan)):
        events.append(replace(event, start=now))
        now += event.seconds
    return tuple(events)


def _trained(plan: Record) -> frozenset[str]:
    """Values that get a gradient."""
    return frozenset(plan.differentiable) if plan.training else frozenset()


def _sequence(plan: Record, trained: frozenset[str]) -> Iterator[Event]:
    """All events in order, each as if it started at 0."""
    groups: dict[tuple[str, str], list[Collective]] = {}
    for c in plan.collectives:
        moment = (
            "after"
            if c.value == c.op and c.phase == "forward"
            else "again"
            if c.reason.endswith(("(gathered again)", "(made again)"))
            else c.phase
        )
        groups.setdefault((c.op, moment), []).append(c)

    def send(op: str, moment: str) -> Iterator[Event]:
        for c in groups.get((op, moment), ()):
            stream = f"communication {','.join(c.axes)}"
            yield Event(collective_name(c), stream, c.phase, 0.0, c.seconds, c.fqn, op, c.bytes, c.reason)

    for name, choice in plan.choices.items():
        yield from send(name, "forward")
        yield from _compute(name, choice, "forward", trained)
        yield from send(name, "after")
    yield from send("", "forward")
    yield from send("", "backward")
    for name, choice in reversed(list(plan.choices.items())):
        yield from send(name, "again")
        yield from _compute(name, choice, "backward", trained)
        yield from send(name, "backward")


def _compute(name: str, choice: Choice, phase: str, trained: frozenset[str]) -> Iterator[Event]:
    share = _BACKWARD_SHARE if trained.intersection(choice.outputs) else 0.0
    seconds = choice.seconds * (share if phase == "backward" else 1 - share)
    if seconds > 0:
        title = f"{short_op(choice)} {choice.fqn or '(root)'} {phase}"
        yield Event(title, "compute", phase, 0.0, seconds, choice.fqn, name, 0.0, choice.source)


def memory_over_time(plan: Record) -> tuple[tuple[float, float], ...]:
    """(seconds, the most bytes on the busiest rank meanwhile), at the end of each operation's forward and backward."""
    ends = {(e.op, e.phase): e.start + e.seconds for e in timeline(plan) if e.stream == "compute"}
    held = sum(plan.memory.at_peak.get(part, 0.0) for part in ("parameters", "optimizer", "buffers"))
    points = [(0.0, held)]
    for op, phase, size in plan.memory.curve:
        points.append((ends.get((op, phase), points[-1][0]), size))
    return (*points, (points[-1][0], held))


def trace_json(plan: Record) -> str:
    """The timeline as Chrome trace JSON; timestamps are microseconds."""
    events = timeline(plan)
    streams = list(dict.fromkeys(["compute", *sorted({e.stream for e in events})]))
    rows: list[dict[str, object]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": f"{plan.title or 'model'}: predicted, one rank"}}
    ]
    rows += [
        {"ph": "M", "pid": 0, "tid": i, "name": "thread_name", "args": {"name": stream}}
        for i, stream in enumerate(streams)
    ]
    for e in events:
        args: dict[str, object] = {"module": e.fqn, "phase": e.phase, "at": e.source}
        if e.stream != "compute":
            args["bytes"] = e.bytes
        row = {"ph": "X", "pid": 0, "tid": streams.index(e.stream), "name": e.name, "cat": e.phase}
        rows.append({**row, "ts": e.start * 1e6, "dur": e.seconds * 1e6, "args": args})
    for at, size in memory_over_time(plan):
        rows.append({"ph": "C", "pid": 0, "name": "memory", "ts": at * 1e6, "args": {"bytes": size}})
    top = [what for what, _, _ in hot_spots(plan)]
    return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms", "otherData": {"dominates": top}})

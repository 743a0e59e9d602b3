"""Predicted timeline of a step: a list schedule with a compute stream and two streams per link.
Operations run in program order, forward then backward. Collectives that the next operation needs
block the compute stream. Parameter buckets are prefetched (``prefetch``) and awaited where they are
read. Gradient buckets are reduced once complete, small ones with the next; only the optimizer, and
the limit :data:`MAX_REDUCE_SCATTERS`, wait for them. Such overlapped collectives run one after another on
their own communicators: one that shares a link with a blocking collective halves the speed of both.
Meanwhile compute is slower (:attr:`~autoshard.mesh.Mesh.overlap`); without overlap all collectives
block. Of ring attention and collective matmul only the exposed time is shown."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from autoshard.report.record import Choice, Collective, Record
from autoshard.report.text import short_op
from autoshard.runtime.parameters.gradients import ALL_REDUCE_BUCKET_BYTES, MAX_REDUCE_SCATTERS, MIN_BUCKET_BYTES
from autoshard.runtime.transport import profiling

COMPUTE_STREAM, LINK_STREAMS = "compute", ("communication inside nodes", "communication between nodes")
PARAMETER_STREAMS = {link: link.replace("communication", "parameters") for link in LINK_STREAMS}
"""per link the stream of collectives that overlap with compute"""


@dataclass(frozen=True)
class Event:
    """An operation or collective on a rank; ``start`` in seconds; ``stream``: compute or a link."""

    name: str
    stream: str
    phase: str
    start: float
    seconds: float
    fqn: str
    op: str
    """key of ``plan.choices``, or ""; of a collective the operation that needs it"""
    bytes: float = 0.0
    source: str = ""
    movable: bool = False
    bucket: str = ""


def collective_name(c: Collective) -> str:
    """``all_gather@tp blocks.0.attention.q forward``, as in profiles of runs."""
    return profiling.collective_name(c.kind, c.axes, c.fqn, c.phase)


def step_timeline(plan: Record) -> tuple[Event, ...]:
    """Events of one step in order of their start; micro-batches follow one another."""
    last = _StepSchedule(plan, last=True).run()
    if plan.micro_batches == 1:
        return last
    one = _StepSchedule(plan, last=False).run()
    length = max((e.start + e.seconds for e in one), default=0.0)
    every = [(one, k * length) for k in range(plan.micro_batches - 1)]
    return tuple(replace(e, start=e.start + at) for events, at in [*every, (last, len(every) * length)] for e in events)


def step_end(plan: Record) -> float:
    """End of the last event of the timeline, in seconds."""
    return max((e.start + e.seconds for e in step_timeline(plan)), default=0.0)


@dataclass
class _OverlappedStream:
    """A stream of overlapped messages over one kind of link, one at a time."""

    queued: deque[tuple[int, Event]] = field(default_factory=deque)
    """(number in the program, event); the first is in flight"""
    left: float = 0.0
    """remaining seconds of the first"""
    begun: float = 0.0
    arrived: set[int] = field(default_factory=set)
    events: list[Event] = field(default_factory=list)

    def send(self, number: int, event: Event, now: float) -> None:
        self.queued.append((number, event))
        if len(self.queued) == 1:
            self._begin(now)

    def _begin(self, now: float) -> None:
        self.left, self.begun = self.queued[0][1].seconds, now

    def run(self, now: float, seconds: float, speed: float) -> None:
        """Advance from ``now`` by ``seconds`` at relative ``speed``."""
        while self.queued and self.left <= seconds * speed:
            took = self.left / speed
            now, seconds = now + took, seconds - took
            number, event = self.queued.popleft()
            self.arrived.add(number)
            self.events.append(replace(event, start=self.begun, seconds=now - self.begun))
            if self.queued:
                self._begin(now)
        if self.queued:
            self.left -= seconds * speed


@dataclass
class _StepSchedule:
    """Simulation of one micro-batch; ``last``: includes work once per step."""

    plan: Record
    last: bool
    now: float = 0.0
    """when the compute stream is free"""
    beside: dict[str, _OverlappedStream] = field(
        default_factory=lambda: {stream: _OverlappedStream() for stream in PARAMETER_STREAMS.values()}
    )
    events: list[Event] = field(default_factory=list)
    pending_gradients: list[tuple[int, Event]] = field(default_factory=list)
    """gradients of small buckets, sent with the next ones"""
    sent: bool = False
    """whether gradients were sent"""
    reduces_in_flight: deque[tuple[int, str]] = field(default_factory=deque)
    """large reduce-scatters in flight: (last event's number, stream)"""

    def __post_init__(self) -> None:
        self.speeds = dict(zip(PARAMETER_STREAMS.values(), self.plan.mesh.overlap, strict=True))

    def run(self) -> tuple[Event, ...]:
        sequence = [self._on_stream(event) for event in _program_events(self.plan, self.last)]
        gathers, places = self._messages(sequence)
        buckets = self._buckets(sequence)
        coming = Counter(_message_kind(sequence[bucket[0]]) for bucket in buckets)
        ends = {bucket[-1]: bucket for bucket in buckets}
        sent = 0

        def begin(last: int, phase: str) -> None:
            nonlocal sent
            while sent <= last and sent < len(gathers) and sequence[gathers[sent][0]].phase == phase:
                for j in gathers[sent]:
                    self.beside[sequence[j].stream].send(j, sequence[j], self.now)
                sent += 1

        begin(self.plan.prefetch - 1, "forward")
        for i, event in enumerate(sequence):
            if i in places:
                begin(places[i] + self.plan.prefetch, event.phase)
                while gathers[places[i]][-1] not in self.beside[event.stream].arrived:
                    self._go_on(self.beside[event.stream].left)
            elif event.stream == COMPUTE_STREAM:
                self._compute(event)
            elif i in ends:
                coming[_message_kind(event)] -= 1
                self._reduce([(n, sequence[n]) for n in ends[i]], last=not coming[_message_kind(event)])
            elif event.stream not in self.beside:
                self._wait_for(event)
        compute = self.now
        for stream in self.beside.values():
            while stream.queued:
                self._go_on(stream.left)
        self._optimize(compute)
        every = [*self.events, *(e for stream in self.beside.values() for e in stream.events)]
        return tuple(sorted(every, key=lambda e: e.start))

    def _on_stream(self, event: Event) -> Event:
        if not event.movable:
            return event
        beside = self.plan.mesh.hardware.overlap
        return replace(event, stream=PARAMETER_STREAMS[event.stream]) if beside else replace(event, movable=False)

    def _messages(self, sequence: list[Event]) -> tuple[list[list[int]], dict[int, int]]:
        """(event numbers per gathered bucket, in order; event number → its gather)."""
        gathers: list[list[int]] = []
        places: dict[int, int] = {}
        known: dict[tuple[str, ...], int] = {}
        for i, event in enumerate(sequence):
            if event.movable and (event.phase == "forward" or event.source.endswith("again)")):
                key = event.phase, _message_kind(event), event.bucket or event.source
                if key not in known:
                    known[key] = len(gathers)
                    gathers.append([])
                places[i] = known[key]
                gathers[places[i]].append(i)
        return gathers, places

    def _buckets(self, sequence: list[Event]) -> list[list[int]]:
        """Event numbers per gradient bucket."""
        found: dict[Any, list[int]] = {}
        for i, event in enumerate(sequence):
            if event.stream in self.beside and event.phase == "backward" and not event.source.endswith("again)"):
                found.setdefault((_message_kind(event), event.bucket or i), []).append(i)
        return list(found.values())

    def _reduce(self, bucket: list[tuple[int, Event]], last: bool) -> None:
        """Send or hold a bucket's gradients, as the runtime does; ``last``: of its kind."""
        kind = _message_kind(bucket[0][1])
        if self.pending_gradients and _message_kind(self.pending_gradients[0][1]) != kind:
            self._flush()
        self.pending_gradients += bucket
        enough = ALL_REDUCE_BUCKET_BYTES if self.sent and not kind.startswith("reduce_scatter") else MIN_BUCKET_BYTES
        if last or sum(event.bytes for _, event in self.pending_gradients) >= enough:
            self._flush()

    def _flush(self) -> None:
        for number, event in self.pending_gradients:
            self.beside[event.stream].send(number, event, self.now)
        if self.pending_gradients:
            self.sent = True
            if (
                event.name.startswith("reduce_scatter")
                and sum(e.bytes for _, e in self.pending_gradients) >= MIN_BUCKET_BYTES
            ):
                self.reduces_in_flight.append((number, event.stream))
            self.pending_gradients = []
            while len(self.reduces_in_flight) > MAX_REDUCE_SCATTERS:
                first, stream = self.reduces_in_flight.popleft()
                while first not in self.beside[stream].arrived:
                    self._go_on(self.beside[stream].left)

    def _go_on(self, seconds: float, shared: str = "") -> None:
        """Advance time; overlapped messages on the stream ``shared`` have half of their link."""
        for stream, beside in self.beside.items():
            beside.run(self.now, seconds, 0.5 if stream == shared else 1.0)
        self.now += seconds

    def _compute(self, event: Event) -> None:
        """Run an operation, more slowly while overlapped collectives run."""
        start, left = self.now, event.seconds
        while left > 0:
            under_way = {stream: beside.left for stream, beside in self.beside.items() if beside.queued}
            speed, ends = math.prod(self.speeds[s] for s in under_way), min(under_way.values(), default=math.inf)
            if left / speed <= ends:
                self._go_on(left / speed)
                break
            left -= ends * speed
            self._go_on(ends)
        self.events.append(replace(event, start=start, seconds=self.now - start))

    def _wait_for(self, event: Event) -> None:
        """Run a blocking collective."""
        start, left, stream = self.now, event.seconds, PARAMETER_STREAMS.get(event.stream, "")
        while (beside := self.beside[stream]).queued and left > 0:
            took = 2 * min(left, beside.left)
            left -= took / 2
            self._go_on(took, stream)
        self._go_on(left)
        self.events.append(replace(event, start=start, seconds=self.now - start))

    def _optimize(self, compute: float) -> None:
        """Run the optimizer, after all gradients are reduced."""
        if self.last and (seconds := self.plan.cost.optimizer_s):
            start = max([compute, *(e.start + e.seconds for b in self.beside.values() for e in b.events)])
            self.events.append(Event("optimizer", COMPUTE_STREAM, "optimizer", start, seconds, "", ""))


def _message_kind(event: Event) -> str:
    """Key of messages that may be coalesced, such as ``reduce_scatter@dp``."""
    return event.name.split(maxsplit=1)[0]


def _program_events(plan: Record, last: bool) -> Iterator[Event]:
    """Events of a micro-batch in program order, all with start 0."""
    groups: dict[tuple[str, str], list[Collective]] = {}
    for c in plan.collectives:
        if not last and c.times == 1:
            continue
        moment = "after" if c.value == c.op and c.phase == "forward" else "again" if c.repeats else c.phase
        groups.setdefault((c.op, moment), []).append(c)

    def send(op: str, moment: str) -> Iterator[Event]:
        for c in groups.get((op, moment), ()):
            stream = LINK_STREAMS[plan.mesh.crosses(c.axes)]
            name = collective_name(c)
            seconds, size = (c.seconds - c.hidden_s) / c.times, c.bytes / c.times
            sent = Event(name, stream, c.phase, 0.0, seconds, c.fqn, op, size, c.reason, c.movable, c.bucket)
            copied = Event(
                f"copies of {name}", COMPUTE_STREAM, c.phase, 0.0, c.copied_s / c.times, c.fqn, op, 0.0, c.reason
            )
            events = (sent, copied) if c.kind == "all_gather" else (copied, sent)
            yield from (e for e in events if e is sent or e.seconds)

    for name, choice in plan.choices.items():
        yield from send(name, "forward")
        yield from _compute_events(name, choice, "forward", (choice.seconds - choice.backward_s) / plan.micro_batches)
        yield from send(name, "after")
    yield from send("", "forward")
    yield from send("", "backward")
    for name, choice in reversed(list(plan.choices.items())):
        yield from send(name, "again")
        if choice.again == 2:
            yield from _compute_events(name, choice, "again", (choice.seconds - choice.backward_s) / plan.micro_batches)
        yield from _compute_events(name, choice, "backward", choice.backward_s / plan.micro_batches)
        yield from send(name, "backward")


def _compute_events(name: str, choice: Choice, phase: str, seconds: float) -> Iterator[Event]:
    if seconds > 0:
        title = f"{short_op(choice)} {choice.fqn or '(root)'} {phase}"
        yield Event(title, COMPUTE_STREAM, phase, 0.0, seconds, choice.fqn, name, 0.0, choice.source)

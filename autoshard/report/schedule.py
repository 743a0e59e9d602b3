"""The predicted step in time: a list schedule of one stream for compute and one per kind of link.

Operations run in the order of the program, forward and then backward. What the next operation waits for holds up the
compute stream. A parameter is gathered while the block before the one that reads it runs (prefetch), and read when it is
there; the reduction of a gradient starts when the gradient is there, and only the optimizer waits for it. While such a
collective runs, compute is slower (:attr:`~autoshard.hardware.Hardware.overlap`); where the hardware overlaps nothing,
every collective holds up the compute stream. Of what goes beside the operation that it is part of, as the hops of a ring, the
time that this does not hide is shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from autoshard.report.record import Choice, Collective, Record
from autoshard.report.text import short_op
from autoshard.runtime import profiling

COMPUTE, LINKS = "compute", ("communication inside nodes", "communication between nodes")


@dataclass(frozen=True)
class Event:
    """Something that takes time on a rank. ``start``, ``seconds``: seconds; ``stream``: compute, or a kind of link."""

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
    movable: bool = False


def collective_name(c: Collective) -> str:
    """``all_gather@tp blocks.0.attention.q forward``, as in a profile of a run."""
    return profiling.collective_name(c.kind, c.axes, c.fqn, c.phase)


def timeline(plan: Record) -> tuple[Event, ...]:
    """Every event of one step, in the order in which they are begun; of micro-batches one after another."""
    last = _Schedule(plan, last=True).run()
    if plan.micro_batches == 1:
        return last
    one = _Schedule(plan, last=False).run()
    length = max((e.start + e.seconds for e in one), default=0.0)
    every = [(one, k * length) for k in range(plan.micro_batches - 1)]
    return tuple(replace(e, start=e.start + at) for events, at in [*every, (last, len(every) * length)] for e in events)


def step_end(plan: Record) -> float:
    """Seconds at which the last event of the timeline ends."""
    return max((e.start + e.seconds for e in timeline(plan)), default=0.0)


@dataclass
class _Schedule:
    """One pass; ``last``: with what comes once a step."""

    plan: Record
    last: bool
    now: float = 0.0
    """when the compute stream is free"""
    free: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LINKS, 0.0))
    busy: list[tuple[float, float]] = field(default_factory=list)
    """when movable collectives run, in order"""
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.speed = self.plan.mesh.hardware.overlap

    def run(self) -> tuple[Event, ...]:
        sequence = list(_sequence(self.plan, self.last))
        ahead = defaultdict[str, list[int]](list)  # block and phase → its gathers
        order: list[str] = []
        for i, event in enumerate(sequence):
            if self._is_gather(event):
                ahead[_block(event)].append(i)
            if _block(event) not in order[-1:]:
                order.append(_block(event))
        place = 0
        arrives: dict[int, float] = {}
        for i in ahead.get(order[0], ()) if order else ():
            arrives[i] = self._send(sequence[i], 0.0)
        for i, event in enumerate(sequence):
            while order[place] != _block(event):
                place += 1
            for j in (j for block in order[place : place + 2] for j in ahead[block]):
                if j not in arrives:
                    arrives[j] = self._send(sequence[j], self.now)
            if i in arrives:
                self.now = max(self.now, arrives[i])
            elif event.stream == COMPUTE:
                self._compute(event)
            elif event.movable and self.speed:
                self._send(event, self.now)
            else:
                self.now = self._send(replace(event, movable=False), self.now)
        self._optimize()
        return tuple(self.events)

    def _is_gather(self, event: Event) -> bool:
        return event.movable and bool(self.speed) and (event.phase == "forward" or event.source.endswith("again)"))

    def _send(self, event: Event, ready: float) -> float:
        start = max(ready, self.free[event.stream])
        self.events.append(replace(event, start=start))
        self.free[event.stream] = end = start + event.seconds
        if event.movable:
            self.busy.append((start, end))
        return end

    def _compute(self, event: Event) -> None:
        """At full speed, but for the time in which movable collectives run."""
        start, left = self.now, event.seconds
        while left > 0:
            beside = [end for begin, end in self.busy if begin <= self.now < end]
            speed = self.speed if beside else 1.0
            changes = beside or [begin for begin, _ in self.busy if begin > self.now]
            until = min(changes, default=float("inf"))
            if self.now + left / speed <= until:
                self.now, left = self.now + left / speed, 0.0
            else:
                self.now, left = until, left - (until - self.now) * speed
        self.busy = [span for span in self.busy if span[1] > self.now]
        self.events.append(replace(event, start=start, seconds=self.now - start))

    def _optimize(self) -> None:
        """The update, after all gradients are reduced."""
        if self.last and (seconds := self.plan.cost.optimizer_s):
            start = max(self.now, *self.free.values())
            self.events.append(Event("optimizer", COMPUTE, "optimizer", start, seconds, "", ""))


def _block(event: Event) -> str:
    """The numbered module that an event belongs to, and its phase; what is made again belongs to the backward."""
    parts = event.fqn.split(".")
    numbered = next((i for i, part in enumerate(parts) if part.isdigit()), 0)
    phase = "forward" if event.phase == "forward" else "backward"
    return f"{phase} {'.'.join(parts[: numbered + 1])}"


def _sequence(plan: Record, last: bool) -> Iterator[Event]:
    """All events of a pass in the order of the program, each as if it started at 0."""
    groups: dict[tuple[str, str], list[Collective]] = {}
    for c in plan.collectives:
        if not last and c.times == 1:
            continue
        again = c.reason.endswith(("(gathered again)", "(made again)"))
        moment = "after" if c.value == c.op and c.phase == "forward" else "again" if again else c.phase
        groups.setdefault((c.op, moment), []).append(c)

    def send(op: str, moment: str) -> Iterator[Event]:
        for c in groups.get((op, moment), ()):
            stream = LINKS[plan.mesh.crosses(c.axes)]
            name = collective_name(c)
            seconds, size = (c.seconds - c.hidden_s) / c.times, c.bytes / c.times
            yield Event(name, stream, c.phase, 0.0, seconds, c.fqn, op, size, c.reason, c.movable)

    for name, choice in plan.choices.items():
        yield from send(name, "forward")
        yield from _run(name, choice, "forward", (choice.seconds - choice.backward_s) / plan.micro_batches)
        yield from send(name, "after")
    yield from send("", "forward")
    yield from send("", "backward")
    for name, choice in reversed(list(plan.choices.items())):
        yield from send(name, "again")
        if choice.again == 2:
            yield from _run(name, choice, "again", (choice.seconds - choice.backward_s) / plan.micro_batches)
        yield from _run(name, choice, "backward", choice.backward_s / plan.micro_batches)
        yield from send(name, "backward")


def _run(name: str, choice: Choice, phase: str, seconds: float) -> Iterator[Event]:
    if seconds > 0:
        title = f"{short_op(choice)} {choice.fqn or '(root)'} {phase}"
        yield Event(title, COMPUTE, phase, 0.0, seconds, choice.fqn, name, 0.0, choice.source)

"""When every rank of a pipeline works: the order of its work under a schedule, start and end of each piece, the bubble.

The orders are those of :mod:`torch.distributed.pipelining`, which runs them. Stage ``s`` of ``ranks · chunks`` lies on
rank ``s % ranks``. The letters are torch's: F forward, B backward, and where a schedule splits the backward, I for the
gradients of the inputs and W for those of the weights.

Sources: GPipe (Huang et al. 2019), 1F1B (Narayanan et al., PipeDream 2019), interleaved (Narayanan et al. 2021), zero
bubble (Qi et al. 2023, ZB-H1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from typing import NamedTuple

from autoshard.errors import PlanError

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")

NOBODY = -1
"""the rank of work that no action is"""


class Action(NamedTuple):
    """One piece of work of a rank: ``kind`` F, B, I or W of micro-batch ``batch`` on ``stage``."""

    kind: str
    stage: int
    batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.batch}"


Orders = tuple[tuple[Action, ...], ...]
"""per rank what it does, in order"""


@dataclass(frozen=True)
class StageSeconds:
    """What one micro-batch takes on one stage, in seconds."""

    forward: float
    backward: float
    """all of the backward"""
    weights: float = 0.0
    """the part of ``backward`` that makes the gradients of the weights"""
    send: float = 0.0
    """until what the forward makes is on the next stage"""
    send_back: float = 0.0
    """until the gradients that the backward makes are on the stage before"""
    carry: float = 0.0
    """what either end of the message forward works for it, in threads of its own: see :func:`timeline`"""
    carry_back: float = 0.0
    """the same of the gradients"""
    host: float = 0.0
    """what each F, B, I or W takes beside its operations"""
    once: float = 0.0
    """what its rank does for it once a step, behind all micro-batches: sums of gradients, the update"""

    def of(self, kind: str) -> float:
        """Seconds of one F, B, I or W."""
        parts = {"F": self.forward, "B": self.backward, "I": self.backward - self.weights, "W": self.weights}
        return parts[kind] + self.host

    @property
    def work(self) -> float:
        """Seconds of the operations, forward and backward."""
        return self.forward + self.backward


class Span(NamedTuple):
    """Work of a rank with its start and end, in seconds."""

    action: Action
    start: float
    end: float


class Message(NamedTuple):
    """What a stage sends once it has done ``action``: it starts and ends, in seconds, from rank to rank."""

    action: Action
    source: int
    target: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """One step of a pipeline."""

    ranks: tuple[tuple[Span, ...], ...]
    """per rank its work in order"""
    messages: tuple[Message, ...] = ()
    once: tuple[float, ...] = ()
    """per rank the seconds of what it does once, behind its work"""

    @property
    def end_s(self) -> float:
        """Seconds until the last rank is done, also with what it does once."""
        return max(spans[-1].end + once for spans, once in zip(self.ranks, self.once, strict=True))

    @property
    def step_s(self) -> float:
        """Seconds until the last rank is done with all micro-batches."""
        return max((span.end for spans in self.ranks for span in spans), default=0.0)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Per rank the seconds that it works."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.ranks)

    @property
    def work_s(self) -> float:
        """Seconds that the busiest rank works."""
        return max(self.busy_s)

    @property
    def bubble_s(self) -> float:
        """Seconds that the busiest rank waits: for other stages, and for their messages."""
        return self.end_s - max(busy + once for busy, once in zip(self.busy_s, self.once, strict=True))


def orders(schedule: str, ranks: int, batches: int, chunks: int = 1, training: bool = True) -> Orders:
    """What every rank does, in order. ``chunks``: stages per rank; more than one where the schedule interleaves.

    Without ``training`` there is no backward. Raises :class:`PlanError` for a schedule, or numbers, that do not go
    together.
    """
    if reason := refusal(schedule, ranks, batches, chunks, training):
        raise PlanError(reason)
    return _orders(schedule, ranks, batches, chunks, training)


def refusal(schedule: str, ranks: int, batches: int, chunks: int = 1, training: bool = True) -> str:
    """Why ``schedule`` cannot run so many micro-batches, as a sentence; "" where it can."""
    if schedule not in SCHEDULES:
        return f"schedule={schedule!r} is not known. Known: {', '.join(SCHEDULES)}."
    if not training:
        return ""
    if chunks > 1 and schedule in ("gpipe", "1f1b"):
        return f"schedule {schedule!r} has one stage per rank, not {chunks}: use 'interleaved' or 'zero_bubble'"
    rounds = max(1, batches // ranks)
    if schedule in ("interleaved", "zero_bubble") and batches % rounds:
        return (
            f"schedule {schedule!r} runs the micro-batches in {rounds} rounds of at least {ranks}, one per rank: "
            f"{batches} do not divide by {rounds}; use {batches - batches % rounds}"
        )
    return ""


@lru_cache(maxsize=64)
def _orders(schedule: str, ranks: int, batches: int, chunks: int, training: bool) -> Orders:
    every = range(batches)
    if not training:
        stages = [range(rank, ranks * chunks, ranks) for rank in range(ranks)]
        return tuple(tuple(Action("F", s, b) for s in own for b in every) for own in stages)
    if schedule == "gpipe":
        return tuple(tuple(Action(kind, rank, b) for kind in "FB" for b in every) for rank in range(ranks))
    if schedule == "1f1b":
        return tuple(tuple(_1f1b(rank, ranks, batches)) for rank in range(ranks))
    split = schedule == "zero_bubble"
    return tuple(tuple(_in_rounds(rank, ranks, batches, chunks, split)) for rank in range(ranks))


def _1f1b(rank: int, ranks: int, batches: int) -> Iterator[Action]:
    ahead = min(batches, ranks - rank)
    yield from (Action("F", rank, b) for b in range(ahead))
    for b in range(batches):
        yield Action("B", rank, b)
        if b + ahead < batches:
            yield Action("F", rank, b + ahead)


def _in_rounds(rank: int, ranks: int, batches: int, chunks: int, split: bool) -> Iterator[Action]:
    """Micro-batches in rounds, each of which goes through all chunks; ``split``: gradients of weights follow later."""
    per_round = batches // max(1, batches // ranks)
    total = batches * chunks
    ahead = min(total, (chunks - 1) * per_round + (1 if split else 2) * (ranks - 1 - rank))

    def at(number: int, backward: bool) -> tuple[int, int]:
        """(stage, micro-batch) of the forward, or backward, with this number."""
        round_, place = divmod(number, per_round * chunks)
        chunk, within = divmod(place, per_round)
        chunk = chunks - 1 - chunk if backward else chunk
        return chunk * ranks + rank, round_ * per_round + within

    late = rank if split else total  # backwards whose weights' gradients still wait
    done = 0
    for number in range(ahead):
        yield Action("F", *at(number, False))
    for number in range(total):
        if ahead + number < total:
            yield Action("F", *at(ahead + number, False))
        yield Action("I" if split else "B", *at(number, True))
        if split and number >= late:
            yield Action("W", *at(done, True))
            done += 1
    for number in range(done, total if split else 0):
        yield Action("W", *at(number, True))


def in_flight(order: Sequence[Action]) -> int:
    """The most forwards of a rank whose backward is still to come, one per micro-batch and stage."""
    return int(held(order, [1.0] * (1 + max((a.stage for a in order), default=0))))


def held(order: Sequence[Action], kept: Sequence[float]) -> float:
    """The most that a rank keeps for the backward; ``kept``: by stage, what one micro-batch keeps, such as bytes.

    It is kept from the forward until all of the backward is done: with a split backward until W.
    """
    now = most = 0.0
    last = "W" if any(a.kind == "W" for a in order) else "B"
    for action in order:
        if action.kind == "F":
            now += kept[action.stage]
            most = max(most, now)
        elif action.kind == last:
            now -= kept[action.stage]
    return most


def timeline(orders: Orders, stages: Sequence[StageSeconds], paces: Sequence[float] = ()) -> Timeline:
    """Every rank does its work in order, each piece as soon as what it reads is there.

    A message goes when it is made and its receiver, which has nothing else to do, waits for it: torch's schedules post
    their receives then. The sender's work goes on. ``paces``: where ranks share processors, how fast each works while one
    of them does, two, and so on; 1 is the pace of ``stages``. There a message at its start is work at both ends, too
    (:attr:`StageSeconds.carry`): others have so much less of the processors, while it takes the seconds that it takes.
    Raises :class:`ValueError` where an order never ends.
    """
    steps, count = numbered(orders, len(stages) - 1)
    shared, paces = bool(paces), paces or [1.0] * len(orders)
    done, waits = [0] * len(orders), [True] * len(orders)
    made: list[Message | None] = [None] * count
    took = {kind: [s.of(kind) for s in stages] for kind in "FBIW"}
    send, send_back = [s.send for s in stages], [s.send_back for s in stages]
    carry = {"F": [s.carry for s in stages], "B": [s.carry_back for s in stages]}
    carry["I"] = carry["B"]
    spans: list[list[Span]] = [[] for _ in orders]
    messages: list[Message] = []
    now = work = 0.0  # seconds, and what a rank that never waited would have done in them
    running: list[tuple[float, int, float]] = []  # (work at the end, rank, when it began)
    coming: list[tuple[float, int]] = []
    ready = list(range(len(orders)))

    def begin(rank: int) -> None:
        """Work, as what is read is there."""
        a = steps[rank][done[rank]].action
        heappush(running, (work + took[a.kind][a.stage], rank, now))

    while ready or running or coming:
        while ready:
            rank = ready.pop()
            if done[rank] == len(steps[rank]):
                continue
            needs = steps[rank][done[rank]].needs
            message = made[needs] if needs >= 0 else None
            waits[rank] = needs >= 0 and message is None
            if message is not None and (seconds := message.end - message.start):
                messages.append(message._replace(start=now, end=now + seconds))
                heappush(coming, (now + seconds, rank))
                if shared and (carries := carry[message.action.kind][message.action.stage]):
                    for _ in range(2):
                        heappush(running, (work + carries, NOBODY, now))
            elif not waits[rank]:
                begin(rank)
        pace = _pace(paces, len(running))
        next_end = now + (running[0][0] - work) / pace if running else math.inf
        if coming and coming[0][0] <= next_end:
            arrives, rank = heappop(coming)
            now, work = arrives, work + (arrives - now) * pace
            begin(rank)
        elif running:
            work, rank, began = heappop(running)
            now = next_end
            if rank == NOBODY:
                continue
            a, number, _, target = steps[rank][done[rank]]
            spans[rank].append(Span(a, began, now))
            done[rank] += 1
            waits[rank], ready = False, [rank]
            if target >= 0:
                made[number] = Message(a, rank, target, now, now + (send if a.kind == "F" else send_back)[a.stage])
                if waits[target]:
                    ready.append(target)
    if any(n < len(order) for n, order in zip(done, orders, strict=True)):
        raise ValueError("the orders of a schedule wait for each other")
    once = tuple(math.fsum(s.once for s in stages[rank :: len(orders)]) for rank in range(len(orders)))
    return Timeline(tuple(map(tuple, spans)), tuple(messages), once)


def _pace(paces: Sequence[float], working: int) -> float:
    """How fast each of so many works; beyond what was measured they share what all ranks have."""
    return paces[working - 1] if working <= len(paces) else paces[-1] * len(paces) / working


class Step(NamedTuple):
    """An action by numbers."""

    action: Action
    number: int
    needs: int
    """the number of the action whose message it waits for; -1: none"""
    target: int
    """the rank that it sends to; -1: none"""


@lru_cache(maxsize=64)
def numbered(orders: Orders, last: int) -> tuple[tuple[tuple[Step, ...], ...], int]:
    """Per rank its actions by numbers, and how many these are, with that of an action that never comes.

    ``last``: the last stage.
    """
    numbers = {action: i for i, action in enumerate(a for order in orders for a in order)}
    never = len(numbers)

    def step(a: Action) -> Step:
        way = {"F": 1, "W": 0}.get(a.kind, -1)
        before, after = a.stage - way, a.stage + way
        needs = numbers.get(Action(a.kind, before, a.batch), never) if way and 0 <= before <= last else -1
        return Step(a, numbers[a], needs, after % len(orders) if way and 0 <= after <= last else -1)

    return tuple(tuple(map(step, order)) for order in orders), never + 1

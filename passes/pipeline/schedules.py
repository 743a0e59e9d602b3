"""Pipeline schedules: order of actions per rank, simulated timeline, bubble, split backward. Orders
are those of :mod:`torch.distributed.pipelining`, which runs them: stage ``s`` lies on rank ``s %
ranks``; F forward, B backward, or, where it is split, I (gradients of inputs) and W (of
weights).
Sources: GPipe (Huang et al. 2019), 1F1B (Narayanan et al., PipeDream 2019), interleaved (Narayanan
et al. 2021), zero bubble (Qi et al. 2023, ZB-H1)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
from typing import Any, NamedTuple

from autoshard.aten import aten
from autoshard.errors import PlanError
from autoshard.passes.ir.graph import Ref
from autoshard.passes.ir.program import LocalCall, Program, Statement, reads
from autoshard.passes.rules.facts import is_view

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")

NO_RANK = -1
"""rank of work that is no action"""


class Action(NamedTuple):
    """One F, B, I or W (``kind``) of micro-batch ``batch`` on ``stage``."""

    kind: str
    stage: int
    batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.batch}"


Orders = tuple[tuple[Action, ...], ...]
"""per rank its actions in order"""


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one micro-batch on one stage."""

    forward: float
    backward: float
    """the full backward"""
    weights: float = 0.0
    """the part of ``backward`` for weight gradients"""
    send: float = 0.0
    """time to send activations to the next stage"""
    send_back: float = 0.0
    """time to send gradients to the stage before"""
    carry: float = 0.0
    """processor time at either end of the forward message, see :func:`simulate_timeline`"""
    carry_back: float = 0.0
    """the same for gradients"""
    host: float = 0.0
    """host time per action"""
    once: float = 0.0
    """work once per step after all micro-batches: gradient reductions, the update"""

    def of(self, kind: str) -> float:
        """Seconds of one F, B, I or W."""
        parts = {"F": self.forward, "B": self.backward, "I": self.backward - self.weights, "W": self.weights}
        return parts[kind] + self.host

    @property
    def work(self) -> float:
        return self.forward + self.backward


class ActionSpan(NamedTuple):
    """An action with start and end, in seconds."""

    action: Action
    start: float
    end: float


class StageMessage(NamedTuple):
    """The message after ``action``, with start and end in seconds, between ranks."""

    action: Action
    source: int
    target: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step of a pipeline."""

    ranks: tuple[tuple[ActionSpan, ...], ...]
    """per rank its actions in order"""
    messages: tuple[StageMessage, ...] = ()
    once: tuple[float, ...] = ()
    """per rank the seconds of work after all micro-batches"""

    @property
    def end_s(self) -> float:
        """Seconds of the step with the work after all micro-batches."""
        return max(spans[-1].end + once for spans, once in zip(self.ranks, self.once, strict=True))

    @property
    def step_s(self) -> float:
        """Seconds until the last micro-batch is done on all ranks."""
        return max((span.end for spans in self.ranks for span in spans), default=0.0)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Per rank the seconds of its actions."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.ranks)

    @property
    def bubble_s(self) -> float:
        """Bubble: seconds that the busiest rank waits for other stages and messages."""
        return self.end_s - max(busy + once for busy, once in zip(self.busy_s, self.once, strict=True))


def rank_orders(schedule: str, ranks: int, batches: int, chunks: int = 1, training: bool = True) -> Orders:
    """Per rank its actions in order; no backward without ``training``. ``chunks``: stages per rank,
    above 1 if interleaved. Raises :class:`PlanError` for an impossible schedule."""
    if reason := schedule_refusal(schedule, ranks, batches, chunks, training):
        raise PlanError(reason)
    return _orders(schedule, ranks, batches, chunks, training)


def schedule_refusal(schedule: str, ranks: int, batches: int, chunks: int = 1, training: bool = True) -> str:
    """Why ``schedule`` cannot run, as a sentence; "" if it can."""
    if schedule not in SCHEDULES:
        return f"schedule={schedule!r} is not known. Known: {', '.join(SCHEDULES)}."
    if not training:
        return ""
    if chunks > 1 and schedule in ("gpipe", "1f1b"):
        return f"schedule {schedule!r} has one stage per rank, not {chunks}. Use 'interleaved' or 'zero_bubble'"
    rounds = max(1, batches // ranks)
    if schedule in ("interleaved", "zero_bubble") and batches % rounds:
        return (
            f"schedule {schedule!r} runs the micro-batches in {rounds} rounds of at least {ranks}, "
            f"one per rank, but {batches} do not divide by {rounds}. Use {batches - batches % rounds}"
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
    """Micro-batches in rounds through all chunks; ``split``: weight gradients come later."""
    per_round = batches // max(1, batches // ranks)
    total = batches * chunks
    ahead = min(total, (chunks - 1) * per_round + (1 if split else 2) * (ranks - 1 - rank))

    def at(number: int, backward: bool) -> tuple[int, int]:
        """(stage, micro-batch) of a rank's forward or backward of this number."""
        round_, place = divmod(number, per_round * chunks)
        chunk, within = divmod(place, per_round)
        chunk = chunks - 1 - chunk if backward else chunk
        return chunk * ranks + rank, round_ * per_round + within

    late = rank if split else total  # then W begins
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


def max_in_flight(order: Sequence[Action]) -> int:
    """Most micro-batches in flight on a rank, counted per stage."""
    return int(peak_kept(order, [1.0] * (1 + max((a.stage for a in order), default=0))))


def peak_kept(order: Sequence[Action], kept: Sequence[float]) -> float:
    """Peak of what a rank keeps from F to the backward's end; ``kept``: per stage and
    micro-batch."""
    now = most = 0.0
    last = "W" if any(a.kind == "W" for a in order) else "B"
    for action in order:
        if action.kind == "F":
            now += kept[action.stage]
            most = max(most, now)
        elif action.kind == last:
            now -= kept[action.stage]
    return most


def simulate_timeline(orders: Orders, stages: Sequence[StageSeconds], paces: Sequence[float] = ()) -> Timeline:
    """Simulate a step: each rank runs its actions in order, as soon as the input is there. A
    message starts when it is made and its idle receiver waits, as in torch's schedules.
    ``paces``: speed of ranks that share processors while 1, 2, … work, relative to ``stages``; a
    message then costs work at both ends (:attr:`StageSeconds.carry`). Raises :class:`ValueError`
    for an order that deadlocks."""
    steps, count = numbered_actions(orders, len(stages) - 1)
    shared, paces = bool(paces), paces or [1.0] * len(orders)
    done, waits = [0] * len(orders), [True] * len(orders)
    made: list[StageMessage | None] = [None] * count
    took = {kind: [s.of(kind) for s in stages] for kind in "FBIW"}
    send, send_back = [s.send for s in stages], [s.send_back for s in stages]
    carry = {"F": [s.carry for s in stages], "B": [s.carry_back for s in stages]}
    carry["I"] = carry["B"]
    spans: list[list[ActionSpan]] = [[] for _ in orders]
    messages: list[StageMessage] = []
    now = work = 0.0  # seconds; work of a rank that never waits
    running: list[tuple[float, int, float]] = []  # (work at the end, rank, start)
    coming: list[tuple[float, int]] = []
    ready = list(range(len(orders)))

    def begin(rank: int) -> None:
        """Start the rank's next action: its input is there."""
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
                        heappush(running, (work + carries, NO_RANK, now))
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
            if rank == NO_RANK:
                continue
            a, number, _, target = steps[rank][done[rank]]
            spans[rank].append(ActionSpan(a, began, now))
            done[rank] += 1
            waits[rank], ready = False, [rank]
            if target >= 0:
                made[number] = StageMessage(a, rank, target, now, now + (send if a.kind == "F" else send_back)[a.stage])
                if waits[target]:
                    ready.append(target)
    if any(n < len(order) for n, order in zip(done, orders, strict=True)):
        raise ValueError("the orders of a schedule wait for each other")
    once = tuple(math.fsum(s.once for s in stages[rank :: len(orders)]) for rank in range(len(orders)))
    return Timeline(tuple(map(tuple, spans)), tuple(messages), once)


def _pace(paces: Sequence[float], working: int) -> float:
    """Speed of each of ``working`` ranks; more than were measured share the last total speed."""
    return paces[working - 1] if working <= len(paces) else paces[-1] * len(paces) / working


class NumberedAction(NamedTuple):
    """An action and what it waits for, as numbers."""

    action: Action
    number: int
    needs: int
    """number of the action whose message it waits for; -1: none"""
    target: int
    """rank that it sends to; -1: none"""


@lru_cache(maxsize=64)
def numbered_actions(orders: Orders, last: int) -> tuple[tuple[tuple[NumberedAction, ...], ...], int]:
    """Per rank its actions as numbers, and their count with one that never comes."""
    numbers = {action: i for i, action in enumerate(a for order in orders for a in order)}
    never = len(numbers)

    def step(a: Action) -> NumberedAction:
        way = {"F": 1, "W": 0}.get(a.kind, -1)
        before, after = a.stage - way, a.stage + way
        needs = numbers.get(Action(a.kind, before, a.batch), never) if way and 0 <= before <= last else -1
        return NumberedAction(a, numbers[a], needs, after % len(orders) if way and 0 <= after <= last else -1)

    return tuple(tuple(map(step, order)) for order in orders), never + 1


SPLIT_PRODUCTS: dict[Any, str] = {
    aten.linear.default: "linear",
    aten.mm.default: "matmul",
    aten.bmm.default: "matmul",
    aten.matmul.default: "matmul",
    aten.conv1d.default: "conv",
    aten.conv2d.default: "conv",
    aten.conv3d.default: "conv",
}
"""op (value, weight[, bias]) → runtime function; gradients of other inputs come first"""


def split_backward(program: Program) -> Program:
    """``program`` with products of a value and a weight (or its view, cast) by these functions."""
    weights = set(program.graph.parameters)
    statements = []
    for s in program.statements:
        converts = s.parameter or (
            s.node is not None and s.step is None and (is_view(s.node.op) or s.node.op is aten._to_copy.default)
        )
        if converts and weights.issuperset(reads(s)):
            weights.update(s.outputs)
        fits = s.call.fn in SPLIT_PRODUCTS and _is_splittable_product(s, weights, program)
        statements.append(replace(s, call=replace(s.call, fn=SPLIT_PRODUCTS[s.call.fn])) if fits else s)
    return replace(program, statements=tuple(statements))


def _is_splittable_product(s: Statement, weights: set[str], program: Program) -> bool:
    x, weight, *rest = s.call.args
    bias = rest[0] if rest else None
    if isinstance(x, LocalCall) and x.fn == "channels_last":
        (x,) = x.args
    if not (isinstance(x, Ref) and isinstance(weight, Ref)) or s.call.kwargs:
        return False
    ranks = [len(program.types[ref.name].shape) for ref in (x, weight)]
    kind = SPLIT_PRODUCTS[s.call.fn]
    known = ranks[1] == 2 if kind == "linear" else ranks[0] == ranks[1] or (kind == "matmul" and ranks[1] == 2)
    if s.call.fn is aten.matmul.default and ranks[1] > 2:  # may broadcast
        return False
    return known and x.name not in weights and weight.name in weights and (bias is None or bias.name in weights)

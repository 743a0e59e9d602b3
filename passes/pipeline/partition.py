"""Pipeline partitioning: the stage boundaries with the shortest step that fits into memory.

A graph comes as segments between possible cuts. Stage ``i`` takes ``t_i`` seconds per micro-batch,
with messages and recomputation. A step of ``m`` micro-batches with ``v`` stages per rank takes at
most

    f · Σ t_i / v + (m · v − f) · max t_i

with ``f`` the share of the work that fills and drains the pipeline: 1, or less where a split
backward fills the gaps. With ``v = f = 1`` this is Alpa's Σ t_i + (m − 1) · max t_i (Zheng et al.
2022). As there, a dynamic program minimises the sum for each bound on ``t_i``. The sum falls as the
bound rises, so a bisection skips bounds that cannot be better. The result is exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

import numpy as np

from autoshard.errors import PlanError
from autoshard.passes.ir.text import show_bytes
from autoshard.passes.pipeline.schedules import Orders, StageSeconds, max_in_flight, rank_orders, simulate_timeline
from autoshard.passes.pipeline.step_times import cut_step_seconds
from autoshard.passes.search.limits import OUTER_LIMITS


@dataclass(frozen=True)
class GraphSegment:
    """Costs of a segment: seconds of one micro-batch, bytes on the busiest rank."""

    forward: float
    backward: float
    weights: float = 0.0
    """seconds of the backward for weight gradients"""
    send: float = 0.0
    """seconds to send activations to the next segment, if on another stage"""
    send_back: float = 0.0
    """seconds to send gradients to the segment before, if on another stage"""
    state: float = 0.0
    """bytes of parameters, gradients and optimizer state"""
    kept: float = 0.0
    """bytes of activations per micro-batch"""
    most: float = 0.0
    """bytes of working memory"""
    least: float = math.nan
    """bytes of activations per micro-batch with full recomputation; NaN: cannot be recomputed"""
    recompute_s: float = 0.0
    """seconds of full recomputation"""
    carry: float = 0.0
    """processor seconds at either end to send activations"""
    carry_back: float = 0.0
    """processor seconds at either end to send gradients"""
    once: float = 0.0
    """seconds once per step, after all micro-batches"""


Array = np.ndarray


@dataclass(frozen=True)
class Boundaries:
    """Boundaries of stages. ``ends``: per stage the index behind its last segment."""

    ends: tuple[int, ...]
    seconds: float
    """seconds of the step, by formula or simulation"""
    stages: tuple[StageSeconds, ...]
    """per stage the seconds of one micro-batch"""


@dataclass(frozen=True)
class BoundarySearch:
    """The search for boundaries under one schedule. ``budget``: bytes per rank."""

    pieces: Sequence[GraphSegment]
    schedule: str
    ranks: int
    batches: int
    chunks: int = 1
    budget: float = math.inf
    training: bool = True
    paces: Sequence[float] = ()
    """speeds of ranks that share processors, see :func:`simulate_timeline`"""
    host: float = 0.0
    """seconds of the host per action"""

    def best(self) -> Boundaries:
        """The boundaries with the least seconds by formula; :class:`PlanError` if nothing fits."""
        if self.stages > len(self.pieces):
            raise PlanError(
                f"{self.stages} stages were asked for, but the graph can be split into {len(self.pieces)} "
                "at most. Use fewer ranks along the axis of stages, or fewer stages per rank"
            )
        distinct = {id(span_seconds): span_seconds for span_seconds in self.span_seconds}.values()
        bounds = np.unique(np.concatenate([span_seconds[np.isfinite(span_seconds)] for span_seconds in distinct]))
        lowest = self._lowest(bounds)
        if lowest is None:
            raise PlanError(self._does_not_fit())
        total, ends = min(self._candidates(bounds, lowest, len(bounds) - 1), key=lambda found: found[0])
        stages = self._stages(ends)
        assert stages is not None
        return Boundaries(ends, total, stages)

    def shortest(self) -> Boundaries:
        """The boundaries with the shortest simulated step; the formula is some percent too high for
        unequal stages. One stage per rank: simulate cuts in order of :meth:`_floor` until it
        exceeds the best step (or ``OUTER_LIMITS.simulated_cuts``). Several: simulate all cuts,
        or :meth:`_balanced_cuts`, then move one boundary at a time
        (``OUTER_LIMITS.boundary_moves``)."""
        left = OUTER_LIMITS.simulated_cuts if self.chunks == 1 else OUTER_LIMITS.boundary_moves
        step, found = math.inf, tuple[int, ...]()
        rest = self._floors_from() if self.chunks == 1 else []
        waiting: list[tuple[float, int, tuple[int, ...]]] = [(float(rest[0][0]), 0, ())] if rest else []
        several, count = self._starts(), 1
        while several:
            before = step
            for ends, seconds in zip(several, self._simulated(several), strict=True):
                if seconds < step * (1 - 1e-9):
                    step, found = seconds, ends
            if self.chunks == 1:
                several = list(itertools.islice(self._by_floor(waiting, rest, step), min(count, left)))
                left, count = left - len(several), 1 if self.paces else 2 * count  # a batch is cheap
            else:
                several, left = self._neighbouring_cuts(found) if left and step < before else [], left - 1
        stages = self._stages(found)
        assert stages is not None
        return Boundaries(found, step, stages)

    def _starts(self) -> list[tuple[int, ...]]:
        """Ends of the cuts that are simulated first."""
        if self.chunks == 1:
            return [self.best().ends]
        pieces = len(self.pieces)
        if pieces < self.stages or math.comb(pieces - 1, self.stages - 1) > OUTER_LIMITS.simulated_cuts:
            return list(dict.fromkeys([self.best().ends, *self._balanced_cuts()]))
        every = ((*cut, pieces) for cut in itertools.combinations(range(1, pieces), self.stages - 1))
        return [ends for ends in every if self._fits(ends)] or [self.best().ends]

    def _neighbouring_cuts(self, ends: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Ends of the cuts with one boundary moved by one segment."""
        moved = ((*ends[:i], ends[i] + by, *ends[i + 1 :]) for i in range(len(ends) - 1) for by in (-1, 1))
        return [other for other in moved if self._fits(other)]

    def _fits(self, ends: tuple[int, ...]) -> bool:
        """Whether no stage is empty or exceeds the budget."""
        spans = zip((0, *ends), ends, strict=False)
        return all(np.isfinite(span_seconds[span]) for span_seconds, span in zip(self.span_seconds, spans, strict=True))

    def bubble(self, found: Boundaries) -> float:
        """Bubble: seconds that the busiest rank waits in the step."""
        if self.paces:
            return simulate_timeline(self._order, found.stages, self.paces).bubble_s
        span_seconds = [self.batches * sum(s.of(kind) for kind in self._kinds) + s.once for s in found.stages]
        return found.seconds - max(sum(span_seconds[rank :: self.ranks]) for rank in range(self.ranks))

    def _simulated(self, several: Sequence[tuple[int, ...]]) -> Sequence[float]:
        """Seconds of the step of each cut."""
        cuts = [stages for ends in several if (stages := self._stages(ends)) is not None]
        assert len(cuts) == len(several)
        if self.paces:
            return [simulate_timeline(self._order, stages, self.paces).end_s for stages in cuts]
        return list(map(float, cut_step_seconds(self._order, cuts)))

    @cached_property
    def _order(self) -> Orders:
        return rank_orders(self.schedule, self.ranks, self.batches, self.chunks, self.training)

    @property
    def _kinds(self) -> str:
        if not self.training:
            return "F"
        return "FIW" if self.schedule == "zero_bubble" else "FB"

    def _by_floor(
        self, waiting: list[tuple[float, int, tuple[int, ...]]], rest: Sequence[Array], step: float
    ) -> Iterator[tuple[int, ...]]:
        """Cuts with a lower bound below ``step``, best first; ``waiting``: heap of partial cuts."""
        while waiting and waiting[0][0] < step * (1 - 1e-9):
            floor, _, ends = heappop(waiting)
            if (stage := len(ends)) == self.stages:
                yield ends
                continue
            floors = np.maximum(self._floor(stage, ends[-1] if ends else 0), rest[stage + 1]).clip(floor)
            for end in np.flatnonzero(floors < step):
                heappush(waiting, (float(floors[end]), -stage, (*ends, int(end))))

    def _floor(self, stage: int, first: int | slice = slice(None)) -> Array:
        """Lower bound in seconds, by end float64 [segments + 1], of a step whose ``stage`` starts
        at segment ``first`` (None: for all). The first rank ends last, unless a split backward
        fills its gaps, then updates."""
        once = np.concatenate([[0.0], np.cumsum([p.once for p in self.pieces])])
        own = once - once[first, None] if stage == 0 or self.schedule == "zero_bubble" else once[1]
        return self._floor_of_batches(stage, first) + own

    def _floor_of_batches(self, stage: int, first: int | slice) -> Array:
        """The part of :meth:`_floor` up to the end of all micro-batches: the first passes the
        stages ahead before this stage's work, the last passes them after it. The stage also
        waits for those behind it: without a backward and in GPipe for all their work, in 1F1B
        twice, less what it may run meanwhile."""
        forward, work = self._work_before
        send, back = self._messages
        ahead = forward - forward[first, None] + send[first, None]
        # It waits for what it receives, not for what it sends.
        own = self.span_seconds[stage][first] - send + send[first, None] - back[first, None] + back
        meanwhile = min(self.batches, self.ranks - stage) - 1
        found: Array = self.batches * own + (forward if self.schedule == "zero_bubble" else work)[first, None]
        if self.paces:  # work may run while others wait
            found = found / max(self.paces)
        if self.paces or self.chunks > 1 or self.schedule == "zero_bubble" or stage == self.stages - 1:
            return found
        behind = work[-1] - work
        if self.schedule == "gpipe" or not self.training or not meanwhile:
            found += behind
            return found
        first_wait, last_wait = (np.maximum(0.0, behind - meanwhile * one) for one in (ahead, own - ahead))
        found += first_wait + last_wait if meanwhile < self.batches - 1 else np.maximum(first_wait, last_wait)
        return found

    def _floors_from(self) -> list[Array]:
        """Lower bounds of all remaining stages, by start: per stage float64 [segments + 1]."""
        none = np.full(len(self.pieces) + 1, np.inf)
        none[-1] = 0.0
        found = [none]
        for stage in reversed(range(self.stages)):
            found.append(np.maximum(self._floor(stage), found[-1]).min(axis=1))
        return found[::-1]

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    @cached_property
    def flying(self) -> tuple[int, ...]:
        """Per rank the micro-batches in flight, summed over its stages."""
        if not self.training:
            return (1,) * self.ranks
        return tuple(map(max_in_flight, rank_orders(self.schedule, self.ranks, self.batches, self.chunks)))

    @cached_property
    def fill(self) -> float:
        """Share of the work that fills and drains the pipeline."""
        work, weights = (
            math.fsum(x) for x in zip(*((p.forward + p.backward, p.weights) for p in self.pieces), strict=True)
        )
        return max(0.0, 1 - 2 * weights / work) if self.schedule == "zero_bubble" and work else 1.0

    @cached_property
    def span_seconds(self) -> tuple[Array, ...]:
        """Per stage float64 [segments + 1, segments + 1]: seconds on segments from row to column,
        inf if none or too large. Stages with equal micro-batches in flight share one."""
        known: dict[int, Array] = {}
        for n in self.flying:
            if n not in known:
                known[n] = self._seconds(n)
        return tuple(known[self.flying[i % self.ranks]] for i in range(self.stages))

    def _seconds(self, flying: int) -> Array:
        work = self._sums("forward") + self._sums("backward")
        send, back = self._messages
        over = flying * self._sums("kept") + self.chunks * self._sums("state") + self._largest() - self.budget
        spared = flying * (self._sums("kept") - self._sums("least"))
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(over > 0, np.where(spared > 0, over / spared, np.inf), 0.0)
        recompute_s = np.where(share <= 1, share, 0.0) * self._sums("recompute_s")
        found: Array = np.where(share <= 1, work + recompute_s + send[None, :] + back[:, None], np.inf)
        found[np.tril_indices(len(found))] = np.inf
        return found

    @cached_property
    def _work_before(self) -> tuple[Array, Array]:
        """float64 [segments + 1] each: seconds of all segments before, forward and in total."""
        forward = self._sums("forward")[0]
        return forward, forward + self._sums("backward")[0]

    @cached_property
    def _messages(self) -> tuple[Array, Array]:
        """float64 [segments + 1] each: seconds of messages, and of gradients, at each boundary."""
        send = np.array([0.0, *(p.send for p in self.pieces[:-1]), 0.0])
        return send, np.array([0.0, *(p.send_back for p in self.pieces[1:]), 0.0])

    def _sums(self, what: str) -> Array:
        """float64 [segments + 1, segments + 1]: sums over segments from row to column."""
        values = [getattr(p, what) for p in self.pieces]
        values = [p.kept if math.isnan(x) else x for x, p in zip(values, self.pieces, strict=True)]
        before: Array = np.concatenate([[0.0], np.cumsum(values)])
        return before[None, :] - before[:, None]

    def _largest(self) -> Array:
        """float64 [segments + 1, segments + 1]: the largest working memory of one segment."""
        found = np.zeros((len(self.pieces) + 1,) * 2)
        for first in range(len(self.pieces)):
            found[first, first + 1 :] = np.maximum.accumulate([p.most for p in self.pieces[first:]])
        return found

    def _least_sum_cut(self, bound: float, later: float | None = None) -> tuple[float, tuple[int, ...]] | None:
        """The least sum of ``t_i`` ≤ ``bound`` (``later``: of later stages of a rank), and the
        ends."""
        best = np.full(len(self.pieces) + 1, np.inf)
        best[0] = 0.0
        chosen = []
        for stage, span_seconds in enumerate(self.span_seconds):
            most = bound if later is None or stage < self.ranks else later
            through = best[:, None] + np.where(span_seconds <= most, span_seconds, np.inf)
            chosen.append(through.argmin(axis=0))
            best = through.min(axis=0)
        if not np.isfinite(best[-1]):
            return None
        ends = [len(self.pieces)]
        for first in reversed(chosen[1:]):
            ends.append(int(first[ends[-1]]))
        return float(best[-1]), tuple(reversed(ends))

    def _balanced_cuts(self) -> list[tuple[int, ...]]:
        """Cuts (ends) whose ranks have smaller, or larger, later stages than first ones: with one
        bound for all, a rank may get six layers where five suffice."""
        span_seconds = np.unique(
            np.concatenate([t[np.isfinite(t)] for t in {id(t): t for t in self.span_seconds}.values()])
        )
        each = float(self._work_before[1][-1]) / self.stages
        near = span_seconds[(span_seconds > each / 2) & (span_seconds < 2 * each)]
        levels = near[np.append(np.diff(near) > 1e-6 * each, True)[: len(near)]] * (1 + 1e-9)  # equal sums
        found = dict[tuple[int, ...], None]()
        for i in (
            np.unique(np.linspace(0, len(levels) - 1, OUTER_LIMITS.mixed_bounds).astype(int)) if len(levels) else ()
        ):
            low, high, best = -1, len(levels), None
            while high - low > 1:
                middle = (low + high) // 2
                cut = self._least_sum_cut(levels[i], levels[middle])
                low, high, best = (middle, high, best) if cut is None else (low, middle, cut[1])
            if best is not None:
                found[best] = None
        return list(found)

    def _lowest(self, bounds: Array) -> int | None:
        """Index of the first of ``bounds`` that allows a cut."""
        if not len(bounds) or self._least_sum_cut(bounds[-1]) is None:
            return None
        low, high = -1, len(bounds) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._least_sum_cut(bounds[middle]) is not None else (middle, high)
        return high

    def _candidates(self, bounds: Array, low: int, high: int) -> Iterator[tuple[float, tuple[int, ...]]]:
        """(seconds, ends), among them the best cut under ``bounds[low]`` to ``bounds[high]``."""
        best, sums = math.inf, dict[int, float]()
        waiting = [(low, high)]
        while waiting:
            low, high = waiting.pop()
            for i in (low, high):
                if i not in sums and (found := self._least_sum_cut(bounds[i])) is not None:
                    sums[i] = found[0]
                    best = min(best, seconds := self._formula(found[0], bounds[i]))
                    yield seconds, found[1]
            between = high - low > 1 and sums[high] < sums[low]
            if between and self._formula(sums[high], bounds[low + 1]) < best:
                middle = (low + high) // 2
                waiting += [(middle, high), (low, middle)]

    def _formula(self, total: float, slowest: float) -> float:
        return self.fill * total / self.chunks + (self.batches * self.chunks - self.fill) * slowest

    def _stages(self, ends: tuple[int, ...]) -> tuple[StageSeconds, ...] | None:
        """Seconds of every stage; None if one does not fit."""
        if not self._fits(ends):
            return None
        return tuple(self.stage(i, *span) for i, span in enumerate(zip((0, *ends), ends, strict=False)))

    def stage(self, number: int, first: int, end: int) -> StageSeconds:
        own = self.pieces[first:end]
        forward, backward, weights = (math.fsum(getattr(p, x) for p in own) for x in ("forward", "backward", "weights"))
        ahead = self.pieces[end - 1].send if end < len(self.pieces) else 0.0
        back = own[0].send_back if first else 0.0
        recompute_s = float(self.span_seconds[number][first, end]) - forward - backward - ahead - back
        carry = self.pieces[end - 1].carry if end < len(self.pieces) else 0.0
        carry_back = own[0].carry_back if first else 0.0
        once = math.fsum(p.once for p in own)
        return StageSeconds(
            forward, backward + max(0.0, recompute_s), weights, ahead, back, carry, carry_back, self.host, once
        )

    def _does_not_fit(self) -> str:
        """Error text if no cut fits; its bytes are a lower bound of every cut."""
        kept, state = (float(self._sums(what)[0, -1]) for what in ("least", "state"))
        least = (min(self.flying) * kept / self.chunks + state) / self.ranks
        return (
            f"no split into {self.stages} stages stays within {show_bytes(self.budget, 4)} per "
            f"rank. Spread evenly, they hold at least {show_bytes(least, 4)}, with "
            f"{max(self.flying)} micro-batches in flight on the first rank. What helps: smaller "
            "micro-batches, recompute, more stages, or more ranks on an axis that shards parameters."
        )

"""Outer search: candidates are skipped by lower bound, else evaluated, and the cheapest is kept.

Candidates are meshes, pipelines, numbers of micro-batches, plans of stages, orders of a sequence.
Each is evaluated by a search of its own, so they are few; one that raises has no plan::

    if not search.is_pruned(bound):
        with search.attempt(f"mesh {mesh}"):
            search.add(plan(mesh))
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from autoshard.errors import AutoshardError, PlanError

log = logging.getLogger("autoshard.plan")

Found = TypeVar("Found")


class Candidates(Generic[Found]):
    """The candidates so far. ``seconds``: objective of an evaluated one. ``tie``: relative
    difference within which the earlier one is kept. ``refusals``: errors of those without a plan."""

    def __init__(
        self, seconds: Callable[[Found], float], tie: float = 0.0, refusals: type[AutoshardError] = PlanError
    ) -> None:
        self.seconds, self.tie, self.refusals = seconds, tie, refusals
        self.best: Found | None = None
        self.found: list[Found] = []
        self.errors: list[AutoshardError] = []
        self.notes: list[str] = []
        """candidates without a plan, and why"""

    def is_pruned(self, bound: float) -> bool:
        """Whether a candidate that takes at least ``bound`` seconds cannot be the best."""
        return bound >= (math.inf if self.best is None else self.seconds(self.best))

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Evaluate the candidate ``name`` inside."""
        try:
            yield
        except self.refusals as error:
            log.info("%s: %s", name, error)
            self.errors.append(error)
            self.notes.append(f"{name} has no plan: {error}")

    def add(self, candidate: Found) -> bool:
        """Take an evaluated candidate: whether it is the best so far."""
        self.found.append(candidate)
        if self.best is None or self.seconds(candidate) < self.seconds(self.best) * (1 - self.tie):
            self.best = candidate
        return self.best is candidate

    def cheapest(self, told: int = 0) -> Found:
        """The best candidate; raises refusal number ``told`` without one."""
        if self.best is None:
            raise self.errors[told]
        return self.best

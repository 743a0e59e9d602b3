"""A clock that is told what a call takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class Told:
    """A clock of calls that say what they take; every one is made twice, and the second counts."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.now = 0.0

    def seconds(self, call: Callable[[], object], together: bool = False) -> float:
        call()
        begin = self.now
        call()
        return self.now - begin

    compute_seconds = seconds

    def interleaved_seconds(self, calls: Sequence[Callable[[], object]]) -> list[list[float]]:
        return [[self.seconds(call) for call in calls] for _ in range(3)]

"""What the micro-batches of a step share: parameters that are gathered once, and sums of gradients that are reduced once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class Gathered:
    """A bucket of parameters, gathered for all micro-batches of a step."""

    def __init__(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype | None) -> None:
        self.tensors, self.dtype = tensors, dtype
        """``dtype``: in which gradients are summed; None: in their own"""
        self.gradients: list[torch.Tensor | None] = [None] * len(tensors)

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Keep this micro-batch's ``gradients``, added to those of the ones before it."""
        # Not in place: what came first may be autograd's own.
        for i, (a, b) in enumerate(zip(self.gradients, gradients, strict=True)):
            b = b if b is None or self.dtype is None else b.to(self.dtype)
            self.gradients[i] = a if b is None else b if a is None else a + b

    def take(self, brought: Sequence[torch.Tensor | None] | None = None) -> list[torch.Tensor | None]:
        """The sums, which are kept no longer.

        ``brought``: of a backward in two parts, what one part of it brings: the sums of these alone, since earlier
        micro-batches may still add theirs to the others.
        """
        taken = [brought is None or g is not None for g in brought or self.gradients]
        sums = [g if now else None for g, now in zip(self.gradients, taken, strict=True)]
        self.gradients = [None if now else g for g, now in zip(self.gradients, taken, strict=True)]
        return sums


class Step:
    """One stage of a rank in a step of micro-batches. Every one of them gathers the same buckets in the same order."""

    def __init__(self) -> None:
        self.index, self.at = 0, 0
        self.found: list[Gathered] = []

    def enter(self, index: int) -> None:
        """Begin micro-batch number ``index``."""
        self.index, self.at = index, 0

    @property
    def is_gathered(self) -> bool:
        """Whether the next bucket is there already."""
        return self.at < len(self.found)

    def gathered(self, gather: Callable[[], Sequence[torch.Tensor]], dtype: torch.dtype | None = None) -> Gathered:
        """The next bucket of this micro-batch; only the first one's is gathered. ``dtype``: in which gradients are summed."""
        if not self.is_gathered:
            self.found.append(Gathered(gather(), dtype))
        self.at += 1
        return self.found[self.at - 1]

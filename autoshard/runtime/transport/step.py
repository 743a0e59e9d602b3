"""State that micro-batches share: gathered parameters, and gradients reduced once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class Gathered:
    """A bucket of parameters, gathered once for all micro-batches of a step."""

    def __init__(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype | None) -> None:
        self.tensors, self.dtype = tensors, dtype
        """``dtype``: in which gradients are summed; None: their own"""
        self.gradients: list[torch.Tensor | None] = [None] * len(tensors)

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Accumulate this micro-batch's ``gradients``."""
        # Out of place: autograd may own the first one.
        for i, (a, b) in enumerate(zip(self.gradients, gradients, strict=True)):
            b = b if b is None or self.dtype is None else b.to(self.dtype)
            self.gradients[i] = a if b is None else b if a is None else a + b

    def take(self, brought: Sequence[torch.Tensor | None] | None = None) -> list[torch.Tensor | None]:
        """The accumulated gradients, which are released.

        ``brought``: in a split backward, the gradients of this part; only their sums are taken,
        since earlier micro-batches may still add to others."""
        taken = [brought is None or g is not None for g in brought or self.gradients]
        sums = [g if now else None for g, now in zip(self.gradients, taken, strict=True)]
        self.gradients = [None if now else g for g, now in zip(self.gradients, taken, strict=True)]
        return sums


class Step:
    """One stage of a rank in a step. Micro-batches gather the same buckets in the same order."""

    def __init__(self) -> None:
        self.index, self.at = 0, 0
        self.found: list[Gathered] = []

    def enter(self, index: int) -> None:
        """Begin micro-batch number ``index``."""
        self.index, self.at = index, 0

    @property
    def is_gathered(self) -> bool:
        """Whether the next bucket is gathered already."""
        return self.at < len(self.found)

    def gathered(self, gather: Callable[[], Sequence[torch.Tensor]], dtype: torch.dtype | None = None) -> Gathered:
        """The next bucket, gathered by the first micro-batch only. ``dtype``: of gradient sums."""
        if not self.is_gathered:
            self.found.append(Gathered(gather(), dtype))
        self.at += 1
        return self.found[self.at - 1]

"""Storages of a simulated step: reference counts and bytes (liveness)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Heap:
    """Storages, their reference counts, and the bytes alive at any time."""

    sizes: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    """references by locals, gradients and the caller"""
    saved: list[int] = field(default_factory=list)
    """references by tensors that autograd saves"""
    alive: float = 0.0
    kept: float = 0.0

    def new(self, size: int) -> int:
        """A new storage without references."""
        for column, value in ((self.sizes, size), (self.held, 0), (self.saved, 0)):
            column.append(value)
        return len(self.sizes) - 1

    def hold(self, storage: int, by: int = 1) -> None:
        before = self.held[storage] + self.saved[storage]
        self.held[storage] += by
        self._changed(storage, before)

    def save(self, storage: int, by: int = 1) -> None:
        before, was = self.held[storage] + self.saved[storage], self.saved[storage]
        self.saved[storage] += by
        self.kept += self.sizes[storage] * ((self.saved[storage] > 0) - (was > 0))
        self._changed(storage, before)

    def _changed(self, storage: int, before: int) -> None:
        self.alive += self.sizes[storage] * ((self.held[storage] + self.saved[storage] > 0) - (before > 0))

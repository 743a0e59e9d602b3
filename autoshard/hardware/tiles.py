"""Matrix products with wave and tile quantization.

A multiprocessor computes one tile of the result at a time. So a product takes full waves of tiles,
and the last may leave units idle. Edge tiles are computed in full (NVIDIA, "Matrix
Multiplication Background User's Guide"). Libraries pick the fastest of several tile sizes: small
tiles fill more units but read more per multiplication. Below one wave of the smallest tiles, the
summed dim is split (split-K).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

SQUARE = 8192
"""rows, columns and summands of the product that a device's speed refers to"""


class Tile(NamedTuple):
    """The block of a result that one unit computes at a time."""

    rows: int
    columns: int
    share: float
    """speed relative to the largest tiles while all units work"""


class Tiling(NamedTuple):
    """A device's ``units`` (multiprocessors), and the tile sizes of its matmul kernels."""

    units: int
    tiles: tuple[Tile, ...]
    between: float
    """seconds between the last multiplication of a tile and the first of the next"""

    @classmethod
    def of(cls, units: int, tiles: Iterable[Iterable[float]], between: float) -> Tiling:
        """From plain numbers, as in a file."""
        sizes = ((int(m), int(n), float(share)) for m, n, share in tiles)
        return cls(int(units), tuple(Tile(*size) for size in sizes), float(between))

    def seconds(self, flops: float, rows: int, columns: int, speed: float) -> float:
        """Seconds of a product; ``speed``: FLOP/s of the product of :data:`SQUARE` cubed."""
        return _seconds(self, flops / (2.0 * rows * columns), rows, columns, speed) if rows * columns else 0.0


@lru_cache(maxsize=1 << 16)
def _seconds(tiling: Tiling, summed: float, rows: int, columns: int, speed: float) -> float:
    each = 2.0 * summed * tiling.units / _full_speed(tiling, speed)
    return min(size * each + waits for size, waits in _ways(tiling, rows, columns))


def _ways(tiling: Tiling, rows: int, columns: int) -> list[tuple[float, float]]:
    """Per tile size: (elements per unit, scaled to the largest tiles' speed; idle seconds)."""
    smallest, found = min(t.rows * t.columns for t in tiling.tiles), []
    for tile in tiling.tiles:
        size = tile.rows * tile.columns
        waves = math.ceil(rows / tile.rows) * math.ceil(columns / tile.columns) / tiling.units
        waves = waves if size == smallest and waves < 1 else math.ceil(waves)
        found.append((waves * size / tile.share, max(0.0, waves - 1) * tiling.between))
    return found


@lru_cache(maxsize=256)
def _full_speed(tiling: Tiling, speed: float) -> float:
    """FLOP/s of full waves of the largest tiles, if the square product reaches ``speed``."""
    taken = 2.0 * SQUARE**3 / speed
    ways = _ways(tiling, SQUARE, SQUARE)
    return min(2.0 * SQUARE * size * tiling.units / (taken - waits) for size, waits in ways if waits < taken)

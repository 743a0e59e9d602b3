"""How long a matrix product takes that units compute in tiles of its result.

A unit (a multiprocessor) computes one tile at a time, so a product takes whole waves of as many tiles as there are units, of
which the last may leave some idle, and tiles at the edge are computed whole (NVIDIA, "Matrix Multiplication Background User's
Guide": wave and tile quantization). Libraries have kernels for several tiles and take the quickest: small ones fill the units
better, but read more for each multiplication. Where not even the smallest fill one wave, products are split along what they
sum over, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

SQUARE = 8192
"""rows, columns and summands of the product whose speed is a device's"""


class Tile(NamedTuple):
    """The part of a result that one unit computes at a time."""

    rows: int
    columns: int
    share: float
    """what kernels with this tile reach of what those with the largest do, where all units work"""


class Tiling(NamedTuple):
    """How a device computes products: ``units`` at once, in tiles of one of these sizes."""

    units: int
    tiles: tuple[Tile, ...]
    between: float
    """seconds from the last multiplication of one tile to the first of the next"""

    @classmethod
    def of(cls, units: int, tiles: Iterable[Iterable[float]], between: float) -> Tiling:
        """From numbers, as a file holds them."""
        sizes = ((int(m), int(n), float(share)) for m, n, share in tiles)
        return cls(int(units), tuple(Tile(*size) for size in sizes), float(between))

    def seconds(self, flops: float, rows: int, columns: int, speed: float) -> float:
        """Time of a product of so many operations with such a result; ``speed``: FLOP/s of that of :data:`SQUARE` cubed."""
        return _seconds(self, flops / (2.0 * rows * columns), rows, columns, speed) if rows * columns else 0.0


@lru_cache(maxsize=1 << 16)
def _seconds(tiling: Tiling, summed: float, rows: int, columns: int, speed: float) -> float:
    each = 2.0 * summed * tiling.units / _full_speed(tiling, speed)
    return min(size * each + waits for size, waits in _ways(tiling, rows, columns))


def _ways(tiling: Tiling, rows: int, columns: int) -> list[tuple[float, float]]:
    """Per tile: elements of the result that a unit computes, as if in the largest tiles, and seconds between tiles."""
    smallest, found = min(t.rows * t.columns for t in tiling.tiles), []
    for tile in tiling.tiles:
        size = tile.rows * tile.columns
        waves = math.ceil(rows / tile.rows) * math.ceil(columns / tile.columns) / tiling.units
        waves = waves if size == smallest and waves < 1 else math.ceil(waves)
        found.append((waves * size / tile.share, max(0.0, waves - 1) * tiling.between))
    return found


@lru_cache(maxsize=256)
def _full_speed(tiling: Tiling, speed: float) -> float:
    """FLOP/s in the largest tiles while all units work, where the square product reaches ``speed``."""
    taken = 2.0 * SQUARE**3 / speed
    ways = _ways(tiling, SQUARE, SQUARE)
    return min(2.0 * SQUARE * size * tiling.units / (taken - waits) for size, waits in ways if waits < taken)

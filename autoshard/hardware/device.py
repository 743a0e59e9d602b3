"""One device type: rates, links, checks of fields, and tile quantization of matrix products.
A multiprocessor computes one tile of the result at a time. So a product takes full waves of tiles,
and the last may leave units idle. Edge tiles are computed in full (NVIDIA, "Matrix
Multiplication Background User's Guide"). Libraries pick the fastest of several tile sizes: small
tiles fill more units but read more per multiplication. Below one wave of the smallest tiles, the
summed dim is split (split-K)."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import torch

from autoshard.errors import MeshError, PlanError
from autoshard.hardware.link import UNBOUNDED, Crossing, Level, Link, Route, check_levels, is_amount
from autoshard.hardware.schema import SchemaError, parse_json, read_as, to_python_numbers

SQUARE_PRODUCT_LENGTH = 8192
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
        """Seconds of a product; ``speed``: FLOP/s of one of :data:`SQUARE_PRODUCT_LENGTH` cubed."""
        return (
            _tiled_product_seconds(self, flops / (2.0 * rows * columns), rows, columns, speed)
            if rows * columns
            else 0.0
        )


@lru_cache(maxsize=1 << 16)
def _tiled_product_seconds(tiling: Tiling, summed: float, rows: int, columns: int, speed: float) -> float:
    each = 2.0 * summed * tiling.units / _full_speed(tiling, speed)
    return min(size * each + waits for size, waits in _tile_costs(tiling, rows, columns))


def _tile_costs(tiling: Tiling, rows: int, columns: int) -> list[tuple[float, float]]:
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
    taken = 2.0 * SQUARE_PRODUCT_LENGTH**3 / speed
    ways = _tile_costs(tiling, SQUARE_PRODUCT_LENGTH, SQUARE_PRODUCT_LENGTH)
    return min(
        2.0 * SQUARE_PRODUCT_LENGTH * size * tiling.units / (taken - waits) for size, waits in ways if waits < taken
    )


FieldCheck = tuple[str, Callable[[Any], bool]]
"""(description of valid values, predicate)"""


def _int_check(least: int) -> FieldCheck:
    def fits(value: Any) -> bool:
        return type(value) is int and value >= least

    return f"an int of at least {least}", fits


def _rows_check(*each: Callable[[Any], bool], what: str = "") -> FieldCheck:
    def fits(rows: Any) -> bool:
        if not isinstance(rows, tuple) or not all(isinstance(row, tuple) and len(row) == len(each) for row in rows):
            return False
        return all(is_one(x) for row in rows for is_one, x in zip(each, row, strict=True))

    return f"a tuple of tuples of {what or f'{len(each)} numbers of at least 0'}", fits


def _is_positive(value: Any) -> bool:
    return is_amount(value) and value > 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_tiling(value: Any) -> bool:
    if not isinstance(value, Tiling) or not isinstance(value.tiles, tuple) or not value.tiles:
        return False
    sizes = all(isinstance(tile, Tile) and all(map(_is_positive, tile)) for tile in value.tiles)
    return sizes and _is_positive(value.units) and is_amount(value.between)


_ABOVE: FieldCheck = "a number above 0", _is_positive
_AMOUNT: FieldCheck = "a number of at least 0", is_amount
_FLAG: FieldCheck = "True or False", lambda value: isinstance(value, bool)
_LINK: FieldCheck = "a Link", lambda value: isinstance(value, Link)
_PAIRS = _rows_check(is_amount, is_amount)

FIELD_CHECKS: dict[str, FieldCheck] = {
    "name": ("a text", _is_text),
    "flops": _ABOVE,
    "memory_bandwidth": _ABOVE,
    "memory_bytes": _ABOVE,
    "node": _LINK,
    "network": _LINK,
    "devices_per_node": _int_check(1),
    "efficiency": _ABOVE,
    "kernel_latency": ("seconds", is_amount),
    "overlap": ("a share from 0 to 1", lambda value: is_amount(value) and value <= 1),
    "part_by_part": _FLAG,
    "memory_efficiency": _AMOUNT,
    "tiling": ("a Tiling of tiles above 0, or None", lambda value: value is None or _is_tiling(value)),
    "attention": _rows_check(is_amount, is_amount, is_amount),
    "fuses": _FLAG,
    "dtypes": _rows_check(_is_text, _is_positive, what="a name and FLOP/s above 0"),
    "products": _PAIRS,
    "unaligned": _ABOVE,
    "convolutions": _ABOVE,
    "channels": _PAIRS,
    "attention_tile": _int_check(0),
    "caches": _PAIRS,
    "functions": (
        "a tuple of seconds forward and backward, or an empty tuple",
        lambda value: isinstance(value, tuple) and len(value) in (0, 2) and all(map(is_amount, value)),
    ),
    "ahead": _int_check(1),
    "updates": _AMOUNT,
    "host": _AMOUNT,
    "sharing": _PAIRS,
    "waiting": _PAIRS,
    "actions": _AMOUNT,
    "carried": _AMOUNT,
    "cpu": _FLAG,
    "disturbed": _AMOUNT,
    "variation": ("a share from 0 to 1", lambda value: is_amount(value) and value <= 1),
    "levels": ("a tuple of Level", lambda value: isinstance(value, tuple)),
}


def check_hardware_fields(hardware: Any) -> None:
    """Raise :class:`MeshError` for an invalid field; NumPy numbers become Python numbers."""
    for name, (what, is_one) in FIELD_CHECKS.items():
        object.__setattr__(hardware, name, value := to_python_numbers(getattr(hardware, name)))
        if not is_one(value):
            raise MeshError(f"hardware {hardware.name!r}: {name} is {what}, got {value!r}")


class _NodesAndNetwork(tuple[Level, ...]):
    """The two levels of a hardware that names only ``node`` and ``network``; they follow these."""


ALIGNED_BYTES = 16
"""bytes of one vectorized load"""

PREFETCHED_BUCKETS = 4
"""prefetched parameter buckets where collectives need no processor: about those of a block"""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device type: ``flops`` (dense bf16 peak, FLOP/s), memory bandwidth (B/s) and bytes (B).

    Raises :class:`MeshError` for an invalid field, such as a bandwidth of 0.
    """

    name: str
    flops: float
    memory_bandwidth: float
    memory_bytes: float
    node: Link = None  # type: ignore[assignment]  # set from the levels
    """the link between devices of one node: that of the first level"""
    network: Link = None  # type: ignore[assignment]
    """the link between nodes, per device: that of the second level"""
    devices_per_node: int = 8
    """size of the first level"""
    efficiency: float = 0.7
    """share of ``flops`` that kernels reach; default of ``memory_efficiency``"""
    kernel_latency: float = 7e-6
    """seconds of the smallest kernel (launch latency)"""
    overlap: float = 0.0
    """relative speed of compute during an all-gather in a node; 0: no overlap (``Mesh.beside``)"""
    part_by_part: bool = True
    """whether collective matmul (asynchronous tensor parallelism) may be used, given overlap"""
    memory_efficiency: float = 0.0
    """share of ``memory_bandwidth`` that kernels reach; 0: :attr:`efficiency`"""
    tiling: Tiling | None = None
    """tiles of matrix products, for wave and tile quantization; None: ignored"""
    attention: tuple[tuple[int, float, float], ...] = ()
    """(keys, forward, backward): shares of ``flops`` that fused attention reaches at this length"""
    fuses: bool = False
    """whether chains of elementwise operations are fused into one kernel (torch.compile)"""
    dtypes: tuple[tuple[str, float], ...] = ()
    """(dtype, measured matmul FLOP/s); unlisted wider floats run at half the speed per doubling"""
    products: tuple[tuple[int, float], ...] = ()
    """(length of the shortest dim, share of ``flops`` that matmuls reach); 1 beyond the longest"""
    unaligned: float = 1.0
    """relative speed of 16-bit matmuls whose rows are not multiples of :data:`ALIGNED_BYTES` bytes"""
    convolutions: float = 1.0
    """speed of convolutions relative to matmuls"""
    channels: tuple[tuple[int, float], ...] = ()
    """(channels, relative speed of convolutions with so few in or out); 1 beyond the most"""
    attention_tile: int = 0
    """keys per block that fused attention skips under a causal mask; 0: it skips single keys"""
    caches: tuple[tuple[float, float], ...] = ()
    """(bytes, seconds) to read and write recently used data; bytes beyond the last are in memory"""
    functions: tuple[float, ...] = ()
    """seconds per element of a softmax (forward, backward), for compute-bound functions; or none"""
    ahead: int = 1
    """most prefetched parameter buckets; more than 1 hides nothing if processors communicate"""
    updates: float = 0.0
    """bytes per second that the optimizer reads and writes; 0: as ``memory_bandwidth``"""
    host: float = 0.0
    """bytes per second between device and host memory, each way; 0: as ``memory_bandwidth`` on a CPU,
    else nothing may be offloaded"""
    sharing: tuple[tuple[int, float], ...] = ()
    """(ranks at work, seconds of their work relative to all at work) for ranks that share cores"""
    waiting: tuple[tuple[float, float], ...] = ()
    """(compute seconds, skew seconds), ascending: waits at a collective beyond link latency"""
    actions: float = 0.0
    """processor seconds of overhead per pipeline action, messages included except their bytes"""
    carried: float = 0.0
    """processor seconds per byte at each end of a message between stages"""
    cpu: bool = False
    """whether it is a CPU: convolutions then run with channels last, and autograd saves them so"""
    disturbed: float = 0.0
    """share of its measurements that steal time disturbed in every try"""
    variation: float = 0.0
    """standard deviation of the speeds of devices of this kind, as a share of the mean"""
    levels: tuple[Level, ...] = ()
    """levels of the cluster, innermost first, in place of ``node``, ``network`` and
    ``devices_per_node``; default: these two"""

    def __post_init__(self) -> None:
        levels = self.levels
        if levels and not isinstance(levels, _NodesAndNetwork):
            check_levels(levels, self.name)
            first, second = levels[:2]
            for name, value in (("node", first.link), ("network", second.link), ("devices_per_node", first.size)):
                object.__setattr__(self, name, value)
        check_hardware_fields(self)
        two = (Level("node", self.devices_per_node, self.node), Level("network", UNBOUNDED, self.network))
        if isinstance(levels, _NodesAndNetwork) or levels in ((), two):
            object.__setattr__(self, "levels", _NodesAndNetwork(two))

    def paces(self, groups: int, ranks: int) -> tuple[float, ...]:
        """Speeds of a rank while 1, 2, … of ``groups`` groups of ``ranks`` work; 1 while all do.

        Empty if ranks share no cores, or are more than one machine has.
        """
        if not self.sharing or groups * ranks > self.sharing[-1][0]:
            return ()
        known, seconds = zip(*self.sharing, strict=True)
        return tuple(float(x) for x in 1 / np.interp(ranks * np.arange(1, groups + 1), known, seconds))

    def relative_duration(self, working: float, ranks: int) -> float:
        """Duration of a rank's work while ``working`` of ``ranks`` work, relative to all."""
        if not self.sharing or ranks > self.sharing[-1][0]:
            return 1.0
        known, seconds = zip(*self.sharing, strict=True)
        return float(np.interp(working, known, seconds) / np.interp(ranks, known, seconds))

    def on_processor(self, seconds: float) -> float:
        """Wall seconds of processor ``seconds`` while all ranks work: see :attr:`sharing`."""
        return seconds / self.sharing[0][1] if self.sharing else seconds

    def waits(self, computed: float) -> float:
        """Skew: seconds that ranks wait for each other after compute (:attr:`waiting`)."""
        if not self.waiting:
            return 0.0
        after, seconds = zip(*self.waiting, strict=True)
        return float(np.interp(computed, after, seconds))

    def slowest_excess(self, ranks: int) -> float:
        """Seconds of the slowest of ``ranks`` devices beyond those of the average one, as a share.

        All wait for it in every step. Expected maximum of normal speeds (Blom 1958).
        """
        if not self.variation or ranks < 2:
            return 0.0
        return self.variation * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))

    def route(self, inside: int, nodes: int, above: tuple[tuple[int, int], ...] = ()) -> Route:
        """The links of a group with ``inside`` ranks on each of ``nodes`` nodes.

        ``above``: (ranks in one unit, units) of the second level and those above it.
        """
        beyond = (Crossing(level.link, *of) for level, of in zip(self.levels[2:], above, strict=False) if of[1] > 1)
        return Route(self.node, self.network, inside, nodes, self.kernel_latency, tuple(beyond))

    @property
    def is_accelerator(self) -> bool:
        """Whether models run on it in bfloat16: not so on CPUs and the ideal hardware of checks."""
        return not self.cpu and self.kernel_latency > 0

    def peak(self, dtype: torch.dtype) -> float:
        """Peak matmul FLOP/s in ``dtype``; float32 as TF32 where torch's precision allows it."""
        name, known = str(dtype).removeprefix("torch."), dict(self.dtypes)
        if name == "float32" and "tf32" in known and torch.get_float32_matmul_precision() != "highest":
            name = "tf32"
        measured = known.get(name)
        if measured is not None:
            return measured
        bits = 8 * dtype.itemsize if dtype.is_floating_point else 16
        return self.flops / max(1.0, bits / 16)

    def memory_seconds(self, moved: float) -> float:
        """Seconds to read and write ``moved`` bytes in memory."""
        return moved / (self.memory_bandwidth * (self.memory_efficiency or self.efficiency))

    def traffic_seconds(self, moved: float) -> float:
        """Seconds to read and write ``moved`` bytes in an operation, in caches if they fit."""
        below, taken = 0.0, 0.0
        for size, seconds in self.caches:
            if moved <= size:
                return taken + (seconds - taken) * (moved - below) / (size - below)
            below, taken = size, seconds
        return taken + self.memory_seconds(moved - below)

    def function_seconds(self, elements: float, backward: bool) -> float:
        """Compute seconds of a function such as exp, softmax or a norm, without memory traffic."""
        return elements * self.functions[backward] if self.functions else 0.0

    def update_seconds(self, moved: float) -> float:
        """Seconds of the optimizer to read and write ``moved`` bytes."""
        return moved / self.updates if self.updates else self.memory_seconds(moved)

    def host_seconds(self, moved: float) -> float:
        """Seconds to copy ``moved`` bytes between device and host memory. Raises :class:`PlanError` without a link."""
        if not self.host and not self.cpu:
            raise PlanError(
                f"hardware {self.name!r} has no link to host memory, so nothing can be offloaded. Give it one: "
                "dataclasses.replace(hardware, host=55e9), in bytes per second each way"
            )
        return moved / self.host if self.host else self.memory_seconds(2 * moved)

    def product_seconds(self, flops: float, result: tuple[int, ...], dtype: torch.dtype, aligned: bool = True) -> float:
        """Seconds of a matrix product of ``flops`` FLOPs with this local result shape.

        ``aligned``: :meth:`is_aligned`; for gradients, that of their forward product.
        """
        share = self._shortest_dim_share(flops, result) * (1.0 if aligned else self.unaligned)
        speed = self.peak(dtype) * self.efficiency
        if self.tiling is None or len(result) < 2:
            return flops / (speed * share)
        return self.tiling.seconds(flops, math.prod(result[:-1]), result[-1], speed) / share

    def convolution_seconds(self, flops: float, dtype: torch.dtype, channels: tuple[int, ...] = ()) -> float:
        """Seconds of a convolution of ``flops`` FLOPs; ``channels``: local channels (in, out)."""
        share = self.convolutions * math.prod(map(self._channel_share, channels))
        return flops / (self.peak(dtype) * self.efficiency * share)

    def _channel_share(self, channels: int) -> float:
        """Relative speed with so many channels: seconds are interpolated between measurements."""
        if not self.channels or channels >= self.channels[-1][0]:
            return 1.0
        known = [n for n, _ in self.channels]
        return float(channels / np.interp(channels, known, [n / share for n, share in self.channels]))

    def is_aligned(self, flops: float, result: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether rows of a matmul's operands and result are multiples of :data:`ALIGNED_BYTES` bytes."""
        if not flops or not result or dtype.itemsize > 2:
            return True
        summed = flops / (2.0 * math.prod(result))
        return not any(n * dtype.itemsize % ALIGNED_BYTES for n in (result[-1], round(summed)))

    def _shortest_dim_share(self, flops: float, result: tuple[int, ...]) -> float:
        """Share of a matmul by its shortest dim: rows, columns or the summed dim."""
        if not self.products or len(result) < 2 or not flops:
            return 1.0
        rows, columns = math.prod(result[:-1]), result[-1]
        shortest = max(1.0, min(rows, columns, flops / (2 * rows * columns) if rows * columns else 1.0))
        known = [*sorted(self.products), (math.inf, 1.0)]
        if shortest <= known[0][0]:
            return known[0][1]
        below, above = next(p for p in itertools.pairwise(known) if shortest <= p[1][0])
        if math.isinf(above[0]):
            return 1.0
        part = math.log(shortest / below[0]) / math.log(above[0] / below[0])
        return below[1] + part * (above[1] - below[1])

    def attention_seconds(self, flops: float, keys: int, dtype: torch.dtype, backward: bool) -> float:
        """Seconds of fused attention of ``flops`` FLOPs over ``keys`` keys."""
        if not self.attention:
            return flops / (self.peak(dtype) * self.efficiency)
        rows = sorted(self.attention)
        if len(rows) == 1 or keys <= rows[0][0]:
            share = rows[0][1 + backward]
        else:
            below, above = next((p for p in itertools.pairwise(rows) if keys <= p[1][0]), (rows[-1], rows[-1]))
            part = math.log(keys / below[0]) / math.log(above[0] / below[0]) if below is not above else 0.0
            share = below[1 + backward] + part * (above[1 + backward] - below[1 + backward])
        return flops / (self.peak(dtype) * share)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON types; without levels where ``node`` and ``network`` say them."""
        data = asdict(self)
        if isinstance(self.levels, _NodesAndNetwork):
            del data["levels"]
        return data

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Hardware:
        """The inverse of :meth:`to_dict`; missing fields get defaults, unknown ones are ignored.

        Raises :class:`~autoshard.hardware.schema.SchemaError` for invalid data.
        """
        found: Hardware = read_as(Hardware, data)
        return found

    def save(self, path: str | Path) -> None:
        """Write it as JSON, for :meth:`load` and ``Mesh(..., hardware="cluster.json")``."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Hardware:
        """Read a file of :meth:`save`. Raises :class:`MeshError` for a missing or invalid file."""
        try:
            return Hardware.from_dict(parse_json(Path(path).read_bytes()))
        except OSError as error:
            raise MeshError(f"the hardware file {str(path)!r} cannot be read: {error}") from error
        except SchemaError as error:
            raise MeshError(
                f"{str(path)!r} was not written by Hardware.save ({error}). autoshard.calibrate() measures a hardware"
            ) from error


def free_memory() -> int | None:
    """Available main memory in bytes (MemAvailable); None where the system is no Linux."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)

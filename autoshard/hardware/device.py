"""One device type: peak rates, the shares that kernels reach, and links."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autoshard.errors import MeshError
from autoshard.hardware.checks import check_fields
from autoshard.hardware.link import Link, Route
from autoshard.hardware.schema import SchemaError, parsed, read
from autoshard.hardware.tiles import Tiling

ALIGNED = 16
"""bytes of one vectorized load"""

AHEAD = 4
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
    node: Link
    """the link between devices of one node"""
    network: Link
    """the link between nodes, per device"""
    devices_per_node: int = 8
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
    """relative speed of 16-bit matmuls whose rows are no multiples of :data:`ALIGNED` bytes"""
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

    def __post_init__(self) -> None:
        check_fields(self)

    def paces(self, groups: int, ranks: int) -> tuple[float, ...]:
        """Speeds of a rank while 1, 2, … of ``groups`` groups of ``ranks`` work; 1 while all do.

        Empty if ranks share no cores, or are more than one machine has.
        """
        if not self.sharing or groups * ranks > self.sharing[-1][0]:
            return ()
        known, seconds = zip(*self.sharing, strict=True)
        return tuple(float(x) for x in 1 / np.interp(ranks * np.arange(1, groups + 1), known, seconds))

    def lasting(self, working: float, ranks: int) -> float:
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

    def route(self, inside: int, nodes: int) -> Route:
        """The links of a group with ``inside`` ranks on each of ``nodes`` nodes."""
        return Route(self.node, self.network, inside, nodes, self.kernel_latency)

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

    def product_seconds(self, flops: float, result: tuple[int, ...], dtype: torch.dtype, aligned: bool = True) -> float:
        """Seconds of a matrix product of ``flops`` FLOPs with this local result shape.

        ``aligned``: :meth:`is_aligned`; for gradients, that of their forward product.
        """
        share = self._share(flops, result) * (1.0 if aligned else self.unaligned)
        speed = self.peak(dtype) * self.efficiency
        if self.tiling is None or len(result) < 2:
            return flops / (speed * share)
        return self.tiling.seconds(flops, math.prod(result[:-1]), result[-1], speed) / share

    def convolution_seconds(self, flops: float, dtype: torch.dtype, channels: tuple[int, ...] = ()) -> float:
        """Seconds of a convolution of ``flops`` FLOPs; ``channels``: local channels (in, out)."""
        share = self.convolutions * math.prod(map(self._filled, channels))
        return flops / (self.peak(dtype) * self.efficiency * share)

    def _filled(self, channels: int) -> float:
        """Relative speed with so many channels: seconds are interpolated between measurements."""
        if not self.channels or channels >= self.channels[-1][0]:
            return 1.0
        known = [n for n, _ in self.channels]
        return float(channels / np.interp(channels, known, [n / share for n, share in self.channels]))

    def is_aligned(self, flops: float, result: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether rows of a matmul's operands and result are multiples of :data:`ALIGNED` bytes."""
        if not flops or not result or dtype.itemsize > 2:
            return True
        summed = flops / (2.0 * math.prod(result))
        return not any(n * dtype.itemsize % ALIGNED for n in (result[-1], round(summed)))

    def _share(self, flops: float, result: tuple[int, ...]) -> float:
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
        """The fields as JSON types."""
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Hardware:
        """The inverse of :meth:`to_dict`; missing fields get defaults, unknown ones are ignored.

        Raises :class:`~autoshard.hardware.schema.SchemaError` for invalid data.
        """
        found: Hardware = read(Hardware, data)
        return found

    def save(self, path: str | Path) -> None:
        """Write it as JSON, for :meth:`load` and ``Mesh(..., hardware="cluster.json")``."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Hardware:
        """Read a file of :meth:`save`. Raises :class:`MeshError` for a missing or invalid file."""
        try:
            return Hardware.from_dict(parsed(Path(path).read_bytes()))
        except OSError as error:
            raise MeshError(f"the hardware file {str(path)!r} cannot be read: {error}") from error
        except SchemaError as error:
            raise MeshError(
                f"{str(path)!r} is no hardware that Hardware.save wrote ({error}); autoshard.calibrate() measures one"
            ) from error


def free_memory() -> int | None:
    """Available main memory in bytes (MemAvailable); None where the system is no Linux."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)

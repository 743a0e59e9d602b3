"""One device type: what its kernels reach of the data sheet, and its links."""

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
"""bytes that a load of a fast kernel takes at once"""

AHEAD = 4
"""buckets of parameters gathered ahead of the one that is read, where collectives take no processor: mostly those of a block"""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device type. ``flops`` in FLOP/s (bf16 dense peak), ``memory_bandwidth`` B/s, ``memory_bytes`` B.

    Raises :class:`MeshError` for a number that no device has, such as a bandwidth of 0.
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
    """what kernels reach of ``flops``, and of ``memory_bandwidth`` where ``memory_efficiency`` does not say"""
    kernel_latency: float = 7e-6
    """seconds of the smallest kernel"""
    overlap: float = 0.0
    """how fast compute runs while an all-gather inside a node runs beside it, relative to compute alone; 0: nothing can run
    beside it. See :meth:`~autoshard.mesh.Mesh.beside`"""
    part_by_part: bool = True
    """whether products go beside messages of their own operands and sums, where :attr:`overlap` is not 0 and where that pays"""
    memory_efficiency: float = 0.0
    tiling: Tiling | None = None
    """how multiprocessors compute products in tiles of their results; None: not counted"""
    attention: tuple[tuple[int, float, float], ...] = ()
    """(keys, forward, backward): the share of ``flops`` that fused attention reaches at this length"""
    fuses: bool = False
    """whether chains of elementwise operations run as one kernel (torch.compile)"""
    dtypes: tuple[tuple[str, float], ...] = ()
    """(dtype, FLOP/s) where products were measured; else a wider float runs at half the speed per doubling"""
    products: tuple[tuple[int, float], ...] = ()
    """(length, share): what products reach of ``flops`` whose shortest dim is this long; beyond the longest, all of it"""
    unaligned: float = 1.0
    """what products of 16-bit floats reach of that where rows in memory are no multiples of :data:`ALIGNED` bytes"""
    convolutions: float = 1.0
    """what convolutions reach, relative to products"""
    channels: tuple[tuple[int, float], ...] = ()
    """(channels, share): what convolutions reach of that whose operand or result has so few, which fill no blocks of a vector
    unit; beyond the most, all of it"""
    attention_tile: int = 0
    """keys that fused attention leaves out together where a causal mask hides them all; 0: it leaves out each"""
    caches: tuple[tuple[float, float], ...] = ()
    """(bytes, seconds) to read and write so many that were used lately; what is more comes from memory"""
    functions: tuple[float, ...] = ()
    """seconds per element of a softmax, forward and backward: of what computes more than it reads; none: memory bounds it"""
    ahead: int = 1
    """buckets of parameters gathered ahead, at most: where processors also send and receive, more than one hid no more"""
    updates: float = 0.0
    """bytes per second that the optimizer reads and writes; 0: as ``memory_bandwidth``"""
    sharing: tuple[tuple[int, float], ...] = ()
    """(ranks of one machine at work, seconds of what each does relative to all of them at work), where they share cores"""
    waiting: tuple[tuple[float, float], ...] = ()
    """(seconds of compute, seconds), ascending: what ranks wait for one another after it, beyond latencies of links"""
    actions: float = 0.0
    """processor seconds of an action of a pipeline beside its operations, with its messages but for their bytes"""
    carried: float = 0.0
    """processor seconds per byte that each end of a message between stages takes from those with whom it shares cores"""
    cpu: bool = False
    """whether it is a CPU: convolutions read images with the channels last in memory, and autograd keeps them so"""
    disturbed: float = 0.0
    """the share of what was measured of it during which the host of a virtual machine gave the cores to others, however often
    it was measured again"""

    def __post_init__(self) -> None:
        check_fields(self)

    def paces(self, groups: int, ranks: int) -> tuple[float, ...]:
        """How fast a rank works while one of so many groups of ``ranks`` does, two, ... all, where all are at work 1.

        None (``()``) where they share nothing, or are more than were measured: these are on several machines.
        """
        if not self.sharing or groups * ranks > self.sharing[-1][0]:
            return ()
        known, seconds = zip(*self.sharing, strict=True)
        return tuple(float(x) for x in 1 / np.interp(ranks * np.arange(1, groups + 1), known, seconds))

    def lasting(self, working: float, ranks: int) -> float:
        """What a rank's work takes while only so many of ``ranks`` are at work, as a part of what it takes beside all."""
        if not self.sharing or ranks > self.sharing[-1][0]:
            return 1.0
        known, seconds = zip(*self.sharing, strict=True)
        return float(np.interp(working, known, seconds) / np.interp(ranks, known, seconds))

    def on_processor(self, seconds: float) -> float:
        """Seconds that so many of the processor take a rank while all are at work: see :attr:`sharing`."""
        return seconds / self.sharing[0][1] if self.sharing else seconds

    def waits(self, computed: float) -> float:
        """Seconds that ranks wait for one another after so many of compute: see :attr:`waiting`."""
        if not self.waiting:
            return 0.0
        after, seconds = zip(*self.waiting, strict=True)
        return float(np.interp(computed, after, seconds))

    def route(self, inside: int, nodes: int) -> Route:
        """The links of a group with ``inside`` ranks on each of ``nodes`` nodes."""
        return Route(self.node, self.network, inside, nodes, self.kernel_latency)

    def peak(self, dtype: torch.dtype) -> float:
        """Peak FLOP/s for matmuls in ``dtype``; wider floats run at a half of it per doubling.

        Float32 is "tf32" where ``torch.set_float32_matmul_precision`` lets it be.
        """
        name, known = str(dtype).removeprefix("torch."), dict(self.dtypes)
        if name == "float32" and "tf32" in known and torch.get_float32_matmul_precision() != "highest":
            name = "tf32"
        measured = known.get(name)
        if measured is not None:
            return measured
        bits = 8 * dtype.itemsize if dtype.is_floating_point else 16
        return self.flops / max(1.0, bits / 16)

    def memory_seconds(self, moved: float) -> float:
        """Time to read and write ``moved`` bytes."""
        return moved / (self.memory_bandwidth * (self.memory_efficiency or self.efficiency))

    def traffic_seconds(self, moved: float) -> float:
        """Time of one operation to read and write ``moved`` bytes, which :attr:`caches` hold where they fit."""
        below, taken = 0.0, 0.0
        for size, seconds in self.caches:
            if moved <= size:
                return taken + (seconds - taken) * (moved - below) / (size - below)
            below, taken = size, seconds
        return taken + self.memory_seconds(moved - below)

    def function_seconds(self, elements: float, backward: bool) -> float:
        """Time of a function such as exp, softmax or a norm of so many elements, beside what memory takes."""
        return elements * self.functions[backward] if self.functions else 0.0

    def update_seconds(self, moved: float) -> float:
        """Time of the optimizer to read and write ``moved`` bytes."""
        return moved / self.updates if self.updates else self.memory_seconds(moved)

    def product_seconds(self, flops: float, result: tuple[int, ...], dtype: torch.dtype, aligned: bool = True) -> float:
        """Time of ``flops`` operations of a matrix product whose result has this local shape.

        ``aligned``: see :meth:`is_aligned`, of the product whose gradients these are, too.
        """
        share = self._share(flops, result) * (1.0 if aligned else self.unaligned)
        speed = self.peak(dtype) * self.efficiency
        if self.tiling is None or len(result) < 2:
            return flops / (speed * share)
        return self.tiling.seconds(flops, math.prod(result[:-1]), result[-1], speed) / share

    def convolution_seconds(self, flops: float, dtype: torch.dtype, channels: tuple[int, ...] = ()) -> float:
        """Time of ``flops`` operations of a convolution; ``channels``: those of its operand and of its result, each of which
        may be too few."""
        share = self.convolutions * math.prod(map(self._filled, channels))
        return flops / (self.peak(dtype) * self.efficiency * share)

    def _filled(self, channels: int) -> float:
        """What so many channels reach of what many do. Between two that were measured seconds are interpolated; fewer than the
        fewest take as long as these."""
        if not self.channels or channels >= self.channels[-1][0]:
            return 1.0
        known = [n for n, _ in self.channels]
        return float(channels / np.interp(channels, known, [n / share for n, share in self.channels]))

    def is_aligned(self, flops: float, result: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether rows of a product's operands and result, in memory, can be read and written in whole loads."""
        if not flops or not result or dtype.itemsize > 2:
            return True
        summed = flops / (2.0 * math.prod(result))
        return not any(n * dtype.itemsize % ALIGNED for n in (result[-1], round(summed)))

    def _share(self, flops: float, result: tuple[int, ...]) -> float:
        """What a product reaches by its shortest dim: of the rows and columns of its result, and the one it sums over."""
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
        """Time of ``flops`` operations of fused attention over ``keys`` keys."""
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
        """As JSON holds it."""
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Hardware:
        """The inverse of :meth:`to_dict`. Fields that are missing have their defaults, unknown ones are not read.

        Raises :class:`~autoshard.hardware.schema.SchemaError` where it is no hardware.
        """
        found: Hardware = read(Hardware, data)
        return found

    def save(self, path: str | Path) -> None:
        """Write it as JSON; :meth:`load` and ``Mesh(..., hardware="cluster.json")`` read it."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Hardware:
        """What :meth:`save` wrote. Raises :class:`MeshError` where the file is missing or holds something else."""
        try:
            return Hardware.from_dict(parsed(Path(path).read_bytes()))
        except OSError as error:
            raise MeshError(f"the hardware file {str(path)!r} cannot be read: {error}") from error
        except SchemaError as error:
            raise MeshError(
                f"{str(path)!r} is no hardware that Hardware.save wrote ({error}); autoshard.calibrate() measures one"
            ) from error


def free_memory() -> int | None:
    """Bytes of main memory that this machine can still give; None where it does not say (it is no Linux)."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)

"""What a device and its links can do: the constants of the cost model.

Figures are the vendors' data sheets (dense bf16, one direction per link); latencies follow published
NCCL measurements. Times are α-β: ``latency + ring bytes / bandwidth``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from autoshard.errors import MeshError


@dataclass(frozen=True, slots=True)
class Link:
    """One mesh axis's network: ``latency`` seconds per ring step, ``bandwidth`` bytes per second per rank."""

    latency: float
    bandwidth: float

    def seconds(self, ring_bytes: float, ranks: int) -> float:
        """Time of one collective that puts ``ring_bytes`` on the wire per rank among ``ranks`` ranks."""
        if ranks <= 1:
            return 0.0
        return self.latency * (1 + 0.25 * (ranks - 1)) + ring_bytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device type. ``flops`` in FLOP/s (bf16 dense peak), ``memory_bandwidth`` B/s, ``memory_bytes`` B."""

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
    kernel_latency: float = 7e-6
    overlap: float = 0.0
    """how fast compute runs while collectives run beside it, relative to compute alone; 0: nothing can run beside it"""

    def link(self, sizes: Sequence[int], axis: int) -> Link:
        """The link of mesh axis number ``axis``: inside a node while the axes up to it fill at most one node."""
        span = 1
        for size in sizes[axis:]:
            span *= size
        return self.node if span <= self.devices_per_node else self.network

    def peak(self, dtype: torch.dtype) -> float:
        """Peak FLOP/s for matmuls in ``dtype``; wider floats run at a half of it per doubling."""
        bits = 8 * dtype.itemsize if dtype.is_floating_point else 16
        return self.flops / max(1.0, bits / 16)

    def compute_seconds(self, flops: float, moved: float, dtype: torch.dtype) -> float:
        """Roofline time of one kernel: ``flops`` operations, ``moved`` bytes of memory traffic."""
        roof = max(flops / self.peak(dtype), moved / self.memory_bandwidth)
        return self.kernel_latency + roof / self.efficiency


_GB = 1e9
_NODE = Link(6e-6, 450 * _GB)
_NET = Link(15e-6, 50 * _GB)

# While collectives run beside it, computation is 18.9 % slower on average on NVIDIA and AMD GPUs (Lee et al. 2025,
# "Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep Learning", arXiv 2507.03114).
_BESIDE = 1 / 1.189

PRESETS: dict[str, Hardware] = {
    h.name: h
    for h in (
        Hardware("a100", 312e12, 2039e9, 80e9, Link(6e-6, 300 * _GB), Link(15e-6, 25 * _GB), overlap=_BESIDE),
        Hardware("h100", 989.4e12, 3352e9, 80e9, _NODE, _NET, overlap=_BESIDE),
        Hardware("h200", 989.4e12, 4800e9, 141e9, _NODE, _NET, overlap=_BESIDE),
        Hardware("mi325x", 1300e12, 6000e9, 256e9, Link(6e-6, 448 * _GB), _NET, overlap=_BESIDE),
        Hardware("tpu_v5p", 459e12, 2765e9, 96e9, Link(3e-6, 600 * _GB), Link(15e-6, 25 * _GB), 4096, overlap=_BESIDE),
        Hardware("trainium2", 667e12, 2900e9, 96e9, Link(6e-6, 512 * _GB), Link(15e-6, 50 * _GB), 16, overlap=_BESIDE),
        # A laptop or CI machine: gloo over loopback.
        Hardware("cpu", 1e11, 20e9, 64e9, Link(60e-6, 1.5 * _GB), Link(200e-6, 1 * _GB), 1 << 30, 0.7, 2e-6),
        # Communication is next to free: FLOPs decide, bytes on the wire break ties, memory traffic comes last. So all
        # matmul-like work that can be split is split, with the fewest bytes.
        Hardware("ideal_network", 989.4e12, 1e21, 1e18, Link(0.0, 1e18), Link(0.0, 1e18), 1 << 30, 1.0, 0.0),
    )
}


def hardware(which: str | Hardware) -> Hardware:
    """A preset by name, or ``which`` itself. Raises :class:`MeshError` for an unknown name."""
    if isinstance(which, Hardware):
        return which
    try:
        return PRESETS[which]
    except KeyError:
        names = ", ".join(PRESETS)
        raise MeshError(f"unknown hardware {which!r}. Known: {names}; or pass an autoshard.Hardware.") from None


def free_memory() -> int | None:
    """Bytes of main memory that this machine can still give; None where it does not say (it is no Linux)."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)

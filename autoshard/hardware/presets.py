"""Hardware presets by name: peaks of data sheets (dense bf16), published shares of them.

- matmuls: cuBLAS on normally distributed data, 8192 cubed, reaches 716 of 989 TFLOP/s on H100
  (Shankhdhar 2024, "Outperforming cuBLAS on H100: a worklog") and 258 of 312 on A100 (He 2024,
  "Strangely, matrix multiplications on GPUs run faster when given predictable data"). Other sizes
  follow from tiles of cuBLAS kernels (H100: kernel names such as ``nvjet_tst_192x192_64x3``; A100:
  NVIDIA's "Matrix Multiplication Background User's Guide"). Speeds of tiles are slopes over 2048
  summands in OpenXLA's H100 table (``gpu/model/matmul_interpolator_data.h``, sm_90): 886 TFLOP/s
  for 128 × 256, 860 for 128 × 128, then 599, 491 and 339 for a half, a quarter and an eighth. A
  tile starts 1.4 µs after the one before (16 waves of the same table). A100 has no such table and
  takes the shares of H100.
- attention: FlashAttention-2, the default of ``scaled_dot_product_attention``: H100 with head dim
  128 by length (Shah et al. 2024, "FlashAttention-3", figures 5 and 6); A100 0.6 forward and 0.55
  backward (Dao 2023, "FlashAttention-2", figures 5 to 7).
- measured on H100 with PyTorch 2.11 (``benchmarks/gpu_kernels.py``): float32 without TF32 and
  float64 reach 51 and 60 of 66.9 TFLOP/s; bfloat16 matmuls with rows that are no multiples of 16
  bytes 97 of 642 (16384 × 768 by 50257 and 50304 classes); 3 × 3 convolutions of ResNet-50 141 to
  289 by default, 317 to 485 with channels last. ``h100_torch2.11`` has that version's attention.
- memory: 70 % of the data sheet, 7 µs for the smallest kernel (AutoParallel's roofline). Hand-tuned
  kernels reach 3.01 of 3.35 TB/s on H100 (Guo, Dao et al. 2025, "QuACK").
- collectives: NCCL on H100 in a node of 2, 4, 8: algorithm bandwidth 537, 434, 394 GB/s
  (all-gather) and 324, 236, 267 (all-reduce), times (n-1)/n and 2(n-1)/n as ring bytes
  (AutoParallel's tables). Between nodes: its profile of 1 to 32 nodes with 1 to 8 ranks each
  (``cost_models/h100_nvswitch_roce_400g.py``), latencies less those of one node and, for rings, per
  rank of a node. A card of 400 Gb/s carries 48 GB/s, of an all-to-all 0.87. Trees of two nodes send
  half of a ring's bytes over the cards (NVIDIA/nccl issue 946). A100: 230 GB/s of ring
  bytes in a node (NVIDIA's nccl-tests).
- overlap: during an all-gather in a node a matmul takes 2.08 instead of 1.18 ms on A100
  (NVIDIA/nccl issue 1428: memory bandwidth) and reaches 47 instead of 80 % of peak on H100
  (forums.developer.nvidia.com, 337991). Over full steps compute is 18.9 % slower (Lee et al. 2025,
  arXiv 2507.03114).
- variation: GPUs of one kind in one cluster differ by 8 % on average, by power management and
  manufacturing (Sinha et al. 2022, "Not all GPUs are created equal", SC22: five clusters, V100 and
  MI60, matrix products among others). Clocks of TPUs and Trainium do not follow the load.
- rings: NCCL has trees for all-gather and reduce-scatter (PAT) only with one rank per node
  (``src/graph/tuning.cc``); else latency grows with the number of ranks. From 8 nodes on by 22 µs
  per node of 8: its protocol LL128 takes 1.9 µs per step in a node, 4 between nodes and about 5 in
  the card, and carries 92 % of the bytes.
- ``cpu``: :func:`autoshard.calibrate` (``quick=False``, medians of three runs) on two ranks and
  cores of a Xeon with AVX-512, PyTorch 2.13, gloo, one thread each. Latencies of four ranks are
  scaled by groups of four against two on the same cores. Among two ranks an all-reduce of few
  numbers takes as long as one of 4096; among four 0.60 of the ring's time (0.49 to 0.67 in 14
  turns).
- newer devices, from data sheets (dense, memory per device that the vendor lets programs use):
  B200 and B300 of HGX (2250 TFLOP/s; 8 TB/s; 180 and 270 GB), GB200 and GB300 of NVL72 (2500;
  8 TB/s; 13.4 and 20 TB per rack of 72, one NVLink domain), NVLink 5 of 900 GB/s per direction,
  cards of 400 Gb/s, of 800 with ConnectX-8 (B300, GB300); MI300X (1307.4; 5.3 TB/s; 192 GB; seven
  links of 64 GB/s) and MI355X (2516.6; 8 TB/s; 288 GB; seven of 76.8), cards of 400 Gb/s; L40S (362;
  864 GB/s; 48 GB) and RTX 4090 (165.2 with sums in float32; 1008 GB/s; 24 GB), both on PCIe 4.0 × 16;
  TPU v6e (Google's "TPU v6e": 918; 1638 GB/s; 32 GB; 800 GB/s both ways; pods of 256).
- host memory, each way, per device: NVLink-C2C of GB200 and GB300 450 GB/s (900 both ways: NVIDIA's
  "GB200 NVL72"; two devices share a Grace). PCIe x 16 carries 63 GB/s (5.0), 31.5 (4.0) or 126 (6.0: B300)
  after encoding, of which copies of pinned memory reach 87 % (derived: packets of 256 bytes).
- products on B300: 19.2 TFLOP in 12.76 ms, 1504 of 2250 TFLOP/s (a layer of 4096 features, 15,872
  tokens: docs of Transformer Engine, ``examples/gemm_profiling``).
- derived, not measured: on the others kernels reach 70 %; attention on B200 and its kin reaches the
  shares of ``h100_torch2.11`` (both have cuDNN's: 539 of 989 TFLOP/s on H100, Shah et al. 2024;
  1235 of 2250 on B200, 1605 / 1.3 of Together 2026, "FlashAttention-4"); NVLink 5 takes H100's rates times two;
  L40S and RTX 4090 share 100 Gb/s per device between nodes; v6e 100 Gb/s (four cards of 200 per
  host of 8). Where a card's speed is given, 96 % of it are reached, as on H100.
- ``h100_96gb_500w``: torchtitan's devices (its ``benchmarks/llama3_h100_202412_torchtitan.md``):
  HBM2e of 2.4 TB/s, held at 500 of 700 W. Power beyond the 75 W of an idle device goes with the
  cube of the clock (derived).
- ``h100_llama3``: the cluster of Llama 3 (Llama team 2024, section 3.3.1): servers of 8, racks of
  16, pods of 3072 with full bisection, eight of them 1:7 oversubscribed.

Otherwise kernels reach 70 % of the data sheet, and latencies are published NCCL figures.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from autoshard.errors import MeshError
from autoshard.hardware.device import PREFETCHED_BUCKETS, Hardware, Tiling
from autoshard.hardware.link import SMALL_ALL_REDUCE, Level, Link, Rate

GB = 1e9
H100_OVERLAP = 0.47 / 0.8
VARIATION = 0.08 / 5.4
"""8 % from the slow to the fast whisker of a box plot, which are 5.4 standard deviations apart"""

_H100_NODE = Link(
    8e-6,
    345 * GB,
    tuple(
        Rate(kind, ranks, latency, bandwidth * GB)
        for kind, rows in {
            "all_gather": ((2, 8e-6, 537 / 2), (4, 17e-6, 434 * 3 / 4), (8, 30e-6, 394 * 7 / 8)),
            "all_reduce": ((2, 10e-6, 324), (4, 15e-6, 236 * 3 / 2), (8, 31e-6, 267 * 7 / 4)),
        }.items()
        for ranks, latency, bandwidth in rows
    ),
)
_NETWORK_RATES = (
    *(("all_gather", 2, 6e-6, 1.0), ("all_gather", 8, 25e-6, 1.0), ("all_gather", 128, 345e-6, 0.92)),
    *(("all_reduce", 2, 20e-6, 1.0), ("all_reduce", 8, 32e-6, 1.0), ("all_reduce", 32, 47e-6, 0.92)),
    *(("all_to_all", 2, 67e-6, 0.87), ("all_to_all", 8, 133e-6, 0.87), ("all_to_all", 32, 595e-6, 0.87)),
)  # fmt: skip


def _network(bandwidth: float) -> Link:
    """NCCL between nodes with the latencies of H100; ``bandwidth``: bytes/s of one card."""
    rates = (Rate(kind, n, latency, part * bandwidth) for kind, n, latency, part in _NETWORK_RATES)
    return Link(15e-6, bandwidth, tuple(rates))


def _nvlink(bandwidth: float) -> Link:
    """NCCL inside a node with the latencies of H100 and one bandwidth for all ring sizes."""
    return Link(8e-6, bandwidth, tuple(r._replace(bandwidth=bandwidth) for r in _H100_NODE.rates))


def _times(link: Link, factor: float) -> Link:
    """``link`` with so many times the bandwidth and the same latencies."""
    rates = tuple(r._replace(bandwidth=factor * r.bandwidth) for r in link.rates)
    return Link(link.latency, factor * link.bandwidth, rates)


_LOOPBACK = Link(
    0.9e-3,
    0.94 * GB,
    tuple(
        Rate(kind, ranks, latency, bandwidth * GB)
        for kind, bandwidth, pair, four in (
            (SMALL_ALL_REDUCE, 1.34, 0.73e-3, 1.6e-3),
            ("all_reduce", 1.34, 0.73e-3, 2.7e-3),
            ("all_gather", 0.94, 0.89e-3, 1.8e-3),
            ("reduce_scatter", 0.95, 0.97e-3, 2.0e-3),
            ("all_to_all", 0.75, 0.83e-3, 1.2e-3),
            ("permute", 1.7, 1.2e-3, 1.2e-3),
        )
        for ranks, latency in ((2, pair), (4, four))
    ),
)


_TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.97), (128, 64, 0.68), (64, 128, 0.68), (64, 64, 0.55))
_HOPPER_TILES = (
    *_TILES, *((320, 128, 1.0), (128, 320, 1.0), (192, 192, 1.0), (192, 128, 0.98), (128, 192, 0.98)),
    *((64, 32, 0.38), (32, 64, 0.38)),
)  # fmt: skip
_BETWEEN_TILES = 1.4e-6

_H100 = Hardware(
    "h100",
    989.4e12,
    3352e9,
    80e9,
    _H100_NODE,
    _network(48 * GB),
    efficiency=716 / 989.4,
    kernel_latency=7e-6,
    overlap=H100_OVERLAP,
    memory_efficiency=0.7,
    tiling=Tiling.of(132, _HOPPER_TILES, _BETWEEN_TILES),
    attention=(
        *((length, forward / 989.4, backward / 989.4) for length, forward, backward in (
            (512, 191, 214), (1024, 260, 260), (2048, 298, 291), (4096, 319, 310), (8192, 333, 318), (16384, 335, 322),
        )),
    ),
    fuses=True,
    dtypes=(("float32", 66.9e12), ("float64", 66.9e12), ("tf32", 494.7e12)),
    unaligned=97 / 642,
    convolutions=0.5,
    ahead=PREFETCHED_BUCKETS,
    host=55 * GB,
    variation=VARIATION,
)  # fmt: skip

_H100_NEW = replace(
    _H100,
    name="h100_torch2.11",
    attention=tuple((length, forward / 989.4, backward / 989.4) for length, forward, backward in (
        (512, 338, 172), (1024, 441, 287), (2048, 521, 392), (4096, 575, 471), (8192, 609, 526), (16384, 629, 581),
    )),
)  # fmt: skip

_A100 = replace(
    _H100,
    name="a100",
    flops=312e12,
    memory_bandwidth=2039e9,
    node=_nvlink(230 * GB),
    network=_network(24 * GB),
    efficiency=258 / 312,
    tiling=Tiling.of(108, _TILES, _BETWEEN_TILES),
    attention=((1024, 0.6, 0.55),),
    overlap=1.18 / 2.08,
    dtypes=(("float32", 19.5e12), ("float64", 19.5e12), ("tf32", 156e12)),
    host=27 * GB,
)

_MI325X = Hardware(
    "mi325x", 1300e12, 6000e9, 256e9, Link(6e-6, 448 * GB), Link(15e-6, 50 * GB), kernel_latency=7e-6, overlap=H100_OVERLAP,
    fuses=True, ahead=PREFETCHED_BUCKETS, host=55 * GB, variation=VARIATION,
)  # fmt: skip

_B200 = replace(
    _H100, name="b200", flops=2250e12, memory_bandwidth=8e12, memory_bytes=180e9, node=_times(_H100_NODE, 2),
    efficiency=1504 / 2250, tiling=None, attention=_H100_NEW.attention,
    dtypes=(("float32", 75e12), ("float64", 37e12), ("tf32", 1125e12), ("float8_e4m3fn", 4500e12)),
)  # fmt: skip
_GB200 = replace(
    _B200, name="gb200", flops=2500e12, efficiency=0.7, memory_bytes=13.4e12 / 72, devices_per_node=72, host=450 * GB,
    dtypes=(("float32", 80e12), ("float64", 40e12), ("tf32", 1250e12), ("float8_e4m3fn", 5000e12)),
)  # fmt: skip
_MI300X = replace(
    _MI325X, name="mi300x", flops=1307.4e12, memory_bandwidth=5300e9, memory_bytes=192e9,
    dtypes=(("float32", 163.4e12), ("float64", 163.4e12), ("float8_e4m3fn", 2614.9e12)),
)  # fmt: skip
_PCIE = Link(8e-6, 32 * GB)
_L40S = replace(
    _H100, name="l40s", flops=362.05e12, memory_bandwidth=864e9, memory_bytes=48e9, node=_PCIE, network=Link(15e-6, 12 * GB),
    efficiency=0.7, tiling=None, attention=(), overlap=0.0, dtypes=(("float32", 91.6e12), ("tf32", 183e12)), host=27 * GB,
)  # fmt: skip
_WATTS = ((500 - 75) / (700 - 75)) ** (1 / 3)
_H100_500W = replace(
    _H100, name="h100_96gb_500w", memory_bandwidth=2.4e12, memory_bytes=96e9, efficiency=_WATTS * _H100.efficiency,
    attention=tuple((length, _WATTS * forward, _WATTS * backward) for length, forward, backward in _H100.attention),
)  # fmt: skip
_LLAMA3 = replace(
    _H100, name="h100_llama3",
    levels=(
        Level("server", 8, _H100_NODE), Level("rack", 16, _H100.network), Level("pod", 3072, _H100.network),
        Level("cluster", 24576, _network(48 / 7 * GB)),
    ),
)  # fmt: skip

PRESETS: dict[str, Hardware] = {
    h.name: h
    for h in (
        _A100,
        _H100,
        _H100_NEW,
        replace(_H100, name="h200", memory_bandwidth=4800e9, memory_bytes=141e9),
        _H100_500W,
        _LLAMA3,
        _B200,
        replace(_B200, name="b300", memory_bytes=270e9, network=_network(96 * GB), host=110 * GB),
        _GB200,
        replace(_GB200, name="gb300", memory_bytes=20e12 / 72, network=_network(96 * GB)),
        _MI300X,
        _MI325X,
        replace(
            _MI300X, name="mi355x", flops=2516.6e12, memory_bandwidth=8e12, memory_bytes=288e9, node=Link(6e-6, 537.6 * GB),
            dtypes=(("float32", 157.3e12), ("float64", 78.6e12), ("float8_e4m3fn", 5033.2e12)),
        ),
        _L40S,
        replace(
            _L40S, name="rtx4090", flops=165.2e12, memory_bandwidth=1008e9, memory_bytes=24e9,
            dtypes=(("float32", 82.6e12), ("tf32", 82.6e12)),
        ),
        replace(
            _MI325X, name="tpu_v6e", flops=918e12, memory_bandwidth=1638e9, memory_bytes=32e9,
            node=Link(3e-6, 400 * GB), network=Link(15e-6, 12 * GB), devices_per_node=256, host=0.0, variation=0.0,
        ),
        replace(
            _MI325X, name="tpu_v5p", flops=459e12, memory_bandwidth=2765e9, memory_bytes=96e9,
            node=Link(3e-6, 600 * GB), network=Link(15e-6, 25 * GB), devices_per_node=4096, host=0.0, variation=0.0,
        ),
        replace(
            _MI325X, name="trainium2", flops=667e12, memory_bandwidth=2900e9, memory_bytes=96e9,
            node=Link(6e-6, 512 * GB), devices_per_node=16, host=0.0, variation=0.0,
        ),
        # A laptop or CI machine: gloo over loopback, one core per rank, by autoshard.calibrate().
        Hardware(
            "cpu", 1.2e12, 7e9, 64e9, _LOOPBACK, _LOOPBACK, devices_per_node=1 << 30, efficiency=1.0, kernel_latency=9e-6,
            memory_efficiency=1.0, dtypes=(("float32", 1.7e11), ("float64", 9.3e10), ("bfloat16", 1.2e12)),
            products=((4, 0.2), (16, 0.46), (64, 0.74), (256, 0.94), (1024, 1.0)), convolutions=0.85,
            channels=((3, 0.16), (8, 0.37), (12, 0.5), (16, 0.7), (24, 0.66), (32, 0.85), (48, 0.91)),
            attention=((32, 0.29, 0.27), (128, 0.53, 0.55), (512, 0.76, 0.77)), attention_tile=512,
            caches=((49152, 0.9e-6), (393216, 14e-6), (1572864, 58e-6), (6291456, 317e-6), (50331648, 2.6e-3)),
            functions=(5.9e-10, 6.7e-10), updates=3.2e10, cpu=True,
        ),
        # Communication is nearly free: FLOPs decide, then ring bytes, then memory traffic. So all
        # matmul-like work is sharded where it can be, with the fewest bytes.
        Hardware(
            "ideal_network", 989.4e12, 1e21, 1e18, Link(0.0, 1e18), Link(0.0, 1e18), devices_per_node=1 << 30,
            efficiency=1.0, kernel_latency=0.0,
        ),
    )
}  # fmt: skip


_GPU_NAMES = {
    **{name: name.lower() for name in ("H200", "H100", "A100", "B200", "B300", "GB200", "GB300", "L40S")},
    **{name: name.lower() for name in ("MI300X", "MI325X", "MI355X")}, "RTX 4090": "rtx4090",
}  # fmt: skip
"""word in a device's name → preset"""

HARDWARE_VARIABLE = "AUTOSHARD_HARDWARE"
"""environment variable with the default hardware, such as h100 on a login node without GPUs"""


def hardware(which: str | os.PathLike[str] | Hardware | None = None) -> Hardware:
    """A preset by name, a file of :meth:`Hardware.save`, or ``which`` itself; else MeshError.
    None: :data:`HARDWARE_VARIABLE`, else the GPU of this machine by its name, else ``"cpu"``."""
    if which is None:
        which = os.environ.get(HARDWARE_VARIABLE) or _hardware_here()
    if isinstance(which, Hardware):
        return which
    if isinstance(which, str) and which in PRESETS:
        return PRESETS[which]
    if isinstance(which, str | os.PathLike) and (str(which).endswith(".json") or Path(which).is_file()):
        return Hardware.load(which)
    names = ", ".join(PRESETS)
    raise MeshError(
        f"unknown hardware {which!r}. Known: {names}; or pass an autoshard.Hardware, or a file that Hardware.save wrote."
    )


@cache
def _hardware_here() -> Hardware:
    """The preset of this machine's first GPU with no more than its memory, or of its CPU."""
    if not torch.cuda.is_available():
        return PRESETS["cpu"]
    device = torch.cuda.get_device_properties(0)
    found = next((n for word, n in _GPU_NAMES.items() if re.search(rf"\b{word}\b", device.name)), None)
    if found is None:
        logging.getLogger("autoshard").warning(
            "no hardware preset for %s: its speed is taken for that of h100; autoshard.calibrate() measures it",
            device.name,
        )
    preset = PRESETS[found or "h100"]
    fits = device.total_memory >= preset.memory_bytes
    return preset if fits else replace(preset, memory_bytes=float(device.total_memory))

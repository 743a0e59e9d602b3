"""Devices and links: rates for the cost model, from presets, measurements or files."""

from __future__ import annotations

from autoshard.hardware.device import PREFETCHED_BUCKETS, Hardware, free_memory
from autoshard.hardware.link import SMALL_ALL_REDUCE, Level, Link, Overlap, Rate, Route
from autoshard.hardware.presets import PRESETS, hardware

__all__ = [
    "PREFETCHED_BUCKETS",
    "PRESETS",
    "SMALL_ALL_REDUCE",
    "Hardware",
    "Level",
    "Link",
    "Overlap",
    "Rate",
    "Route",
    "free_memory",
    "hardware",
]

"""Devices and links: rates for the cost model, from presets, measurements or files."""

from __future__ import annotations

from autoshard.hardware.device import AHEAD, Hardware, free_memory
from autoshard.hardware.link import FEW, Link, Overlap, Rate, Route
from autoshard.hardware.presets import PRESETS, hardware

__all__ = [
    "AHEAD",
    "FEW",
    "PRESETS",
    "Hardware",
    "Link",
    "Overlap",
    "Rate",
    "Route",
    "free_memory",
    "hardware",
]

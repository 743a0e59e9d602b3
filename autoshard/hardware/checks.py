"""What the numbers of a device can be: a file that was edited by hand says which one is none."""

from __future__ import annotations

import math
from typing import Any

from autoshard.errors import MeshError

ABOVE = ("flops", "memory_bandwidth", "memory_bytes", "efficiency", "unaligned", "convolutions")
NOT_BELOW = ("kernel_latency", "memory_efficiency", "updates", "actions", "carried", "disturbed")
COUNTS = {"devices_per_node": 1, "ahead": 1, "attention_tile": 0}
"""the least of each"""
FLAGS = ("part_by_part", "fuses", "cpu")
ROWS = {"attention": 3, "products": 2, "channels": 2, "caches": 2, "sharing": 2, "waiting": 2}
"""numbers of each row"""


def check_numbers(hardware: Any) -> None:
    """Raise :class:`MeshError` for a field that no device has, such as a bandwidth of 0."""
    _expect(hardware, "name", "a text", isinstance(hardware.name, str))
    for name in ABOVE:
        _expect(hardware, name, "a number above 0", _is_number(getattr(hardware, name)) and getattr(hardware, name) > 0)
    for name in NOT_BELOW:
        what = "seconds" if name == "kernel_latency" else "a number of at least 0"
        _expect(hardware, name, what, _is_amount(getattr(hardware, name)))
    for name, least in COUNTS.items():
        value = getattr(hardware, name)
        _expect(hardware, name, f"an int of at least {least}", type(value) is int and value >= least)
    for name in FLAGS:
        _expect(hardware, name, "True or False", isinstance(getattr(hardware, name), bool))
    share = hardware.overlap
    _expect(hardware, "overlap", "a share from 0 to 1", _is_number(share) and 0 <= share <= 1)
    for name, count in ROWS.items():
        rows = getattr(hardware, name)
        fine = isinstance(rows, tuple) and all(len(row) == count and all(map(_is_amount, row)) for row in rows)
        _expect(hardware, name, f"rows of {count} numbers of at least 0", fine)
    pairs = hardware.dtypes
    fine = all(len(row) == 2 and isinstance(row[0], str) and _is_amount(row[1]) and row[1] > 0 for row in pairs)
    _expect(hardware, "dtypes", "rows of a name and FLOP/s above 0", fine)
    both = hardware.functions
    fine = len(both) in (0, 2) and all(map(_is_amount, both))
    _expect(hardware, "functions", "seconds forward and backward, or none", fine)


def _expect(hardware: Any, name: str, what: str, fine: bool) -> None:
    if not fine:
        raise MeshError(f"hardware {hardware.name!r}: {name} is {what}, got {getattr(hardware, name)!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _is_amount(value: Any) -> bool:
    return _is_number(value) and value >= 0

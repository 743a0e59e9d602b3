"""Checks of the fields of a Hardware, which may come from a file edited by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autoshard.errors import MeshError
from autoshard.hardware.link import Link, is_amount
from autoshard.hardware.schema import plain
from autoshard.hardware.tiles import Tile, Tiling

Check = tuple[str, Callable[[Any], bool]]
"""(description of valid values, predicate)"""


def _count(least: int) -> Check:
    def fits(value: Any) -> bool:
        return type(value) is int and value >= least

    return f"an int of at least {least}", fits


def _rows(*each: Callable[[Any], bool], what: str = "") -> Check:
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


_ABOVE: Check = "a number above 0", _is_positive
_AMOUNT: Check = "a number of at least 0", is_amount
_FLAG: Check = "True or False", lambda value: isinstance(value, bool)
_LINK: Check = "a Link", lambda value: isinstance(value, Link)
_PAIRS = _rows(is_amount, is_amount)

FIELDS: dict[str, Check] = {
    "name": ("a text", _is_text),
    "flops": _ABOVE,
    "memory_bandwidth": _ABOVE,
    "memory_bytes": _ABOVE,
    "node": _LINK,
    "network": _LINK,
    "devices_per_node": _count(1),
    "efficiency": _ABOVE,
    "kernel_latency": ("seconds", is_amount),
    "overlap": ("a share from 0 to 1", lambda value: is_amount(value) and value <= 1),
    "part_by_part": _FLAG,
    "memory_efficiency": _AMOUNT,
    "tiling": ("a Tiling of tiles above 0, or None", lambda value: value is None or _is_tiling(value)),
    "attention": _rows(is_amount, is_amount, is_amount),
    "fuses": _FLAG,
    "dtypes": _rows(_is_text, _is_positive, what="a name and FLOP/s above 0"),
    "products": _PAIRS,
    "unaligned": _ABOVE,
    "convolutions": _ABOVE,
    "channels": _PAIRS,
    "attention_tile": _count(0),
    "caches": _PAIRS,
    "functions": (
        "a tuple of seconds forward and backward, or of none",
        lambda value: isinstance(value, tuple) and len(value) in (0, 2) and all(map(is_amount, value)),
    ),
    "ahead": _count(1),
    "updates": _AMOUNT,
    "sharing": _PAIRS,
    "waiting": _PAIRS,
    "actions": _AMOUNT,
    "carried": _AMOUNT,
    "cpu": _FLAG,
    "disturbed": _AMOUNT,
}


def check_fields(hardware: Any) -> None:
    """Raise :class:`MeshError` for an invalid field; NumPy numbers become Python numbers."""
    for name, (what, is_one) in FIELDS.items():
        object.__setattr__(hardware, name, value := plain(getattr(hardware, name)))
        if not is_one(value):
            raise MeshError(f"hardware {hardware.name!r}: {name} is {what}, got {value!r}")

"""Numbers with units as text."""

from __future__ import annotations

from collections.abc import Iterable


def show_bytes(n: float, digits: int = 3) -> str:
    """``n`` bytes with a decimal unit: ``1.5 MB``."""
    return _scaled(n, (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)), "B", digits)


def show_seconds(s: float) -> str:
    """``s`` seconds as s, ms, µs or ns; "0" below a picosecond."""
    if abs(s) < 1e-12:
        return "0"
    return _scaled(s * 1e9, (("s", 1e9), ("ms", 1e6), ("µs", 1e3)), "ns")


def show_flops(n: float) -> str:
    """``n`` FLOPs with a decimal unit: ``1.5 TFLOP``."""
    return _scaled(n, (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3)), "FLOP")


def _scaled(n: float, units: Iterable[tuple[str, float]], smallest: str, digits: int = 3) -> str:
    for unit, scale in units:
        if abs(n) >= 0.9995 * scale:
            return f"{_rounded(n / scale, digits)} {unit}"
    return f"{_rounded(n, digits)} {smallest}"


def _rounded(n: float, digits: int) -> str:
    before = 3 if abs(n) >= 99.95 else 2 if abs(n) >= 9.995 else 1
    return f"{n:.0f}" if n == int(n) else f"{n:.{digits - before}f}"

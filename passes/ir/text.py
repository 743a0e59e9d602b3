"""Text: identifiers of generated Python, module paths, numbers with units."""

from __future__ import annotations

import keyword
import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache

LIST_INDEX = r"(?:0|[1-9][0-9]{0,17})"
_INDEX_PATTERN = re.compile(LIST_INDEX)
RESERVED_NAMES = frozenset("F torch aten runtime self MESH float complex int max min range".split()) | frozenset(
    keyword.kwlist
)
"""names that emitted code reads, so that it may not bind them"""


def is_number(name: str) -> bool:
    """Whether a path component is a list index: "0" and "12" are; "00", "²" and "٣" are not."""
    return _INDEX_PATTERN.fullmatch(name) is not None


def is_attribute_name(name: str) -> bool:
    """Whether ``x.name`` in a class reads this attribute: Python mangles ``__w``, NFKC ``ª``."""
    mangled = name.startswith("__") and not name.endswith("__")
    stable = name.isascii() or unicodedata.normalize("NFKC", name) == name
    return name.isidentifier() and not keyword.iskeyword(name) and not mangled and stable


def attribute_source(owner: str, path: str) -> str:
    """Python source that reads dotted ``path`` of ``owner``, by ``getattr`` where necessary."""
    for name in path.split("."):
        owner = f"{owner}.{name}" if is_attribute_name(name) else f"getattr({owner}, {name!r})"
    return owner


def identifier(wanted: str) -> str:
    """``wanted`` as an identifier that emitted code may bind."""
    letters = unicodedata.normalize("NFKC", wanted)
    base = "".join(c if f"a{c}".isidentifier() else "_" for c in letters).strip("_") or "x"
    if not base.isidentifier():
        base = unicodedata.normalize("NFKC", f"x{base}")
    return f"{base}_" if base in RESERVED_NAMES else base


_NUMBERED_MODULE = re.compile(rf"^(?:.*?\.)??{LIST_INDEX}(?=\.|\Z)", re.DOTALL)


@lru_cache(maxsize=1 << 16)
def block_path(fqn: str) -> str:
    """The outermost numbered module: ``model.layers.3`` of ``model.layers.3.mlp``; "" if none."""
    found = _NUMBERED_MODULE.match(fqn)
    return found.group() if found else ""


def enclosing_modules(names: Iterable[str]) -> list[str]:
    """Paths of all enclosing modules: ``layers`` and ``layers.3`` of ``layers.3.mlp``."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        found |= dict.fromkeys(".".join(parts[:n]) for n in range(1, len(parts)))
    return list(found)


def show_bytes(n: float, digits: int = 3) -> str:
    """``n`` bytes with a decimal unit: ``1.5 MB``."""
    return _with_unit(n, (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)), "B", digits)


def show_seconds(s: float) -> str:
    """``s`` seconds as s, ms, µs or ns; "0" below a picosecond."""
    if abs(s) < 1e-12:
        return "0"
    return _with_unit(s * 1e9, (("s", 1e9), ("ms", 1e6), ("µs", 1e3)), "ns")


def show_flops(n: float) -> str:
    """``n`` FLOPs with a decimal unit: ``1.5 TFLOP``."""
    return _with_unit(n, (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3)), "FLOP")


def _with_unit(n: float, units: Iterable[tuple[str, float]], smallest: str, digits: int = 3) -> str:
    for unit, scale in units:
        if abs(n) >= 0.9995 * scale:
            return f"{_format_digits(n / scale, digits)} {unit}"
    return f"{_format_digits(n, digits)} {smallest}"


def _format_digits(n: float, digits: int) -> str:
    before = 3 if abs(n) >= 99.95 else 2 if abs(n) >= 9.995 else 1
    return f"{n:.0f}" if n == int(n) else f"{n:.{digits - before}f}"

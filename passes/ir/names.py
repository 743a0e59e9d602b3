"""Names that users give, in generated Python: list indices, attributes, identifiers that stand for them."""

from __future__ import annotations

import keyword
import re
import unicodedata

NUMBER = r"(?:0|[1-9][0-9]{0,17})"
_NUMBER = re.compile(NUMBER)
TAKEN = frozenset("F torch aten runtime self MESH float complex int max min range".split()) | frozenset(keyword.kwlist)
"""names that emitted code reads"""


def is_number(name: str) -> bool:
    """Whether a part of a path is an index as lists have them: "0" and "12", not "00", "²" or "٣"."""
    return _NUMBER.fullmatch(name) is not None


def is_plain(name: str) -> bool:
    """Whether Python reads ``x.name`` in a class as this attribute: it mangles ``__w``, and reads ``ª`` as ``a`` (NFKC)."""
    mangled = name.startswith("__") and not name.endswith("__")
    stable = name.isascii() or unicodedata.normalize("NFKC", name) == name
    return name.isidentifier() and not keyword.iskeyword(name) and not mangled and stable


def attribute(owner: str, path: str) -> str:
    """Python that reads what is at dotted ``path`` of ``owner``."""
    for name in path.split("."):
        owner = f"{owner}.{name}" if is_plain(name) else f"getattr({owner}, {name!r})"
    return owner


def identifier(wanted: str) -> str:
    """``wanted`` as a name that emitted code may bind."""
    letters = unicodedata.normalize("NFKC", wanted)
    base = "".join(c if f"a{c}".isidentifier() else "_" for c in letters).strip("_") or "x"
    if not base.isidentifier():
        base = unicodedata.normalize("NFKC", f"x{base}")
    return f"{base}_" if base in TAKEN else base

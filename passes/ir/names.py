"""Users' names in generated Python: list indices, attributes, identifiers."""

from __future__ import annotations

import keyword
import re
import unicodedata

NUMBER = r"(?:0|[1-9][0-9]{0,17})"
_NUMBER = re.compile(NUMBER)
TAKEN = frozenset("F torch aten runtime self MESH float complex int max min range".split()) | frozenset(keyword.kwlist)
"""names that emitted code reads, so that it may not bind them"""


def is_number(name: str) -> bool:
    """Whether a path component is a list index: "0" and "12" are; "00", "²" and "٣" are not."""
    return _NUMBER.fullmatch(name) is not None


def is_plain(name: str) -> bool:
    """Whether ``x.name`` in a class reads this attribute: Python mangles ``__w``, NFKC ``ª``."""
    mangled = name.startswith("__") and not name.endswith("__")
    stable = name.isascii() or unicodedata.normalize("NFKC", name) == name
    return name.isidentifier() and not keyword.iskeyword(name) and not mangled and stable


def attribute(owner: str, path: str) -> str:
    """Python source that reads dotted ``path`` of ``owner``, by ``getattr`` where necessary."""
    for name in path.split("."):
        owner = f"{owner}.{name}" if is_plain(name) else f"getattr({owner}, {name!r})"
    return owner


def identifier(wanted: str) -> str:
    """``wanted`` as an identifier that emitted code may bind."""
    letters = unicodedata.normalize("NFKC", wanted)
    base = "".join(c if f"a{c}".isidentifier() else "_" for c in letters).strip("_") or "x"
    if not base.isidentifier():
        base = unicodedata.normalize("NFKC", f"x{base}")
    return f"{base}_" if base in TAKEN else base

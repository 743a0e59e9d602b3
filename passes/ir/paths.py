"""Module paths: the repeated block that a name belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from autoshard.passes.ir.names import NUMBER

_INDEXED = re.compile(rf"^(?:.*?\.)??{NUMBER}(?=\.|\Z)", re.DOTALL)


@lru_cache(maxsize=1 << 16)
def block_path(fqn: str) -> str:
    """The outermost numbered module: ``model.layers.3`` of ``model.layers.3.mlp``; "" if none."""
    found = _INDEXED.match(fqn)
    return found.group() if found else ""


def holders(names: Iterable[str]) -> list[str]:
    """Paths of all enclosing modules: ``layers`` and ``layers.3`` of ``layers.3.mlp``."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        found |= dict.fromkeys(".".join(parts[:n]) for n in range(1, len(parts)))
    return list(found)

"""Paths of modules: which repeated module a name belongs to."""

from __future__ import annotations

import re

_INDEXED = re.compile(r"^(?:.*?\.)??\d+(?=\.|$)")


def block_path(fqn: str) -> str:
    """The outermost numbered module of ``fqn``: ``model.layers.3`` of ``model.layers.3.mlp``; "" if there is none."""
    found = _INDEXED.match(fqn)
    return found.group() if found else ""

"""Argument positions (roles) of tensors passed to a shared region.

A decoder layer gets the KV caches of all layers. Its own entry has the same role in every layer;
entries of other layers count as outside tensors when it reads them.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.utils._pytree as pytree

from autoshard.passes.ir.names import is_number

FEWEST = 3
"""shortest list with one entry per module; pairs (cosines and sines) belong to all modules"""

OWN = "own"


def roles(path: str, arguments: Any) -> dict[Any, torch.Tensor]:
    """Position → tensor in ``arguments`` of the module at ``path``, its own entries only."""
    try:
        found = [(tuple(map(_entry, keys)), x) for keys, x in pytree.tree_flatten_with_path(arguments)[0]]
    except ValueError:  # a pytree class without key paths
        found = [((i,), x) for i, x in enumerate(pytree.tree_leaves(arguments))]
    tensors = [(where, x) for where, x in found if isinstance(x, torch.Tensor)]
    number = next((int(name) for name in reversed(path.split(".")) if is_number(name)), -1)
    counted: defaultdict[Any, set[int]] = defaultdict(set)
    for where, _ in tensors:
        for depth in range(2, len(where)):
            if isinstance(where[depth], int):
                counted[where[:depth]].add(where[depth])
    lists = {where for where, entries in counted.items() if len(entries) >= FEWEST and number in entries}
    named: dict[Any, torch.Tensor] = {}
    for where, x in tensors:
        entries = {depth: where[depth] for depth in range(2, len(where)) if where[:depth] in lists}
        if all(i == number for i in entries.values()):
            named[tuple(OWN if depth in entries else key for depth, key in enumerate(where))] = x
    return named


def _entry(key: Any) -> Any:
    """A pytree key as a plain list index, dict key or attribute name."""
    return next((getattr(key, name) for name in ("idx", "key", "name") if hasattr(key, name)), str(key))

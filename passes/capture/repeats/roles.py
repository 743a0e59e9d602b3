"""Where tensors stand in the arguments of a module that has equals: of a list with an entry for each of them, its own alone.

Every layer of a decoder is called with the caches of all. Its own have the same role in all layers; those of others are
named where the layer reads them, as whatever else lies outside of it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.utils._pytree as pytree

from autoshard.passes.ir.names import is_number

FEWEST = 3
"""entries of a list that may be one for each module: pairs, such as cosines and sines, are arguments of all"""

OWN = "own"


def roles(path: str, arguments: Any) -> dict[Any, torch.Tensor]:
    """The tensors in the ``arguments`` (args, kwargs) of the module at ``path`` by where they stand, but those of others."""
    try:
        found = [(tuple(map(_entry, keys)), x) for keys, x in pytree.tree_flatten_with_path(arguments)[0]]
    except ValueError:  # of a class that does not say how its parts are called
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
    """A key of a path as it is: a number in a list, a name in a dict or of an attribute."""
    return next((getattr(key, name) for name in ("idx", "key", "name") if hasattr(key, name)), str(key))

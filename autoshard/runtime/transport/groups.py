"""Process groups, and what else the modules of this process share under torch.distributed.

A group costs sockets and threads (gloo has three for each), so modules on the same ranks use the same ones. Groups of one
purpose are shared alone: what runs beside compute does not stand behind what is waited for. That every rank begins the
same collectives on a group in the same order holds over modules as it does within one: ranks call the same modules in the same
order, one at a time, and none any longer once a collective was given up.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

_world: Any = None
"""the default group that what was made belongs to"""
_made: dict[Hashable, Any] = {}


_caches: list[Any] = []
"""functools' caches of what has process groups"""


def forgotten(cached: T) -> T:
    """A decorator for a function that caches: what it made has process groups, and ends with them."""
    _caches.append(cached)
    return cached


def once(key: Hashable, make: Callable[[], T]) -> T:
    """What ``make()`` gave for ``key`` first, since torch.distributed was initialised."""
    global _world
    if _world is not dist.group.WORLD:
        for cached in (_made.clear, *(c.cache_clear for c in _caches)):
            cached()
        _world = dist.group.WORLD
    if key not in _made:
        _made[key] = make()
    found: T = _made[key]
    return found


def group_of(ranks: Sequence[int], purpose: str, backend: str | None = None) -> Any:
    """The process group of these global ``ranks``, sorted, for a purpose. Its members ask for the first time together.

    ``backend``: default, that of torch.distributed.
    """
    ranks = sorted(ranks)

    def make() -> Any:
        return dist.new_group(ranks, backend=backend, use_local_synchronization=True)

    return once((purpose, backend, *ranks), make)


def mesh_of(kind: str, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """The DeviceMesh of global ``ranks`` in this shape. All ranks ask for the first time together."""
    key = "mesh", kind, names, tuple(ranks.shape), *ranks.flatten().tolist()
    return once(key, lambda: DeviceMesh(kind, ranks, mesh_dim_names=names))

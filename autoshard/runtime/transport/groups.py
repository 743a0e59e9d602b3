"""Process groups, and other objects that modules of this process share: a group costs sockets and
threads. It has one purpose, so that what overlaps with compute never queues behind what is
waited for. All ranks begin a group's collectives in the same order, over modules, too: they call
the same modules, one at a time, and none after a collective was given up."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Cached = TypeVar("Cached")

_world: Any = None
"""the default process group to which the shared objects belong"""
_shared_objects: dict[Hashable, Any] = {}


_caches: list[Any] = []
"""functools caches of objects with process groups"""


def cleared_with_groups(cached: Cached) -> Cached:
    """Decorator of a cached function whose results have process groups: cleared with them."""
    _caches.append(cached)
    return cached


def once_per_initialisation(key: Hashable, make: Callable[[], Cached]) -> Cached:
    """The result of the first ``make()`` for ``key`` since torch.distributed was initialised."""
    global _world
    if _world is not dist.group.WORLD:
        for cached in (_shared_objects.clear, *(c.cache_clear for c in _caches)):
            cached()
        _world = dist.group.WORLD
    if key not in _shared_objects:
        _shared_objects[key] = make()
    return _shared_objects[key]


def group_of(ranks: Sequence[int], purpose: str, backend: str | None = None) -> Any:
    """The process group of sorted global ``ranks`` for a purpose; members first ask together.
    ``backend``: default, torch.distributed's."""
    ranks = sorted(ranks)

    def make() -> Any:
        return dist.new_group(ranks, backend=backend, use_local_synchronization=True)

    return once_per_initialisation((purpose, backend, *ranks), make)


def mesh_of(kind: str, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """The DeviceMesh of global ``ranks`` in this shape. All ranks first ask together."""
    key = "mesh", kind, names, tuple(ranks.shape), *ranks.flatten().tolist()
    return once_per_initialisation(key, lambda: DeviceMesh(kind, ranks, mesh_dim_names=names))

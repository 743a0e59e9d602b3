"""``functools.lru_cache`` on model functions: entries from a trace have no data and are cleared."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from autoshard.passes.capture.observer import Observer, patched

_CACHE = functools._lru_cache_wrapper
_NOT_THE_MODELS = ("torch", "sympy", "functools", "autoshard", "numpy")


class Caches(Observer):
    """Clears every cache that grew during a trace, except those of libraries."""

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        there = [(x, x.cache_info().misses) for x in _ALL.found() if _is_users(x)]
        making = _Making()
        try:
            with patched(((functools, "_lru_cache_wrapper", making),)):
                yield
        finally:
            for cache, misses in (*there, *((x, 0) for x in making.made if _is_users(x))):
                if cache.cache_info().misses != misses:
                    cache.cache_clear()


class _All:
    """All existing caches. A search goes through all objects: 0.1 s in a large program.

    Every cache references its type: an unchanged reference count of the type means no new caches.
    """

    def __init__(self) -> None:
        self.known: WeakSet[Any] = WeakSet()
        self.others = -1
        """references to the type other than those of known caches"""

    def found(self) -> list[Any]:
        known = list(self.known)
        if sys.getrefcount(_CACHE) - len(known) != self.others:
            known = [x for x in gc.get_referrers(_CACHE) if type(x) is _CACHE]
            self.known = WeakSet(known)
            self.others = sys.getrefcount(_CACHE) - len(known)
        return known


_ALL = _All()


class _Making:
    """Replaces the type of caches, and records new ones."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def __call__(self, *args: Any) -> Any:
        self.made.append(_CACHE(*args))
        return self.made[-1]

    def __getitem__(self, item: Any) -> Any:
        return _CACHE[item]

    def __instancecheck__(self, x: object) -> bool:
        return isinstance(x, _CACHE)


def _is_users(cache: Any) -> bool:
    return (getattr(cache, "__module__", "") or "").partition(".")[0] not in _NOT_THE_MODELS

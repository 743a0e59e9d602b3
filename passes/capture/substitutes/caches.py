"""``functools.lru_cache`` around functions of the model: what a trace leaves there has no data, and eager would get it."""

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
    """After a trace every cache that took in something is empty; those of torch itself are left alone."""

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
    """The caches that there are. To look for them is to go through all objects, a tenth of a second in a large program.

    Every instance holds a reference to its type. So where the type has as many as it had, there are no new ones.
    """

    def __init__(self) -> None:
        self.known: WeakSet[Any] = WeakSet()
        self.others = -1
        """references to the type that are not of the known ones"""

    def found(self) -> list[Any]:
        known = list(self.known)
        if sys.getrefcount(_CACHE) - len(known) != self.others:
            known = [x for x in gc.get_referrers(_CACHE) if type(x) is _CACHE]
            self.known = WeakSet(known)
            self.others = sys.getrefcount(_CACHE) - len(known)
        return known


_ALL = _All()


class _Making:
    """Stands for the type of caches, and notes those that it makes."""

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

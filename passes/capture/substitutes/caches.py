"""``functools.lru_cache`` around functions of the model: what a trace leaves there has no data, and eager would get it."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Any

from autoshard.passes.capture.observer import Observer

_NOT_THE_MODELS = ("torch", "sympy", "functools", "autoshard", "numpy")


class Caches(Observer):
    """After a trace every cache that took in something is empty; those of torch itself are left alone."""

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        before = {id(cache): cache.cache_info().misses for cache in _caches()}
        try:
            yield
        finally:
            for cache in _caches():
                if cache.cache_info().misses > before.get(id(cache), 0):
                    cache.cache_clear()


def _caches() -> list[Any]:
    kind = functools._lru_cache_wrapper
    found = [
        x for x in gc.get_referrers(kind) if type(x) is kind
    ]  # every object refers to its type; no list of all objects
    return [x for x in found if (getattr(x, "__module__", "") or "").partition(".")[0] not in _NOT_THE_MODELS]

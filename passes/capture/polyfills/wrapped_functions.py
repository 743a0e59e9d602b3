"""Wrapped functions. TorchScript runs unoptimised, as its optimiser uses a backward of its own.
Every ``lru_cache`` is emptied after a trace, whose entries have no data."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakSet

from torch.jit import ScriptFunction

from autoshard.passes.capture.observer import Observer, Patch, patched
from autoshard.torch_private.capture import cached_script, create_function_from_graph, optimized_execution


class ScriptFunctions(Observer):
    """Runs TorchScript functions unoptimised."""

    def patches(self) -> Iterable[Patch]:
        yield ScriptFunction, "__call__", _call_unoptimized


def _call_unoptimized(function: Any, *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)`` of a ``torch.jit.ScriptFunction``, unoptimised."""
    written = getattr(function, "_torchdynamo_inline", None)
    if written is not None and cached_script(written) is not None:
        return written(*args, **kwargs)
    recorded = create_function_from_graph("recorded", function.inlined_graph)  # by torch.jit.trace
    with optimized_execution(False):
        return _original_script_call(recorded, *args, **kwargs)


_original_script_call = ScriptFunction.__call__


_LRU_CACHE_TYPE = functools._lru_cache_wrapper
_LIBRARY_PACKAGES = ("torch", "sympy", "functools", "autoshard", "numpy")


class LruCaches(Observer):
    """Clears every cache that grew during a trace, except those of libraries."""

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        there = [(x, x.cache_info().misses) for x in _LRU_CACHES.found() if _is_model_cache(x)]
        making = _RecordingCacheType()
        try:
            with patched(((functools, "_lru_cache_wrapper", making),)):
                yield
        finally:
            for cache, misses in (*there, *((x, 0) for x in making.made if _is_model_cache(x))):
                if cache.cache_info().misses != misses:
                    cache.cache_clear()


class _LruCacheRegistry:
    """All existing caches. A search goes through all objects (0.1 s in a large program), so it is
    repeated only when the reference count of the caches' type has changed."""

    def __init__(self) -> None:
        self.known: WeakSet[Any] = WeakSet()
        self.others = -1
        """references to the type other than those of known caches"""

    def found(self) -> list[Any]:
        known = list(self.known)
        if sys.getrefcount(_LRU_CACHE_TYPE) - len(known) != self.others:
            known = [x for x in gc.get_referrers(_LRU_CACHE_TYPE) if type(x) is _LRU_CACHE_TYPE]
            self.known = WeakSet(known)
            self.others = sys.getrefcount(_LRU_CACHE_TYPE) - len(known)
        return known


_LRU_CACHES = _LruCacheRegistry()


class _RecordingCacheType:
    """Replaces the type of caches, and records new ones."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def __call__(self, *args: Any) -> Any:
        self.made.append(_LRU_CACHE_TYPE(*args))
        return self.made[-1]

    def __getitem__(self, item: Any) -> Any:
        return _LRU_CACHE_TYPE[item]

    def __instancecheck__(self, x: object) -> bool:
        return isinstance(x, _LRU_CACHE_TYPE)


def _is_model_cache(cache: Any) -> bool:
    return (getattr(cache, "__module__", "") or "").partition(".")[0] not in _LIBRARY_PACKAGES

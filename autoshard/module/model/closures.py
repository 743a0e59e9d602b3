"""Deep copies of functions, closures and weak references that hold a model's modules and tensors.
``copy.deepcopy`` keeps them: a lambda over ``self`` in a copy would run the original."""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Collection, Iterator, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from autoshard.passes.capture.exported.plain_objects import plain_objects
from autoshard.passes.capture.exported.snapshots import (
    MODULE_REGISTRIES,
    reachable_objects,
)
from autoshard.passes.capture.observer import patched

Memo = dict[int, Any]


@contextlib.contextmanager
def deepcopy_functions(own: Collection[int]) -> Iterator[None]:
    """Inside, ``copy.deepcopy`` also copies functions and weakrefs that reach ids in ``own``."""

    def function(x: FunctionType, memo: Memo) -> FunctionType:
        if not _reaches_any(x, own):
            return x
        cells = tuple(CellType() for _ in x.__closure__ or ())
        made = memo[id(x)] = FunctionType(x.__code__, x.__globals__, x.__name__, None, cells or None)
        for new, old in zip(cells, x.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                new.cell_contents = part(old.cell_contents, memo)
        made.__defaults__, made.__kwdefaults__ = part(x.__defaults__, memo), part(x.__kwdefaults__, memo)
        made.__dict__.update({name: part(value, memo) for name, value in vars(x).items()})
        return made

    def part(x: Any, memo: Memo) -> Any:
        return copy.deepcopy(x, memo) if _reaches_any(x, own) else x

    def bound(x: MethodType, memo: Memo) -> MethodType:
        return MethodType(part(x.__func__, memo), copy.deepcopy(x.__self__, memo))

    def reference(x: Any, memo: Memo) -> Any:
        target = x()
        return weakref.ref(copy.deepcopy(target, memo)) if id(target) in own else x

    def method(x: Any, memo: Memo) -> Any:
        target = x()
        return x if target is None else weakref.WeakMethod(copy.deepcopy(target, memo))

    def collection(x: Any, memo: Memo) -> Any:
        items = x.items() if hasattr(x, "items") else x
        return type(x)([copy.deepcopy(item, memo) for item in items])

    def cache(x: Any, memo: Memo) -> Any:
        again = part(x.__wrapped__, memo)
        return x if again is x.__wrapped__ else functools.lru_cache(**x.cache_parameters())(again)

    kinds: dict[Any, Any] = {
        FunctionType: function,
        MethodType: bound,
        weakref.ref: reference,
        weakref.WeakMethod: method,
        **dict.fromkeys((weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary), collection),
        type(functools.lru_cache(print)): cache,
    }
    table = {**copy._deepcopy_dispatch, **kinds}  # type: ignore[attr-defined]
    patches = [(copy, "_deepcopy_dispatch", table)]
    if atomic := getattr(copy, "_atomic_types", None):  # Python 3.14 asks it before the table
        patches.append((copy, "_atomic_types", atomic - kinds.keys()))
    with patched(patches):
        yield


def deepcopy_without_tensors() -> contextlib.AbstractContextManager[None]:
    """Inside, ``copy.deepcopy`` returns tensors themselves unless its memo has them."""
    return patched((kind, "__deepcopy__", lambda x, memo: x) for kind in (torch.Tensor, nn.Parameter))


def ids_in_model(model: nn.Module) -> set[int]:
    return {id(x) for x in (*model.modules(), *model.parameters(), *model.buffers())}


def plain_memo(model: nn.Module) -> Memo:
    """A memo by which deep copies of ``model`` share plain objects without tensors or modules."""

    def holds(roots: Collection[Any]) -> bool:
        return any(isinstance(y, torch.Tensor | nn.Module) for y in reachable_objects(roots, ()))

    objects = plain_objects(model.modules())
    some = holds(objects)
    return {id(x): x for x in objects if not (some and holds([x]))}


def copy_with_memo(x: Any, memo: Mapping[int, Any]) -> Any:
    """``x`` with the objects of ``memo`` (by id) replaced; ``x`` itself if it holds none."""
    foreign: dict[int, nn.Module] = {}
    if not _reaches_any(x, memo.keys(), foreign):
        return x
    with deepcopy_functions(memo.keys()), deepcopy_without_tensors():
        return copy.deepcopy(x, {**foreign, **memo})


def held_in_attributes(model: nn.Module, own: Collection[int]) -> set[int]:
    """Those of the ids ``own`` that plain attributes of the model's modules reach: lists,
    optimizers, closures; not an RNN's lists of its weights, which its forward renews."""
    each = [(n, x) for m in model.modules() if not isinstance(m, nn.RNNBase) for n, x in vars(m).items()]
    return {id(x) for x in reachable_objects([x for n, x in each if n not in MODULE_REGISTRIES], own) if id(x) in own}


def _reaches_any(x: Any, own: Collection[int], foreign: dict[int, nn.Module] | None = None) -> bool:
    """Whether ``x`` is or holds an object of ``own`` (ids). ``foreign`` collects other modules."""
    found = False
    for y in reachable_objects([x], own):
        found = found or id(y) in own
        if found and foreign is None:
            return True
        if foreign is not None and isinstance(y, nn.Module):
            foreign[id(y)] = y
    return found

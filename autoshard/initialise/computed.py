"""Buffers that no checkpoint holds, as tables of rotary embeddings and masks: their values for a model on the meta device.

A module that can compute its own again says so by a method without arguments, or its model does by ``_init_weights``
(Hugging Face's convention). It is called on a copy, twice: what both calls leave alike, whatever the buffer and the
random generator were before, is the value.
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

METHODS = ("reset_buffers", "reset_parameters", "rope_init", "init_weights")
"""of modules that compute their buffers, in the order in which they are tried"""


def recomputed(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """The values (on the CPU) of those buffers among ``names`` that ``model``'s own code can compute; it is not changed."""
    by_module: dict[str, list[str]] = {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        by_module.setdefault(path, []).append(leaf)
    found: dict[str, Tensor] = {}
    for path, leaves in by_module.items():
        prefix = f"{path}." if path else ""
        for fill in _ways(model, path):
            left = [leaf for leaf in leaves if prefix + leaf not in found]
            found |= {prefix + leaf: x for leaf, x in _computed(model.get_submodule(path), left, fill).items()}
    return found


def _ways(model: nn.Module, path: str) -> Iterator[Callable[[Any], Any]]:
    """What may fill the buffers of a copy of the module at ``path``: its methods, and those of the models around it."""
    module = model.get_submodule(path)
    for method in METHODS:
        if callable(getattr(module, method, None)):
            yield operator.methodcaller(method)
    parts = path.split(".") if path else []
    for length in range(len(parts), -1, -1):
        owner = model.get_submodule(".".join(parts[:length]))
        if callable(getattr(owner, "_init_weights", None)):
            yield cast(Callable[[Any], Any], owner._init_weights)


def _computed(module: nn.Module, leaves: list[str], fill: Callable[[Any], Any]) -> dict[str, Tensor]:
    """The buffers ``leaves`` as ``fill`` leaves them, where it computes them."""
    first, second = (_filled(module, leaves, fill, value) for value in (0, 1))
    same = [n for n in leaves if n in first and n in second and torch.equal(first[n], second[n])]
    return {n: first[n] for n in same}


def _filled(module: nn.Module, leaves: list[str], fill: Callable[[Any], Any], before: int) -> dict[str, Tensor]:
    """The buffers ``leaves`` that have values after ``fill``, in their dtypes; ``before``: what they are filled with."""
    found: dict[str, Tensor] = {}
    with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        torch.manual_seed(before)
        twin = copy.deepcopy(module)
        own = {leaf: module._buffers[leaf] for leaf in leaves}
        for leaf, b in own.items():
            twin._buffers[leaf] = None if b is None else torch.full(b.shape, before, dtype=b.dtype, device="cpu")
        fill(twin)
        for leaf, b in own.items():
            new = twin._buffers.get(leaf)
            if b is not None and new is not None and new.shape == b.shape and not new.is_meta:
                found[leaf] = new.to(b.dtype)
    return found

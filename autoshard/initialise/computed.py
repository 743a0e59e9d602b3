"""Non-persistent buffers of models on the meta device, such as rotary embedding tables and masks.

A module recomputes its buffers by a method without arguments, or its model does by Hugging Face's
``_init_weights``. The method runs twice on copies with different buffer contents and seeds; a
buffer that both runs leave equal is taken as its value.
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
"""methods of modules that fill their buffers, in the order of trying"""


def recomputed(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """CPU values of the buffers ``names`` that the model's code can compute, on copies."""
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
    """Functions that may fill a module's buffers: its methods, and ancestors' _init_weights."""
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
    """The buffers among ``leaves`` that ``fill`` sets to the same values in both runs."""
    first, second = (_filled(module, leaves, fill, value) for value in (0, 1))
    same = [n for n in leaves if n in first and n in second and torch.equal(first[n], second[n])]
    return {n: first[n] for n in same}


def _filled(module: nn.Module, leaves: list[str], fill: Callable[[Any], Any], before: int) -> dict[str, Tensor]:
    """Buffers ``leaves`` of a copy after ``fill``, dtypes kept; ``before``: content and seed."""
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

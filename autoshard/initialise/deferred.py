"""Deferred initialisation: shards bit for bit as on one device, one full tensor at a time.

    model = deferred_init(Llama, config)                    # a model on the meta device
    shards = materialise(model, seed=0, keep=shard)         # {name: shard(name, full tensor)}

equals ``torch.manual_seed(0); Llama(config)`` followed by sharding. The constructor runs once, on
fake tensors, and operations are recorded. The replay draws random numbers in the original order.
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from autoshard.errors import InitialiseError
from autoshard.initialise.recording import Area, Recording, record_module
from autoshard.torch_private.dispatch import storage_id

Keep = Callable[[str, Tensor], Tensor]
InitialisedModule = TypeVar("InitialisedModule", bound=nn.Module)

_RECORDING_ATTRIBUTE = "_autoshard_recording"


def deferred_init(fn: Callable[..., InitialisedModule], *args: Any, **kwargs: Any) -> InitialisedModule:
    """Call ``fn`` (a module class, or a function that returns a module) without memory for tensors.

    Returns the module on the meta device with the recording attached. ``fn`` may read values of
    tensors that no random number went into. Raises :class:`InitialiseError`, with op,
    parameter and the user's file:line. Causes are reads of random values, own generators, tensors
    on other devices, writes to tensors from outside ``fn``, and lazy parameters.
    """
    model, recording = record_module(fn, *args, **kwargs)
    object.__setattr__(model, _RECORDING_ATTRIBUTE, recording)
    return model


def recording_of(model: nn.Module) -> Recording | None:
    """The recording that :func:`deferred_init` attached, or None."""
    return model.__dict__.get(_RECORDING_ATTRIBUTE)


def materialise(model: nn.Module, seed: int, keep: Keep | None = None) -> dict[str, Tensor]:
    """Initial values by name of all parameters and buffers of a model from :func:`deferred_init`.

    Bit for bit those of ``torch.manual_seed(seed); fn(...)`` on the CPU, and the default generator
    ends in the same state. Uninitialised memory is zero. ``keep(name, full)`` returns the part to
    keep, such as a rank's shard (default: ``full``). The full tensor is freed before the next one,
    even if ``keep`` returned a view. A tied tensor is computed and kept once and returned under
    each of its names. Other tensors of modules go by their attribute path.

    Raises :class:`InitialiseError` if the model has no recording or was changed since.
    """
    recording = recording_of(model)
    if recording is None:
        raise InitialiseError(f"{type(model).__name__} has no recording. Make it with autoshard.deferred_init(...)")
    by_storage: dict[int, list[str]] = {}
    for name, (meta, area) in recording.tensors.items():
        _check_unchanged(model, name, meta, area)
        by_storage.setdefault(area.storage, []).append(name)
    torch.manual_seed(seed)
    values: dict[str, Tensor] = {}
    for storage, real in recording.replay(by_storage):
        kept: dict[Area, Tensor] = {}
        for name in by_storage[storage]:
            area = recording.tensors[name][1]
            if area not in kept:
                kept[area] = _kept_part(name, recording.tensor(area, real), keep)
            values[name] = kept[area]
        del real
    return {name: values[name] for name in recording.tensors}


def _kept_part(name: str, full: Tensor, keep: Keep | None) -> Tensor:
    """``keep(name, full)``, cloned if it is a view that would hold the full tensor's memory."""
    if keep is None:
        return full
    with torch.no_grad():
        part = keep(name, full)
        whole = part.untyped_storage()
        view = whole._cdata == storage_id(full) and whole.nbytes() > part.numel() * part.element_size()
        return part.clone() if view else part


def _check_unchanged(model: nn.Module, name: str, meta: Tensor, area: Area) -> None:
    found: Any = model
    for part in name.split("."):
        if isinstance(found, dict):
            found = next((v for k, v in found.items() if str(k) == part), None)
        else:
            found = found[int(part)] if isinstance(found, list | tuple) else getattr(found, part, None)
    if found is not meta:
        raise InitialiseError(f"{name} was replaced after deferred_init. Do this inside the recorded function")
    if (meta.dtype, tuple(meta.shape)) != (area.dtype, area.size):
        then, now = f"{area.dtype} {list(area.size)}", f"{meta.dtype} {list(meta.shape)}"
        raise InitialiseError(f"{name} was {then} in deferred_init and is {now} now. Change it in that function")


INITIALISER_METHODS = ("reset_buffers", "reset_parameters", "rope_init", "init_weights")
"""methods of modules that fill their buffers, in the order of trying"""


def recomputed_buffers(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """CPU values of the buffers ``names`` that the model's code can compute, on copies."""
    by_module: dict[str, list[str]] = {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        by_module.setdefault(path, []).append(leaf)
    found: dict[str, Tensor] = {}
    for path, leaves in by_module.items():
        prefix = f"{path}." if path else ""
        for fill in _buffer_initialisers(model, path):
            left = [leaf for leaf in leaves if prefix + leaf not in found]
            found |= {
                prefix + leaf: x for leaf, x in _reproducible_buffers(model.get_submodule(path), left, fill).items()
            }
    return found


def _buffer_initialisers(model: nn.Module, path: str) -> Iterator[Callable[[Any], Any]]:
    """Functions that may fill a module's buffers: its methods, and ancestors' _init_weights."""
    module = model.get_submodule(path)
    for method in INITIALISER_METHODS:
        if callable(getattr(module, method, None)):
            yield operator.methodcaller(method)
    parts = path.split(".") if path else []
    for length in range(len(parts), -1, -1):
        owner = model.get_submodule(".".join(parts[:length]))
        if callable(getattr(owner, "_init_weights", None)):
            yield cast(Callable[[Any], Any], owner._init_weights)


def _reproducible_buffers(module: nn.Module, leaves: list[str], fill: Callable[[Any], Any]) -> dict[str, Tensor]:
    """The buffers among ``leaves`` that ``fill`` sets to the same values in both runs."""
    first, second = (_buffers_after_fill(module, leaves, fill, value) for value in (0, 1))
    same = [n for n in leaves if n in first and n in second and torch.equal(first[n], second[n])]
    return {n: first[n] for n in same}


def _buffers_after_fill(
    module: nn.Module, leaves: list[str], fill: Callable[[Any], Any], before: int
) -> dict[str, Tensor]:
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

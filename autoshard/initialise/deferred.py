"""Parameter initialisation of a sharded model, bit for bit that of one device, one full tensor at a time.

    model = deferred_init(Llama, config)                    # a model on the meta device
    shards = materialise(model, seed=0, keep=cut)           # {name: cut(name, full tensor)}

equals ``torch.manual_seed(0); Llama(config)`` followed by the cutting. The constructor runs once, on fake tensors, and
every operation is recorded; the replay draws every random number in the original order and the original sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from autoshard.errors import InitialiseError
from autoshard.initialise.recorder import record
from autoshard.initialise.recording import Area, Recording

Keep = Callable[[str, Tensor], Tensor]
M = TypeVar("M", bound=nn.Module)

_ATTRIBUTE = "_autoshard_recording"


def deferred_init(fn: Callable[..., M], *args: Any, **kwargs: Any) -> M:
    """Call ``fn`` (a module class, or a function that makes a module) without memory for its tensors.

    Returns the module with all its tensors on the meta device and the recording attached. Python may look at tensors'
    values as long as no random number went into them. Raises :class:`InitialiseError` naming the op, the parameter and
    the user's file:line for what cannot be recorded: a look at drawn values, a generator other than the default one,
    tensors on other devices, writes to tensors made outside, lazy parameters.
    """
    model, recording = record(fn, *args, **kwargs)
    object.__setattr__(model, _ATTRIBUTE, recording)
    return model


def recording_of(model: nn.Module) -> Recording | None:
    """The recording that :func:`deferred_init` attached, or None."""
    return model.__dict__.get(_ATTRIBUTE)


def materialise(model: nn.Module, seed: int, keep: Keep | None = None) -> dict[str, Tensor]:
    """The initial value of every parameter and buffer of a model from :func:`deferred_init`, by name.

    Equal bit for bit to ``torch.manual_seed(seed); fn(...)`` on the CPU; leaves the default generator as that does.
    Memory that ``fn`` leaves uninitialised is zero. ``keep(name, full)`` returns what to hold on to (a rank's shard,
    say); the full tensor is freed before the next one is computed, also where ``keep`` returned a view of it. Default:
    the full tensors. A tied tensor is computed and kept once, under its first name, and stands in the result under
    each of its names. Tensors that are neither parameters nor buffers go by their attribute path.

    Raises :class:`InitialiseError` if the model has no recording or was changed since.
    """
    recording = recording_of(model)
    if recording is None:
        raise InitialiseError(f"{type(model).__name__} has no recording; make it with autoshard.deferred_init(...)")
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
                kept[area] = _cut(name, recording.tensor(area, real), keep)
            values[name] = kept[area]
        del real
    return {name: values[name] for name in recording.tensors}


def _cut(name: str, full: Tensor, keep: Keep | None) -> Tensor:
    """What ``keep`` returns, without the rest of the full tensor's memory behind it."""
    if keep is None:
        return full
    with torch.no_grad():
        part = keep(name, full)
        whole = part.untyped_storage()
        view = whole._cdata == full.untyped_storage()._cdata and whole.nbytes() > part.numel() * part.element_size()
        return part.clone() if view else part


def _check_unchanged(model: nn.Module, name: str, meta: Tensor, area: Area) -> None:
    found: Any = model
    for part in name.split("."):
        if isinstance(found, dict):
            found = next((v for k, v in found.items() if str(k) == part), None)
        else:
            found = found[int(part)] if isinstance(found, list | tuple) else getattr(found, part, None)
    if found is not meta:
        raise InitialiseError(f"{name} was replaced after deferred_init; do that inside the function given to it")
    if (meta.dtype, tuple(meta.shape)) != (area.dtype, area.size):
        then, now = f"{area.dtype} {list(area.size)}", f"{meta.dtype} {list(meta.shape)}"
        raise InitialiseError(f"{name} was {then} in deferred_init and is {now} now; do that inside the function")

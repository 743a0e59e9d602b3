"""Tensors in plain attributes of a model: graph constants unless the forward writes them.

Written ones (caches, states) are registered as buffers, and the model is traced again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from autoshard.errors import CaptureError
from autoshard.passes.capture.exported.contents import put, taken

Held = dict[str, tuple[torch.Tensor, int]]
"""dotted name → (tensor in a plain attribute, its version counter)"""

TAKEN_AWAY = (
    "the forward takes {name} away (None, or del), which its next call would miss. Keep a flag beside it, or write into "
    "it in place."
)

LEFT = "left_behind_by_a_trace"
"""mark on a tensor without data: stands for one left by a trace, or computed of parameters"""

SMALL = 64
"""largest buffer (elements) whose values may steer the forward, such as a stride or a flag"""

VALUES = "values_now"
"""attribute of a small buffer without data: the values of the buffer that it replaces"""


class WrittenError(CaptureError):
    """The forward writes the tensors in plain attributes ``names``."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        super().__init__(f"the forward writes the tensors in plain attributes {', '.join(map(repr, self.names))}")


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Path → parameter, by nn.Module's method: ``checkpoint_wrapper``'s omits its own name."""
    return dict(nn.Module.named_parameters(model, remove_duplicate=False))


def held(model: nn.Module) -> Held:
    """The leaf tensors in plain attributes of ``model`` and its modules."""
    modules = model.named_modules()
    named = ((path, name, value) for path, module in modules for name, value in vars(module).items())
    return {
        f"{path}.{name}" if path else name: (value, value._version)
        for path, name, value in named
        if isinstance(value, torch.Tensor) and value.is_leaf and not hasattr(value, LEFT)
    }


def check_unwritten(model: nn.Module, before: Held, parameters: Collection[StorageWeakRef] = ()) -> None:
    """Raise :class:`WrittenError` if a tensor of ``before`` was written or replaced since.

    A replacement of another dtype is no state, nor is one of a tensor in memory of ``parameters``
    (torch's first ``spectral_norm``). The second-call check shows whether the next call reads it.
    """
    written = []
    for name, (tensor, version) in before.items():
        now = attribute(model, name)
        if not isinstance(now, torch.Tensor) or (now is tensor and now._version == version):
            continue
        if now is not tensor and (now.dtype != tensor.dtype or StorageWeakRef(tensor.untyped_storage()) in parameters):
            continue
        if now.shape != tensor.shape:
            raise CaptureError(
                f"the forward gives attribute {name!r} another shape: {list(now.shape)} for {list(tensor.shape)}. A program "
                "keeps a state in one size: allocate the largest and write into a part of it, or pass it as an argument."
            )
        written.append(name)
    if written:
        raise WrittenError(written)


def attribute(model: nn.Module, name: str) -> Any:
    """The attribute with this dotted name, or None."""
    path, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(path), leaf, None)


def as_buffers(model: nn.Module, names: Iterable[str]) -> None:
    """Register the tensors in these plain attributes as non-persistent buffers."""
    for name in names:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        tensor = vars(module).pop(leaf)
        module.register_buffer(leaf, tensor, persistent=False)


def apart(model: nn.Module) -> None:
    """Replace each by an alias: a trace marks tensors that are written."""
    aliases: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if (
                isinstance(value, torch.Tensor)
                and value.is_leaf
                and not value.requires_grad
                and not hasattr(value, LEFT)
            ):
                vars(module)[name] = aliases.setdefault(id(value), value.detach())


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """On exit restore the attributes of every module and the contents of their containers."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    contents = taken(value for _, attributes in before for value in attributes.values())
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)
        put(contents)


def shapes_of(module: nn.Module) -> dict[str, torch.Size]:
    """Name → shape of the module's own buffers."""
    return {name: x.shape for name, x in module._buffers.items() if x is not None}


def check_shapes(module: nn.Module, before: Mapping[str, torch.Size]) -> None:
    """Refuse a forward that removed a buffer or changed its shape, also by ``resize_``."""
    if gone := [name for name in before if module._buffers.get(name) is None]:
        raise CaptureError(TAKEN_AWAY.format(name=f"buffer {gone[0]!r} of {type(module).__name__}"))
    for name, now in shapes_of(module).items():
        if now != before.get(name, now):
            raise CaptureError(
                f"the forward gives buffer {name!r} of {type(module).__name__} another shape: {list(now)} for "
                f"{list(before[name])}. A program keeps a state in one size: allocate the largest and write into a part of "
                "it, or pass it as an argument. Where the first call alone fills it, call the model once before."
            )


def write_back(module: nn.Module, before: Mapping[str, torch.Tensor | None]) -> None:
    """Copy replaced buffers into the old ones: export sees those of the root module only."""
    for name, old in before.items():
        new = module._buffers.get(name)
        if new is old:
            continue
        if old is None or new is None or old.dtype != new.dtype:
            raise CaptureError(
                f"buffer {name!r} of {type(module).__name__} is set to another dtype, or from None, in the forward. "
                "Write to it in place, with copy_(), or, where the first call alone fills it, call the model once before."
            )
        module._buffers[name] = old
        old.copy_(new.detach())

"""The class of a sharded module: derived from the model's; torch.compile sees generated code."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any

import torch._dynamo.trace_rules
from torch import nn

from autoshard import runtime
from autoshard.module.logits import plain
from autoshard.module.model.parts import derived


def class_of(base: type[Any], kind: type[nn.Module], root: type[Any]) -> type[Any]:
    """A subclass of ``base`` and ``kind`` with the forward signature of ``kind``, or ``base``.

    ``root``: our base class. ``base`` is returned if attribute names clash.
    """
    ours = [c for c in base.__mro__ if issubclass(c, root)]
    if any(hasattr(kind, name) for c in ours for name in vars(c).get("__annotations__", ())):
        return base  # attributes of ours have another meaning there

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return base.forward(self, *args, **kwargs)

    forward.__doc__ = kind.forward.__doc__
    with contextlib.suppress(TypeError, ValueError):
        forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    names: dict[str, Any] = {"forward": forward}
    if isinstance(getattr(kind, "device", None), property):  # reads parameters, absent at first
        names["device"] = property(lambda self: self._of.tensors()[0].device)
    if isinstance(getattr(kind, "dtype", None), property):
        names["dtype"] = property(lambda self: next(t.dtype for t in self._of.tensors() if t.is_floating_point()))
    return derived(base, kind, names | _of_generation(kind) | _of_saving(kind))


def _of_saving(kind: Any) -> dict[str, Any]:
    """Hugging Face's ``save_pretrained`` with full weights, on rank 0. Collective."""
    own: Any = getattr(kind, "save_pretrained", None)
    known = inspect.signature(own).parameters if callable(own) else {}
    if "is_main_process" not in known or not any(
        n == "state_dict" or p.kind is p.VAR_KEYWORD for n, p in known.items()
    ):
        return {}

    @functools.wraps(kind.save_pretrained)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**inspect.signature(own).bind_partial(self, *args, **kwargs).arguments, **kwargs}
        if given.get("state_dict") is not None:
            return own(self, *args, **kwargs)
        kwargs["state_dict"] = self.full_state_dict()
        comm = self.__dict__.get("_comm")
        if "is_main_process" not in given and comm is not None:
            kwargs["is_main_process"] = comm.rank == 0
        made = own(self, *args, **kwargs)
        with self.meeting("save_pretrained()"):  # when it returns, the files exist for every rank
            return made

    return {"save_pretrained": save_pretrained}


def _of_generation(kind: Any) -> dict[str, Any]:
    """Methods that generation of transformers needs: ``get_encoder`` and ``generate``."""
    if not callable(getattr(kind, "get_encoder", None)) or not callable(getattr(kind, "generate", None)):
        return {}

    def get_encoder(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._renew()
        found = kind.get_encoder(self, *args, **kwargs)
        return found if found is self else self.called_alone(found)

    @functools.wraps(kind.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.compile_for_generation(args[0] if args else kwargs.get("inputs"), kwargs)
        comm = self.__dict__.get("_comm")
        if not isinstance(comm, runtime.TorchCommunicator):
            return kind.generate(self, *args, **kwargs)
        object.__setattr__(self, "_generating", True)
        try:
            with comm.notes, self.drawing_alike():  # user code between calls may fail
                return plain(kind.generate(self, *args, **kwargs))
        finally:
            object.__setattr__(self, "_generating", False)

    return {"get_encoder": get_encoder, "generate": generate}


@functools.cache
def leave_to_torch_compile() -> None:
    """Have torch.compile trace generated code only, with graph breaks at collectives."""
    for package in ("autoshard.module", "autoshard.runtime"):
        torch._dynamo.trace_rules.add(package)

"""What a sharded module looks like from outside: an instance of the model's class; to torch.compile the generated code."""

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
    """A class that is a ``base`` and a ``kind``, of whose forward it has the signature; ``base`` where that cannot be.

    ``root``: the class of ours that all of them derive from.
    """
    ours = [c for c in base.__mro__ if issubclass(c, root)]
    if any(hasattr(kind, name) for c in ours for name in vars(c).get("__annotations__", ())):
        return base  # attributes of ours mean something else to it

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return base.forward(self, *args, **kwargs)

    forward.__doc__ = kind.forward.__doc__
    with contextlib.suppress(TypeError, ValueError):
        forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    names: dict[str, Any] = {"forward": forward}
    if isinstance(getattr(kind, "device", None), property):  # it asks parameters, of which there are none before a call
        names["device"] = property(lambda self: self._of.tensors()[0].device)
    if isinstance(getattr(kind, "dtype", None), property):
        names["dtype"] = property(lambda self: next(t.dtype for t in self._of.tensors() if t.is_floating_point()))
    return derived(base, kind, names | _of_generation(kind) | _of_saving(kind))


def _of_saving(kind: Any) -> dict[str, Any]:
    """``save_pretrained`` as Hugging Face has it: the whole weights, by rank 0. All ranks call it, unless they are given."""
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
        with self.meeting("save_pretrained()"):  # it is written when it returns, on every rank
            return made

    return {"save_pretrained": save_pretrained}


def _of_generation(kind: Any) -> dict[str, Any]:
    """What generation by transformers asks beside the forward: the encoder, called alone."""
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
            with comm.notes, self.drawing_alike():  # what the caller adds may fail between calls
                return plain(kind.generate(self, *args, **kwargs))
        finally:
            object.__setattr__(self, "_generating", False)

    return {"get_encoder": get_encoder, "generate": generate}


@functools.cache
def leave_to_torch_compile() -> None:
    """Have torch.compile look at the generated code alone, and break its graphs at collectives."""
    for package in ("autoshard.module", "autoshard.runtime"):
        torch._dynamo.trace_rules.add(package)

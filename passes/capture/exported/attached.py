"""What users attach to a parameter or buffer beside its values: attributes, and a class of its own.

Optimizers group by them (``p._no_weight_decay``, ``isinstance(p, ManifoldParameter)``), and forwards read them
(``self.weight.infshape``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import new_class
from typing import Any, TypeVar

import torch
from torch import nn

from autoshard.errors import CaptureError
from autoshard.passes.capture.exported.trees import constant

Made = TypeVar("Made", bound=torch.Tensor)

OURS = frozenset(("_is_param", "_autoshard_left", "left_behind_by_a_trace", "_of", "_state", "autoshard_of"))
"""attributes of tensors that torch and autoshard set"""
_KIND = "_autoshard_kind"
"""of a class that was made here: the user's"""
_FREE = frozenset(
    "__new__ __init__ __repr__ __str__ __format__ __deepcopy__ __copy__ __reduce__ __reduce_ex__ __getstate__ __setstate__ "
    "__module__ __doc__ __dict__ __weakref__ __qualname__ __annotations__ __annotate__ __static_attributes__ "
    "__firstlineno__ __init_subclass__ __class_getitem__ __parameters__ __orig_bases__ to cpu cuda".split()
)
"""names that a class of parameters may define anew: what a program computes does not depend on them"""
_ABSENT = object()
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)

Read = tuple[tuple[str, str], Any]
"""name of a parameter or buffer and an attribute; what it was, :data:`_ABSENT` where there was none"""


def attributes_on(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes that users set on a tensor."""
    return {name: x for name, x in vars(tensor).items() if name not in OURS}


def class_of(tensor: torch.Tensor) -> type:
    """The class that eager has of a parameter or buffer: torch's, or the user's own."""
    kind = getattr(type(tensor), _KIND, type(tensor))
    if kind.__module__.partition(".")[0] not in ("torch", "autoshard"):
        return kind
    return nn.Parameter if isinstance(tensor, nn.Parameter) else torch.Tensor


def with_class(made: Made, old: torch.Tensor) -> Made:
    """``made``, which stands for ``old``, as an instance of the user's class that ``old`` is of, too."""
    kind = class_of(old)
    if kind not in (nn.Parameter, torch.Tensor) and not issubclass(type(made), kind):
        made.__class__ = kind if issubclass(kind, type(made)) else _derived(type(made), kind)  # type: ignore[arg-type]
    return made


@functools.cache
def _derived(base: type, kind: type) -> type:
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__slots__": (), _KIND: kind}
    return new_class(kind.__name__, (base, kind), {}, lambda space: space.update(own))


def check_class(what: str, tensor: torch.Tensor) -> None:
    """Refuse a parameter or buffer of a class that computes otherwise than torch's: a trace is of plain tensors."""
    for kind in type(tensor).__mro__:
        if kind.__module__.partition(".")[0] == "torch" or kind is object:
            continue
        anew = [name for name in vars(kind) if name not in _FREE and hasattr(torch.Tensor, name)]
        if anew or vars(kind).get("__slots__"):
            raise CaptureError(
                f"{what} is a {type(tensor).__name__}, whose class defines {(anew or ['__slots__'])[0]} anew: a program "
                "computes what plain parameters do. Write it as a function of the module, or convert the tensor."
            )


@dataclass(frozen=True, eq=False)
class StandsFor:
    """Of a tensor in a trace: what it stands for. ``read``: takes what the forward reads of that one's attributes."""

    name: str
    of: torch.Tensor
    traced: Mapping[int, torch.Tensor]
    """of a tensor of the model, by id, the one that stands for it"""
    read: dict[tuple[str, str], None]

    def has(self, name: str) -> bool:
        """Whether there is such an attribute."""
        return name in vars(self.of) and name not in OURS

    def attribute(self, name: str) -> Any:
        """The attribute, noted as read; raises :class:`AttributeError` where there is none."""
        self.read[self.name, name] = None
        if not self.has(name):
            raise AttributeError(f"parameter or buffer {self.name!r} has no attribute {name!r}")
        found = vars(self.of)[name]
        return self.traced.get(id(found), found)


def own_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Path → parameter or buffer."""
    parameters = nn.Module.named_parameters(model, remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}


def stand_for(
    model: nn.Module, own: Mapping[str, torch.Tensor], read: dict[tuple[str, str], None]
) -> dict[int, torch.Tensor]:
    """Let the tensors that are in ``model`` while it is traced know which of its ``own`` they stand for; by id, these."""
    now = {name: x for name, x in own_tensors(model).items() if name in own}
    traced = {id(own[name]): x for name, x in now.items()}
    for name, x in now.items():
        if x is not own[name]:
            x.autoshard_of = StandsFor(name, own[name], traced, read)  # type: ignore[attr-defined]
    return traced


def values_of(read: Iterable[tuple[str, str]], tensor: Callable[[str], torch.Tensor]) -> tuple[Read, ...]:
    """What the attributes that were ``read`` are now. ``tensor``: gives the one of a name."""
    return tuple(((name, attribute), vars(tensor(name)).get(attribute, _ABSENT)) for name, attribute in read)


def are_other(read: Iterable[Read], tensor: Callable[[str], torch.Tensor]) -> bool:
    """Whether any of these attributes was set anew, or taken away, since."""
    now = ((value, vars(tensor(name)).get(attribute, _ABSENT)) for (name, attribute), value in read)
    return any(new is not old and not (isinstance(new, _PLAIN) and constant(new) == constant(old)) for old, new in now)

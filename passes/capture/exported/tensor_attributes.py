"""User attributes on parameters and buffers, and user subclasses of them. Optimizers group by them
(``p._no_weight_decay``, ``isinstance(p, ManifoldParameter)``), forwards read them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import new_class
from typing import Any, TypeVar

from torch import Tensor, nn

from autoshard.errors import CaptureError
from autoshard.passes.capture.exported.pytrees import CONSTANT_TYPES, constant_key

TensorT = TypeVar("TensorT", bound=Tensor)

TAKEN_FROM = "_autoshard_taken_from"
"""attribute of a skeleton's tensor during a capture: the user's, which a global may hold"""
MOVED_MARK = "_autoshard_left"
"""attribute of a moved-from parameter: number of the sharded module that took it last"""
INTERNAL_ATTRIBUTES = frozenset(
    ("_is_param", MOVED_MARK, TAKEN_FROM, "left_behind_by_a_trace", "_of", "_state", "autoshard_of")
)
"""tensor attributes set by torch and autoshard"""
_USER_CLASS = "_autoshard_kind"
"""attribute of a class derived here: the user's class"""
_HARMLESS_OVERRIDES = frozenset(
    "__new__ __init__ __repr__ __str__ __format__ __deepcopy__ __copy__ __reduce__ __reduce_ex__ __getstate__ __setstate__ "
    "__module__ __doc__ __dict__ __weakref__ __qualname__ __annotations__ __annotate__ __static_attributes__ "
    "__firstlineno__ __init_subclass__ __class_getitem__ __parameters__ __orig_bases__ to cpu cuda".split()
)
"""names that a parameter class may override without effect on a program's results"""
_NO_TENSOR_ATTRIBUTE = object()

AttributeRead = tuple[tuple[str, str], Any]
"""((parameter or buffer, attribute), value read; :data:`_NO_TENSOR_ATTRIBUTE` if there was none)"""


def user_attributes(tensor: Tensor) -> dict[str, Any]:
    return {name: x for name, x in vars(tensor).items() if name not in INTERNAL_ATTRIBUTES}


def eager_tensor_class(tensor: Tensor) -> type:
    """The class of a parameter or buffer in eager: torch's, or the user's own."""
    kind = getattr(type(tensor), _USER_CLASS, type(tensor))
    if kind.__module__.partition(".")[0] not in ("torch", "autoshard"):
        return kind
    return nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor


def with_user_class(made: TensorT, old: Tensor) -> TensorT:
    """``made``, the replacement of ``old``, as an instance of the user's class of ``old``."""
    kind = eager_tensor_class(old)
    if kind not in (nn.Parameter, Tensor) and not issubclass(type(made), kind):
        made.__class__ = kind if issubclass(kind, type(made)) else _derived_class(type(made), kind)  # type: ignore[arg-type]
    return made


@functools.cache
def _derived_class(base: type, kind: type) -> type:
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__slots__": (), _USER_CLASS: kind}
    return new_class(kind.__name__, (base, kind), {}, lambda space: space.update(own))


def check_tensor_class(what: str, tensor: Tensor) -> None:
    """Refuse a parameter or buffer whose class overrides methods: traces use plain tensors."""
    for kind in type(tensor).__mro__:
        if kind.__module__.partition(".")[0] == "torch" or kind is object:
            continue
        anew = [name for name in vars(kind) if name not in _HARMLESS_OVERRIDES and hasattr(Tensor, name)]
        if anew or vars(kind).get("__slots__"):
            raise CaptureError(
                f"{what} is a {type(tensor).__name__}, whose class overrides "
                f"{(anew or ['__slots__'])[0]}, but a program computes with plain parameters. "
                "Write the override as a function of the module, or convert the tensor."
            )


@dataclass(frozen=True, eq=False)
class TraceOrigin:
    """The model's tensor behind a traced one. ``read``: attributes read by the forward."""

    name: str
    of: Tensor
    traced: Mapping[int, Tensor]
    """id of a tensor of the model → its replacement in the trace"""
    read: dict[tuple[str, str], None]

    def has(self, name: str) -> bool:
        """Whether the user set attribute ``name``."""
        return name in vars(self.of) and name not in INTERNAL_ATTRIBUTES

    def attribute(self, name: str) -> Any:
        """The attribute, recorded as read. Raises :class:`AttributeError` if there is none."""
        self.read[self.name, name] = None
        if not self.has(name):
            raise AttributeError(f"parameter or buffer {self.name!r} has no attribute {name!r}")
        found = vars(self.of)[name]
        return self.traced.get(id(found), found)


def parameters_and_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Path → parameter or buffer, tied ones under every path."""
    parameters = nn.Module.named_parameters(model, remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}


def record_origins(model: nn.Module, own: Mapping[str, Tensor], read: dict[tuple[str, str], None]) -> dict[int, Tensor]:
    """Mark tensors in the traced ``model`` by :class:`TraceOrigin`. Returns id of own → traced."""
    now = {name: x for name, x in parameters_and_buffers(model).items() if name in own}
    taken = ((vars(own[name]).get(TAKEN_FROM), x) for name, x in now.items())
    traced = {id(own[name]): x for name, x in now.items()} | {id(old): x for old, x in taken if old is not None}
    for name, x in now.items():
        if x is not own[name]:
            x.autoshard_of = TraceOrigin(name, own[name], traced, read)  # type: ignore[attr-defined]
    return traced


def attribute_values(read: Iterable[tuple[str, str]], tensor: Callable[[str], Tensor]) -> tuple[AttributeRead, ...]:
    """Current values of the attributes ``read``. ``tensor``: name → tensor."""
    return tuple(
        ((name, attribute), vars(tensor(name)).get(attribute, _NO_TENSOR_ATTRIBUTE)) for name, attribute in read
    )


def are_attributes_changed(read: Iterable[AttributeRead], tensor: Callable[[str], Tensor]) -> bool:
    """Whether any of these attributes was replaced or removed since."""
    now = ((value, vars(tensor(name)).get(attribute, _NO_TENSOR_ATTRIBUTE)) for (name, attribute), value in read)
    return any(
        new is not old and not (isinstance(new, CONSTANT_TYPES) and constant_key(new) == constant_key(old))
        for old, new in now
    )

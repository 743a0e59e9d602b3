"""Snapshots of a model's attributes: contents of containers, tensors in plain attributes. The
latter are constants of the graph unless the forward writes or replaces them (caches, states);
then the model is traced again with them as buffers."""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import CellType, FunctionType, GeneratorType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from autoshard.errors import CaptureError
from autoshard.frames import is_autoshard_file

SNAPSHOT_DEPTH = 4
"""levels of nested containers and objects in a snapshot"""

ContentsSnapshot = list[tuple[Any, Any]]
"""(container or object, its contents at the time, see :func:`items_or_attributes`), outer ones first"""

NO_ATTRIBUTE = object()
_VALUE_TYPES = frozenset({bool, int, float, complex, str, bytes, type(None)})
_STATELESS_MODULES = ("builtins", "functools", "torch")
"""packages whose callables are functions without state"""
MODULE_REGISTRIES = ("_parameters", "_buffers", "_modules")
"""dicts of a module in which a trace replaces the tensors itself"""
HOOK_FLAGS = "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"
"""dicts of a module by hook id, which differs by process"""
ITERATOR_MODULES = ("builtins", "itertools", "_collections")
"""modules of Python's own functions, generators and iterators"""


def items_or_attributes(x: Any) -> dict[Any, Any] | list[Any] | set[Any] | None:
    """A copy of a container's items or an object's attributes, by no user method; else None."""
    if type(x) is dict:  # most common
        return x.copy()
    if type(x) in _VALUE_TYPES or isinstance(x, Tensor | nn.Module | type | ModuleType):
        return None
    if isinstance(x, dict):
        return dict(OrderedDict.items(x) if isinstance(x, OrderedDict) else dict.items(x))
    kinds: Any = (list, tuple, deque, set, frozenset)
    if (kind := next((kind for kind in kinds if isinstance(x, kind)), None)) is not None:
        return (set if kind in kinds[3:] else list)(kind.__iter__(x))
    if callable(x) and type(x).__module__.partition(".")[0] in _STATELESS_MODULES:
        return None
    attributes, slots = own_attribute(x, "__dict__"), _slot_names(type(x))
    if not isinstance(attributes, dict):
        if not slots:
            return None
        attributes = {}
    return {**{name: y for name in slots if (y := own_attribute(x, name)) is not NO_ATTRIBUTE}, **attributes}


def container_length(x: Any) -> int:
    """Number of items of a container, bypassing a user's ``__len__``."""
    kind: Any = next(kind for kind in (list, dict, set, deque, tuple, frozenset) if isinstance(x, kind))
    return int(kind.__len__(x))


def value_key(x: Any) -> tuple[type, str] | None:
    """(class, repr) of a number or string, for comparison; None for anything else."""
    kind: Any = next((kind for kind in type(x).__mro__ if kind in _VALUE_TYPES), None)
    return None if kind is None else (type(x), kind.__repr__(x))


def own_attribute(x: Any, name: str) -> Any:
    """An attribute of the object itself, without ``__getattr__``, in which proxies may raise."""
    try:
        return object.__getattribute__(x, name)
    except Exception:
        return NO_ATTRIBUTE


def _slot_names(kind: type) -> tuple[str, ...]:
    """Names of attributes in ``__slots__`` of Python classes."""
    found = _SLOT_NAMES.get(kind)
    if found is None:
        slotted = [c for c in kind.__mro__ if "__slots__" in vars(c)]
        names = (name for c in slotted for name, x in vars(c).items() if isinstance(x, MemberDescriptorType))
        found = _SLOT_NAMES[kind] = tuple(names)
    return found


_SLOT_NAMES: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()
"""class → :func:`_slot_names`"""


def iterator_state(x: Any) -> Any:
    """Position of an iterator or generator, or state of a function; None for anything else."""
    if isinstance(x, FunctionType) and not is_autoshard_file(x.__code__.co_filename):
        return [*map(cell_contents, x.__closure__ or ()), x.__defaults__, x.__kwdefaults__, vars(x)]
    if isinstance(x, GeneratorType):
        frame = x.gi_frame
        return [None] if frame is None else [frame.f_lasti, x.gi_yieldfrom, *frame.f_locals.values()]
    if not isinstance(x, Iterator) or type(x).__module__ not in ITERATOR_MODULES:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of itertools, since Python 3.12
        try:
            return list(x.__reduce__())[1:]
        except TypeError:  # cannot be pickled: its position is unknown
            return None


def cell_contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def reachable_objects(roots: Iterable[Any], own: Collection[int]) -> Iterator[Any]:
    """Objects that ``roots`` are or hold, nearest first; those of ``own`` (ids) are ends."""
    seen, level = set[int](), list(roots)
    for _ in range(2 * SNAPSHOT_DEPTH):
        level = [y for y in level if not (id(y) in seen or seen.add(id(y)))]  # type: ignore[func-returns-value]
        yield from level
        level = [z for y in level if id(y) not in own for z in _contents_of(y)]


def _contents_of(x: Any) -> Iterable[Any]:
    if isinstance(x, FunctionType):
        return [*map(cell_contents, x.__closure__ or ()), x.__defaults__, x.__kwdefaults__, vars(x)]
    if isinstance(x, MethodType):
        return [x.__self__, x.__func__]
    if isinstance(x, functools.partial):
        return [x.func, x.args, x.keywords]
    if isinstance(x, weakref.ref):
        return [x()]
    if hasattr(type(x), "cache_parameters"):
        return [x.__wrapped__]
    held = items_or_attributes(x)
    return () if held is None else [*held, *held.values()] if isinstance(held, dict) else held


def take_snapshot(roots: Iterable[Any], opaque: tuple[type, ...] = ()) -> ContentsSnapshot:
    """Snapshot of all within :data:`SNAPSHOT_DEPTH` levels of ``roots``, not through ``opaque``."""
    found: dict[int, tuple[Any, Any]] = {}
    level = list(roots)
    for _ in range(SNAPSHOT_DEPTH):
        level = [x for x in level if not isinstance(x, opaque)]
        new = [(x, held) for x in level if id(x) not in found and (held := items_or_attributes(x)) is not None]
        found.update((id(x), (x, held)) for x, held in new)
        level = [y for _, held in new for y in (held.values() if isinstance(held, dict) else held)]
    return list(found.values())


def restore_snapshot(contents: ContentsSnapshot) -> None:
    """Restore a snapshot in place; unchanged holders are not touched."""
    for holder, held in contents:
        if isinstance(holder, tuple | frozenset) or (type(holder) is dict and not holder and not held):
            continue
        now = items_or_attributes(holder)
        if type(now) is type(held) and [*map(id, _keys_and_items(now))] == [*map(id, _keys_and_items(held))]:
            continue
        if isinstance(holder, list):
            list.__setitem__(holder, slice(None), held)
        elif isinstance(holder, deque):
            deque.clear(holder)
            deque.extend(holder, held)
        elif isinstance(holder, set):
            set.clear(holder)
            set.update(holder, held)
        else:
            slots = () if isinstance(holder, dict) else _slot_names(type(holder))
            for name in slots:
                if name in held:
                    object.__setattr__(holder, name, held[name])
                elif own_attribute(holder, name) is not NO_ATTRIBUTE:
                    object.__delattr__(holder, name)
            attributes: Any = holder if isinstance(holder, dict) else own_attribute(holder, "__dict__")
            if not isinstance(attributes, dict):
                continue
            kind: Any = OrderedDict if isinstance(attributes, OrderedDict) else dict
            kind.clear(attributes)
            kind.update(attributes, {name: x for name, x in held.items() if name not in slots})


def replace_in_attributes(model: nn.Module, by: Mapping[int, Any], opaque: tuple[type, ...] = ()) -> None:
    """Replace tensors and modules in attributes of the model's modules, also ids used as keys.
    ``by``: id → replacement; ``opaque``: objects to leave."""

    def now(x: Any) -> Any:
        if type(x) in (tuple, frozenset):
            made = [now(y) for y in x]
            return x if all(a is b for a, b in zip(made, x, strict=True)) else type(x)(made)
        return by.get(id(x), x)

    def key(x: Any) -> Any:
        return id(by[x]) if type(x) is int and x in by else now(x)

    each = [(vars(m), n, x) for m in model.modules() for n, x in vars(m).items() if n not in MODULE_REGISTRIES]
    for attributes, name, x in each:
        attributes[name] = now(x)
    for holder, held in take_snapshot((x for _, _, x in each), opaque):
        if isinstance(held, dict):
            restore_snapshot([(holder, {key(x): now(y) for x, y in held.items()})])
        else:
            restore_snapshot([(holder, type(held)(map(key if isinstance(held, set) else now, held)))])


def _keys_and_items(held: Any) -> Iterator[Any]:
    return (x for pair in held.items() for x in pair) if isinstance(held, dict) else iter(held)


PlainTensors = dict[str, tuple[Tensor, int]]
"""dotted name → (tensor in a plain attribute, its version counter)"""

REMOVED_STATE_MESSAGE = (
    "the forward removes {name} (None, or del), and its next call would miss it. Keep a flag "
    "instead, or write to it in place."
)

LEFT_BY_TRACE = "left_behind_by_a_trace"
"""mark on a tensor without data: stands for one left by a trace, or computed of parameters"""

MAX_GUARDED_ELEMENTS = 64
"""largest buffer (elements) whose values may steer the forward, such as a stride or a flag"""

BUFFER_VALUES = "values_now"
"""attribute of a small buffer without data: the values of the buffer that it replaces"""


class AttributeWriteError(CaptureError):
    """The forward writes the tensors in plain attributes ``names``."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        super().__init__(f"the forward writes the tensors in plain attributes {', '.join(map(repr, self.names))}")


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Path → parameter, by nn.Module's method: ``checkpoint_wrapper``'s omits its own name."""
    return dict(nn.Module.named_parameters(model, remove_duplicate=False))


def plain_tensors(model: nn.Module) -> PlainTensors:
    """The leaf tensors in plain attributes of ``model`` and its modules."""
    modules = model.named_modules()
    named = ((path, name, value) for path, module in modules for name, value in vars(module).items())
    return {
        f"{path}.{name}" if path else name: (value, value._version)
        for path, name, value in named
        if isinstance(value, Tensor) and value.is_leaf and not hasattr(value, LEFT_BY_TRACE)
    }


def check_attribute_writes(model: nn.Module, before: PlainTensors, parameters: Collection[StorageWeakRef] = ()) -> None:
    """Raise :class:`AttributeWriteError` if a tensor of ``before`` was written or replaced since. A
    replacement of another dtype, or in memory of ``parameters`` (torch's first
    ``spectral_norm``), is no state; the second-call check shows whether the next call reads
    it."""
    written = []
    for name, (tensor, version) in before.items():
        now = attribute_or_none(model, name)
        if not isinstance(now, Tensor) or (now is tensor and now._version == version):
            continue
        if now is not tensor and (now.dtype != tensor.dtype or StorageWeakRef(tensor.untyped_storage()) in parameters):
            continue
        if now.shape != tensor.shape:
            raise CaptureError(
                f"the forward changes the shape of attribute {name!r} from {list(tensor.shape)} "
                f"to {list(now.shape)}, but a program keeps the size of a state. Allocate the "
                "largest size and write to a part of it, or pass it as an argument."
            )
        written.append(name)
    if written:
        raise AttributeWriteError(written)


def attribute_or_none(model: nn.Module, name: str) -> Any:
    path, _, leaf = name.rpartition(".")
    try:
        return getattr(model.get_submodule(path), leaf, None)
    except AttributeError:  # the forward has removed the module
        return None


def register_as_buffers(model: nn.Module, names: Iterable[str]) -> None:
    """Register the tensors in these plain attributes as non-persistent buffers."""
    for name in names:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        tensor = vars(module).pop(leaf)
        module.register_buffer(leaf, tensor, persistent=False)


def alias_plain_tensors(model: nn.Module) -> None:
    """Replace each by an alias: a trace marks tensors that are written."""
    aliases: dict[int, Tensor] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if (
                isinstance(value, Tensor)
                and value.is_leaf
                and not value.requires_grad
                and not hasattr(value, LEFT_BY_TRACE)
            ):
                vars(module)[name] = aliases.setdefault(id(value), value.detach())


@contextlib.contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """On exit restore the attributes of every module and the contents of their containers."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    contents = take_snapshot(value for _, attributes in before for value in attributes.values())
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)
        restore_snapshot(contents)


def buffer_shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: x.shape for name, x in module._buffers.items() if x is not None}


def check_buffer_shapes(module: nn.Module, before: Mapping[str, torch.Size]) -> None:
    """Refuse a forward that removed a buffer or changed its shape, also by ``resize_``."""
    if gone := [name for name in before if module._buffers.get(name) is None]:
        raise CaptureError(REMOVED_STATE_MESSAGE.format(name=f"buffer {gone[0]!r} of {type(module).__name__}"))
    for name, now in buffer_shapes(module).items():
        if now != before.get(name, now):
            raise CaptureError(
                f"the forward changes the shape of buffer {name!r} of {type(module).__name__} "
                f"from {list(before[name])} to {list(now)}, but a program keeps the size of a "
                "state. Allocate the largest size and write to a part of it, or pass it as an "
                "argument. If only the first call fills it, call the model once before compiling."
            )


def write_buffers_in_place(module: nn.Module, before: Mapping[str, Tensor | None]) -> None:
    """Copy replaced buffers into the old ones: export sees those of the root module only."""
    for name, old in before.items():
        new = module._buffers.get(name)
        if new is old:
            continue
        if old is None or new is None or old.dtype != new.dtype:
            raise CaptureError(
                f"the forward sets buffer {name!r} of {type(module).__name__} to another dtype, or from None. Write "
                "to it in place with copy_(). If only the first call fills it, call the model once before compiling."
            )
        module._buffers[name] = old
        old.copy_(new.detach())

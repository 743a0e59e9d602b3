"""The modules of the model as seen on a sharded module: classes, modes, parameters, buffers."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import new_class
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from autoshard import runtime
from autoshard.errors import AutoshardError, CaptureError, PlanError
from autoshard.module.dtensors.module_dtensor import shard_full
from autoshard.module.dtensors.outputs import ShardedOutput
from autoshard.module.logits import gather_logits
from autoshard.module.model.hooks import refuse_change, set_later, share_hooks
from autoshard.passes.capture.exported.plain_objects import SET_LATER
from autoshard.passes.capture.exported.pytrees import CONSTANT_TYPES, constant_key
from autoshard.passes.capture.exported.snapshots import NO_ATTRIBUTE, items_or_attributes
from autoshard.torch_private.capture import skip_package
from autoshard.torch_private.dtensor import CHECKPOINT_PREFIX, ActivationWrapper

DerivedT = TypeVar("DerivedT")
_INTERNAL = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
_WEIGHT_HOLDERS = (Tensor, nn.Module, RemovableHandle, tuple, list, dict, set)


class FixedChildren(dict[str, "nn.Module | None"]):
    """Child modules, which programs have fixed. ``new``: others may be added."""

    def __init__(self, entries: Iterable[tuple[str, nn.Module | None]] = (), new: bool = False) -> None:
        super().__init__(entries)
        self.new = new

    def __setitem__(self, name: str, module: nn.Module | None) -> None:
        if name in self or not self.new:
            refuse_change(f"module {name!r} is put into the sharded module")
        super().__setitem__(name, module)

    def __delitem__(self, name: str) -> None:
        refuse_change(f"module {name!r} is taken out of the sharded module")

    def _change(self, *args: Any, **kwargs: Any) -> NoReturn:
        refuse_change("modules are put into or taken out of the sharded module")

    pop = popitem = clear = update = setdefault = _change

    def __reduce__(self) -> Any:
        return type(self), (list(self.items()), self.new)


class FixedModule(nn.Module):
    """A module whose modules are fixed; tensors, modes and plain attributes may change."""

    _original: type[nn.Module]
    _known: frozenset[str]

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if name in _INTERNAL or "_known" not in own:
            super().__setattr__(name, value)
            return
        tensors = next((d for d in (own["_parameters"], own["_buffers"]) if name in d), None)
        if tensors is not None:
            if (tensors[name] is None) != (value is None):
                refuse_change(f"{name!r} of a {self._original.__name__} is {'removed' if value is None else 'added'}")
            if tensors is own["_buffers"] and isinstance(tensors[name], DTensor):
                value = shard_like(value, tensors[name])
        elif not (isinstance(value, nn.Module) or _are_handles(value)) and (
            name in self._known or _mentions(self._original, name)
        ):
            if is_unchanged_value(getattr(self, name, ...), value):
                return
            removed = name in own.get("_held", ()) and isinstance(value, Tensor)  # a parameter, as pruning does
            if not removed and not inspect.isdatadescriptor(
                of_class := inspect.getattr_static(self._original, name, None)
            ):
                if callable(of_class) or not is_followed(value):
                    refuse_change(f"attribute {name!r} of a {self._original.__name__} is set")
                set_later(own["_original_model"].root if "_original_model" in own else self, name, value)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """As the model's own; the error for an attribute that is not kept says why."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name not in self.__dict__.get("_known", ()):
                raise
            raise AttributeError(
                f"attribute {name!r} of a {self._original.__name__} is not kept in a sharded module, because it holds "
                "modules, tensors or functions, or the forward sets it. Use it on the model, and compile it again."
            ) from error

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """As torch's; a DTensor parameter or buffer takes its shard of a full tensor."""
        own: dict[str, Any] = {prefix + name: p for name, p in (*self._parameters.items(), *self._buffers.items())}
        parts = {n: shard_like(state_dict[n], p) for n, p in own.items() if isinstance(p, DTensor) and n in state_dict}
        state_dict.update(parts)  # in place: ActivationWrapper renames entries of this dict
        nn.Module._load_from_state_dict(self, state_dict, prefix, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = memo[id(self)] = object.__new__(type(self))
        made.__dict__.update((name, copy.deepcopy(value, memo)) for name, value in self.__dict__.items())
        return made

    def __copy__(self) -> NoReturn:
        raise AutoshardError(
            "copy.copy of a sharded module would share its tensors and programs. Use "
            "copy.deepcopy(sharded), which has its own tensors."
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise AutoshardError(
            "a sharded module cannot be pickled: its programs belong to the mesh of this process. Save its weights "
            "(full_state_dict(), or state_dict() with torch.distributed.checkpoint), or its program: save(directory)."
        )

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """The first attribute that DistributedDataParallel reads."""
        raise AutoshardError(
            "a sharded module must not be wrapped in DistributedDataParallel: it sums gradients "
            "over its mesh itself. Use it directly. Use autoshard.accelerate.Accelerator or "
            "autoshard.lightning.AutoshardStrategy in place of accelerate's and Lightning's own."
        )

    # Overrides in the user's classes are for modules that run.
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """As torch's, which swaps DTensors and loses their attributes, classes and hooks."""
        before: list[Any] = [(p, type(p), dict(vars(p))) for p in self._parameters.values() if isinstance(p, DTensor)]
        made = nn.Module._apply(self, fn, recurse)
        for p, kind, attributes in before:
            if type(p) is not kind:
                p.__class__ = kind
            vars(p).update(attributes)
            for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                setattr(p, hooks, getattr(p, hooks))
        return made

    _save_to_state_dict = nn.Module._save_to_state_dict
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def __delattr__(self, name: str) -> None:
        if name in self._known or name in self._parameters or name in self._buffers or hasattr(self._original, name):
            refuse_change(f"{name!r} of a {self._original.__name__} is deleted")
        super().__delattr__(name)
        part = own["_original_model"].root if "_original_model" in (own := self.__dict__) else self
        if name in vars(part)[SET_LATER]:
            set_later(part, name, NO_ATTRIBUTE)


def _refuse_backward_hook(register: Callable[..., Any]) -> Any:

    @functools.wraps(register)
    def registered(self: ShardedSubmodule, *args: Any, **kwargs: Any) -> NoReturn:
        raise CaptureError(
            f"a backward hook is put on a {self._original.__name__} inside a sharded module, but the backward is "
            "one program for the full model. Register it on the sharded module, on a parameter, or on an output."
        )

    return registered


class ShardedSubmodule(FixedModule):
    """A submodule of the model, of its class; programs of its own run it alone."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The submodule's forward on the mesh, compiled for this call. Hooks on it run eagerly."""
        owner = self.__dict__["_owner"]()
        if owner is None:
            raise CaptureError(
                f"a {self._original.__name__} is called, but the sharded module that it is a part of is gone. Keep it"
            )
        return owner.call_submodule(self, args, kwargs)

    register_backward_hook = _refuse_backward_hook(nn.Module.register_backward_hook)
    register_full_backward_pre_hook = _refuse_backward_hook(nn.Module.register_full_backward_pre_hook)
    register_full_backward_hook = _refuse_backward_hook(nn.Module.register_full_backward_hook)


def shard_like(full: Any, like: DTensor) -> Any:
    """This rank's shard of ``full`` in the layout of ``like``; unchanged if shapes differ."""
    if not isinstance(full, Tensor) or isinstance(full, DTensor) or full.shape != like.shape:
        return full
    made = shard_full(full, like._spec)
    return ShardedOutput.of(made) if type(like) is ShardedOutput else made


def is_unchanged_value(old: Any, new: Any) -> bool:
    """Whether assigning ``new`` to ``old`` changes nothing."""
    return old is new or (isinstance(new, CONSTANT_TYPES) and constant_key(old) == constant_key(new))


def sharded_submodules(model: nn.Module) -> dict[str, ShardedSubmodule]:
    """Module path → part, without tensors yet; a module with two paths has one part, with its modes
    and attributes."""
    classes: dict[type, type[ShardedSubmodule]] = {}
    made: dict[int, ShardedSubmodule] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for module in modules.values():
        if id(module) not in made:
            made[id(module)] = _empty_submodule(module, classes)
    for module in modules.values():
        part = made[id(module)]
        children = [(n, None if m is None else made[id(m)]) for n, m in module._modules.items()]
        part.__dict__["_modules"] = FixedChildren(children, new=module is model)
    return {path: made[id(module)] for path, module in modules.items()}


def _empty_submodule(module: nn.Module, classes: dict[type, type[ShardedSubmodule]]) -> ShardedSubmodule:
    kind = type(module)
    if kind not in classes:
        classes[kind] = derive_class(ShardedSubmodule, kind, {"forward": _forward_like(ShardedSubmodule, kind)})
    part = object.__new__(classes[kind])
    empty = nn.Module()
    empty.training = module.training
    held = frozenset({**module._parameters, **module._buffers})
    own = {"_original": kind, "_known": frozenset(vars(module)) - _INTERNAL, "_held": held, SET_LATER: {}}
    part.__dict__.update({**kept_attributes(module), **vars(empty), **own})
    part.__dict__["_parameters"].update({n: None for n, p in module._parameters.items() if p is None})
    part.__dict__["_buffers"].update({n: None for n, b in module._buffers.items() if b is None})
    share_hooks(part, module)
    share_wrapper_names(part, module)
    return part


def share_wrapper_names(ours: nn.Module, module: nn.Module) -> None:
    """If ``module`` is a torch wrapper, state dicts of ``ours`` use the wrapped names, too."""
    if isinstance(module, ActivationWrapper):
        ours._register_state_dict_hook(module._post_state_dict_hook)
        ours.register_load_state_dict_pre_hook(module._pre_load_state_dict_hook)


def state_dict_entries(model: nn.Module) -> dict[str, tuple[str, Tensor]]:
    """State-dict key → (name in ``model``, tensor), for all entries."""
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, x in (*module._parameters.items(), *module._buffers.items()):
            if x is not None and name not in module._non_persistent_buffers_set:
                fqn = f"{path}.{name}" if path else name
                found[fqn.replace(CHECKPOINT_PREFIX, "")] = fqn, x
    return found


def derive_class(base: type[DerivedT], kind: type[nn.Module], names: Mapping[str, Any] | None = None) -> type[DerivedT]:
    """A subclass of both, named as ``kind``; ``base`` if ``kind`` forbids subclassing."""
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, **(names or {})}
    try:
        return new_class(kind.__name__, (base, kind), {}, lambda space: space.update(own))
    except Exception:  # a final class
        return base


def kept_attributes(module: nn.Module) -> dict[str, Any]:
    """Plain attributes and configurations that the module's own methods read; none that may hold
    weights, which would be stale."""
    keys = {"_keys"} if isinstance(module, nn.ParameterDict) else set()  # even if empty
    return {n: x for n, x in vars(module).items() if n not in _INTERNAL and (n in keys or _is_kept_attribute(x))}


def _is_kept_attribute(value: Any) -> bool:
    """Whether an attribute is kept: not weights, nor empty containers for the forward."""
    if (
        isinstance(value, dict | list | tuple)
        and (held := items_or_attributes(value))
        and not _is_plain_constant(value)
    ):
        return all(map(_is_kept_attribute, held.values() if isinstance(held, dict) else held))
    return _is_plain_constant(value) or not (isinstance(value, _WEIGHT_HOLDERS) or callable(value))


def _are_handles(value: Any) -> bool:
    """Whether an attribute holds handles of hooks only, of which a forward makes nothing."""
    held = value if isinstance(value, list | tuple) and value else [value]
    return all(isinstance(x, RemovableHandle) for x in held)


def is_followed(value: Any) -> bool:
    """Whether programs follow an attribute set to ``value``: no tensors or modules in it."""
    if isinstance(value, dict | list | tuple | set):
        held: Any = items_or_attributes(value)
        return all(map(is_followed, held.values() if isinstance(held, dict) else held))
    return not isinstance(value, torch.Tensor | nn.Module)


@functools.cache
def _names_in_code(kind: type) -> frozenset[str]:
    """Names and strings in the methods of ``kind`` and its bases, up to ``nn.Module``."""
    found: set[str] = set()
    own = [x for c in kind.__mro__[: kind.__mro__.index(nn.Module)] for x in vars(c).values()]
    own += [f for x in own for f in (getattr(x, "fget", None), getattr(x, "__func__", None))]
    functions = [f for x in own if inspect.isfunction(x) for f in (x, inspect.unwrap(x))]
    level = [f.__code__ for f in functions]
    while level:
        found.update(name for code in level for name in (*code.co_names, *code.co_consts) if isinstance(name, str))
        level = [x for code in level for x in code.co_consts if inspect.iscode(x)]
    return frozenset(found)


def _mentions(kind: type, name: str) -> bool:
    """Whether a class has this attribute, or its methods may read it."""
    return hasattr(kind, name) or name in _names_in_code(kind)


def _is_plain_constant(value: Any) -> bool:
    return isinstance(value, CONSTANT_TYPES) or (
        isinstance(value, tuple) and all(map(_is_plain_constant, tuple.__iter__(value)))
    )


def sharded_class(base: type[Any], kind: type[nn.Module], root: type[Any]) -> type[Any]:
    """A subclass of ``base`` and ``kind`` with the forward signature of ``kind``, or ``base`` if
    attribute names clash. ``root``: our base class."""
    ours = [c for c in base.__mro__ if issubclass(c, root)]
    if any(hasattr(kind, name) for c in ours for name in vars(c).get("__annotations__", ())):
        return base  # attributes of ours have another meaning there

    names: dict[str, Any] = {"forward": _forward_like(base, kind)}
    if isinstance(getattr(kind, "device", None), property):  # reads parameters, absent at first
        names["device"] = property(lambda self: self._original_model.tensors()[0].device)
    if isinstance(getattr(kind, "dtype", None), property):
        names["dtype"] = property(
            lambda self: next(t.dtype for t in self._original_model.tensors() if t.is_floating_point())
        )
    return derive_class(base, kind, names | _generation_methods(kind) | _save_pretrained_methods(kind))


def _forward_like(base: type[Any], kind: type[nn.Module]) -> Any:

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return base.forward(self, *args, **kwargs)

    forward.__doc__ = kind.forward.__doc__
    with contextlib.suppress(TypeError, ValueError):
        forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    return forward


def _save_pretrained_methods(kind: Any) -> dict[str, Any]:
    """Hugging Face's ``save_pretrained``: full weights on rank 0, or files of all ranks. Collective."""
    own: Any = getattr(kind, "save_pretrained", None)
    known = inspect.signature(own).parameters if callable(own) else {}
    if "is_main_process" not in known or not any(
        n == "state_dict" or p.kind is p.VAR_KEYWORD for n, p in known.items()
    ):
        return {}

    @functools.wraps(kind.save_pretrained)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        return save_full(self, self, own, *args, **kwargs)

    def save_distributed_checkpoint(self: Any, _: Any, folder: Any, **__: Any) -> None:
        """Files that all ranks write (``save_pretrained(folder, distributed_checkpoint=True)``): a transfer."""
        importlib.import_module("autoshard.transfers.running").transfer(self, folder)

    return {"save_pretrained": save_pretrained, "save_distributed_checkpoint": save_distributed_checkpoint}


def save_full(sharded: Any, model: Any, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``save``, a ``save_pretrained`` of ``model``, with the full weights of ``sharded``, on rank 0. Collective."""
    given = {**inspect.signature(save).bind_partial(model, *args, **kwargs).arguments, **kwargs}
    if given.get("state_dict") is not None and not given.get("distributed_checkpoint"):
        return save(model, *args, **kwargs)
    if given.get("distributed_checkpoint"):
        if asked := [n for n in ("push_to_hub", "state_dict", "variant") if given.get(n)]:
            raise PlanError(f"distributed_checkpoint=True does not take {asked[0]}=: leave one of the two out")
    else:
        with sharded.meeting("save_pretrained()"):
            held = model.state_dict(keep_vars=True)
            kwargs["state_dict"] = {n: sharded._full(x.detach()) for n, x in held.items()}
    comm = sharded.__dict__.get("_comm")
    if "is_main_process" not in given and comm is not None:
        kwargs["is_main_process"] = comm.rank == 0
    made = save(model, *args, **kwargs)
    with sharded.meeting("save_pretrained()"):  # when it returns, the files exist for every rank
        return made


def _generation_methods(kind: Any) -> dict[str, Any]:
    """``generate`` of transformers, which samples alike on all ranks."""
    if not callable(getattr(kind, "get_encoder", None)) or not callable(getattr(kind, "generate", None)):
        return {}

    @functools.wraps(kind.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.compile_for_generation(args[0] if args else kwargs.get("inputs"), kwargs)
        comm = self.__dict__.get("_comm")
        if not isinstance(comm, runtime.TorchCommunicator):
            return kind.generate(self, *args, **kwargs)
        object.__setattr__(self, "_generating", True)
        try:
            with comm.notes, self.same_draws_on_ranks():  # user code between calls may fail
                return gather_logits(kind.generate(self, *args, **kwargs))
        finally:
            object.__setattr__(self, "_generating", False)

    return {"generate": generate}


@functools.cache
def skip_in_dynamo() -> None:
    """Have torch.compile trace generated code only, with graph breaks at collectives."""
    for package in ("autoshard.module", "autoshard.runtime", "autoshard.torch_private"):
        skip_package(package)

"""The model behind a sharded module, and the call state that selects a program."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_module

from autoshard.errors import CaptureError, SharedStateError
from autoshard.initialise.deferred import recording_of
from autoshard.module.model.closures import deepcopy_functions, deepcopy_without_tensors, ids_in_model, plain_memo
from autoshard.module.model.hooks import (
    FORWARD_HOOKS,
    Hook,
    adopt_hooks,
    forward_hooks_of,
    hooks_during_trace,
)
from autoshard.module.model.parameters import carry_attributes, meta_parameter
from autoshard.module.model.submodules import ShardedSubmodule, sharded_submodules
from autoshard.passes.capture.exported.plain_objects import (
    SET_LATER,
    AttributeGuards,
    plain_containers,
    plain_objects,
)
from autoshard.passes.capture.exported.snapshots import (
    BUFFER_VALUES,
    LEFT_BY_TRACE,
    MAX_GUARDED_ELEMENTS,
    attribute_or_none,
    parameters_of,
    register_as_buffers,
    replace_in_attributes,
)
from autoshard.passes.capture.exported.tensor_attributes import TAKEN_FROM, with_user_class
from autoshard.passes.capture.refusals.aliasing import storages_of
from autoshard.runtime.transport.torch_state import autocast_state
from autoshard.torch_private.autograd import forward_level, peek_interpreter_stack
from autoshard.torch_private.capture import autograd_modes, parametrization_cache
from autoshard.torch_private.dispatch import count_function_modes, jit_tracing_state


@dataclass(frozen=True)
class CallState:
    """What a program is specialized for beside the arguments; equal states compute alike."""

    recorded: bool
    """gradients are recorded: the program has a backward"""
    grad: bool
    """grad mode, which a forward may query even if nothing requires a gradient"""
    inference: bool
    """inference mode, which a forward may query"""
    modes: tuple[bool, ...]
    """train or eval, of every module"""
    trained: tuple[bool, ...]
    """requires_grad of each parameter, which a forward may query even if nothing is recorded"""
    tensors: tuple[Any, ...]
    """shape, dtype, device and placements of every parameter and buffer"""
    autocast: tuple[tuple[str, torch.dtype, bool], ...]
    """per device type under autocast: (device type, dtype, cache enabled)"""
    defaults: tuple[Any, ...]
    """default dtype and device, determinism, autograd modes that a forward may query"""
    hooks: tuple[Hook, ...] = ()
    """forward hooks of submodules, and attributes and fields of objects set after compilation"""

    def __hash__(self) -> int:
        return self.number

    @cached_property
    def number(self) -> int:
        """32-bit hash, equal in every process."""
        return crc32(repr(self).encode())


def default_device() -> torch.device:
    """:func:`torch.get_default_device` without its per-call search, unless a mode is active."""
    return torch.get_default_device() if count_function_modes() else _CPU


_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
_CPU = torch.device("cpu")


def torch_defaults() -> tuple[Any, ...]:
    """The present ``State.defaults``."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return torch.get_default_dtype(), str(default_device()), deterministic, *autograd_modes()


def any_requires_grad(*tensors: Iterable[Any]) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for group in tensors for x in group)


def is_plain_context() -> bool:
    """Whether the context of a call has nothing that :func:`check_call_context` would inspect."""
    hooks = any(vars(torch_module)[name] for name in _GLOBAL_HOOKS)
    inside = peek_interpreter_stack() is not None or jit_tracing_state() is not None
    return not (inside or hooks or forward_level() >= 0 or torch.compiler.is_compiling())


def _is_dual(x: Any) -> bool:
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None


def check_call_context(leaves: Sequence[Any], held: Callable[[], Sequence[Tensor]]) -> None:
    """Refuse contexts that programs cannot follow. ``held()``: parameters and buffers."""
    if peek_interpreter_stack() is not None:
        raise CaptureError(
            "a sharded module is called inside a torch.func transform (vmap, grad, jvp, functionalize), which its "
            "programs do not support. Use torch.autograd outside it, or transform the model before autoshard.compile."
        )
    if forward_level() >= 0 and any(map(_is_dual, (*leaves, *held()))):
        raise CaptureError(
            "a sharded module is called with dual tensors, but its programs have no forward-mode "
            "derivative. Use backward(), or torch.autograd.grad."
        )
    if torch.compiler.is_exporting():
        raise CaptureError(
            "a sharded module cannot be exported by torch.export: it already is a program for "
            "each rank. Export the model before autoshard.compile, with "
            "sharded.full_state_dict(). sharded.save(directory) writes the ranks' programs."
        )
    if jit_tracing_state() is not None:
        raise CaptureError(
            "a sharded module cannot be traced by torch.jit. sharded.save(directory) writes its program."
        )
    for name in _GLOBAL_HOOKS:
        for hook in vars(torch_module)[name].values():
            if not getattr(hook, "__module__", "").startswith("torch."):
                raise CaptureError(
                    f"a global module hook is registered ({getattr(hook, '__qualname__', hook)}), "
                    "but programs of a sharded module do not call the model's modules. Remove it, "
                    "or register hooks on the sharded module."
                )


@dataclass(frozen=True, eq=False)
class TensorSnapshot:
    """A snapshot of the adopted tensors, and the fields of :class:`CallState` from it."""

    looks: list[tuple[dict[str, Any], str, Tensor, bool, Any]]
    """(holder dict, key, tensor, requires_grad, :func:`_tensor_signature` or spec) of each tensor"""
    trained: tuple[bool, ...]
    forms: tuple[Any, ...]

    def is_current(self) -> bool:
        """Whether the same tensors are still in place, unchanged."""
        for holder, leaf, tensor, trained, form in self.looks:
            if holder.get(leaf) is not tensor or tensor.requires_grad is not trained:
                return False
            now = tensor._spec if isinstance(tensor, DTensor) else _tensor_signature(tensor)
            if now is not form and now != form:
                return False
        return True


def _tensor_signature(tensor: Tensor) -> Any:
    if isinstance(tensor, DTensor):
        return tensor._spec
    return tensor.dtype, tensor.shape, tensor.device


class OriginalModel:
    """``model``, and the modules and tensors that represent it in the sharded module. Programs are
    captured from it with the modes of ``parts`` and, once it is a skeleton, the types of
    ``slots``' tensors: both may change."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.adopted = False
        self.own_hooks = True
        """whether programs include the hooks of the model itself; not for parts"""
        self.parts = sharded_submodules(model)
        self._parametrized = _has_parametrizations(model)
        self.slots: dict[str, tuple[dict[str, Any], str]] = {}
        """original name → (dict, key) that holds the tensor in ``parts``"""
        self.parameters: list[str] = []
        self.absent: dict[str, tuple[Tensor, int]] = {}
        """non-persistent buffers without values: name → (placeholder, its version)"""
        self.origins: dict[str, tuple[int, int]] = {}
        """name → (id, version) of the user's tensor when it was taken over"""
        self.taken_from: dict[str, weakref.ref[Any]] = {}
        """path or name → the user's module or tensor, which globals may lead a forward to"""
        self.elsewhere: dict[str, Tensor] = {}
        """tensors of other processes: original name → meta tensor (shape, dtype, requires_grad)"""
        self.ties: dict[str, str] = {}
        """further names of a tied tensor → its first name"""
        self._seen: TensorSnapshot | None = None
        """snapshot of the last call"""
        self._places: list[dict[Any, Any]] | None = None
        """the dicts of forward hooks, of all parts"""
        self.guards = AttributeGuards(self.parts)
        self._states: deque[tuple[Any, CallState]] = deque(maxlen=4)
        """of the last calls, with their fields: comparing tuples needs no Python call"""

    def renewed(self) -> bool:
        """Adopt modules added to the model before its first call; whether there were any."""
        if self.adopted:
            return False
        now = {path: type(m) for path, m in self.model.named_modules(remove_duplicate=False)}
        if now == {path: part._original for path, part in self.parts.items()}:
            return False
        before, self.parts, self._places = self.parts, sharded_submodules(self.model), None
        self._parametrized = _has_parametrizations(self.model)
        self.take_over(before)
        return True

    def take_over(self, before: Mapping[str, nn.Module]) -> None:
        """Take over what users have set on the parts ``before``: modes and attributes."""
        for path in self.parts.keys() & before.keys():
            own, now = vars(before[path]), vars(self.parts[path])
            now["training"] = own["training"]
            if own["_original"] is now["_original"]:
                for name in (SET_LATER, *own[SET_LATER]):
                    now.pop(name, None)
                    now.update({name: own[name]} if name in own else {})
        self.guards = AttributeGuards(self.parts)

    @property
    def root(self) -> ShardedSubmodule:
        """The part of the model itself."""
        return self.parts[""]

    @property
    def modes(self) -> tuple[bool, ...]:
        """train or eval, of every module; last whether values of parametrizations are cached."""
        modes = [part.training for part in self.parts.values()]
        return (*modes, parametrization_cache() is not None) if self._parametrized else tuple(modes)

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """Forward hooks of every module; attributes and fields set after compilation."""
        if self._places is None:
            self._places = [vars(part)[kind] for part in self.parts.values() for kind in FORWARD_HOOKS]
        found = forward_hooks_of(self.parts.items(), self.own_hooks) if any(self._places) else ()
        changed = self.guards.changes()
        return (*found, *(Hook(place, name, value=key) for place, name, key in changed)) if changed else found

    def by_original(self) -> dict[int, ShardedSubmodule]:
        return {id(m): self.parts[path] for path, m in self.model.named_modules(remove_duplicate=False)}

    # --- tensors ---

    def put(self, name: str, tensor: Tensor, parameter: bool, persistent: bool = True) -> None:
        """Hold ``tensor`` under its original name."""
        path, _, leaf = name.rpartition(".")
        part = self.parts[path]
        holder: dict[str, Any] = part._parameters if parameter else part._buffers
        holder[leaf] = tensor
        self.slots[name] = holder, leaf
        if parameter:
            self.parameters.append(name)
        elif not persistent:
            part._non_persistent_buffers_set.add(leaf)

    def put_elsewhere(self, name: str, tensor: Tensor, parameter: bool) -> None:
        """Record a tensor that another process holds; here its module has None."""
        path, _, leaf = name.rpartition(".")
        part = self.parts[path]
        (part._parameters if parameter else part._buffers)[leaf] = None
        self.elsewhere[name] = tensor
        if parameter:
            self.parameters.append(name)

    def tensor(self, name: str) -> Any:
        """The current parameter or buffer of this original name."""
        if name in self.elsewhere:
            return self.elsewhere[name]
        holder, leaf = self.slots[name]
        found = holder.get(leaf)
        if found is None:
            raise CaptureError(
                f"{name!r} is missing from the sharded module: it was removed, or renamed by a "
                "parametrization, after compilation. Change the model, and compile it again."
            )
        return found

    def each(self, names: Sequence[str]) -> list[Any]:
        """:meth:`tensor` of each name, in few Python calls: it runs in every step."""
        if self.elsewhere:
            return [self.tensor(name) for name in names]
        found = [holder.get(leaf) for holder, leaf in [self.slots[name] for name in names]]
        return [self.tensor(name) if x is None else x for name, x in zip(names, found, strict=True)]

    @contextlib.contextmanager
    def leaf_stand_ins(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Inside, leaves replace trained parameters; yields pairs (parameter, leaf)."""
        before = {name: self.tensor(name) for name in self.parameters if name in self.slots}
        leaves = {id(p): (p, p.detach().requires_grad_()) for p in before.values() if p.requires_grad}
        try:
            for name, p in before.items():
                holder, leaf = self.slots[name]
                holder[leaf] = leaves[id(p)][1] if id(p) in leaves else p
            yield list(leaves.values())
        finally:
            for name, p in before.items():
                holder, leaf = self.slots[name]
                holder[leaf] = p

    def held(self) -> dict[str, Tensor]:
        """All parameters and buffers by each of their names; before adoption the user's own."""
        if self.adopted:
            others = sorted({*self.slots, *self.elsewhere} - {*self.parameters})  # same order on all ranks
            found = {name: self.tensor(name) for name in (*self.parameters, *others)}
            for name, tied in self.ties.items():
                if found[name] is not found[tied]:
                    raise CaptureError(
                        f"{tied!r} and {name!r} were one tensor when the module was compiled, "
                        "and no longer are. Untie them in the model, and compile it again."
                    )
            return found
        model = self.model
        buffers = dict(model.named_buffers(remove_duplicate=False))
        return {**parameters_of(model), **buffers}

    def tensors(self) -> list[Tensor]:
        """All parameters and buffers, without checks for removed or untied tensors."""
        if self.adopted:
            own = [t for holder, leaf in self.slots.values() if (t := holder.get(leaf)) is not None]
            return [*own, *self.elsewhere.values()]
        return [*self.model.parameters(), *self.model.buffers()]

    def state(self, recorded: bool, grad: bool, form: Callable[[Tensor], tuple[Any, ...]]) -> CallState:
        """The state of a call. ``form``: guards of a tensor. Raises as :meth:`seen`."""
        inference = torch.is_inference_mode_enabled()
        if not self.adopted:  # weights may be on another device, or missing
            return CallState(
                recorded, grad, inference, self.modes, (), (), autocast_state(), torch_defaults(), self.hooks
            )
        seen = self.seen(form)
        modes, casts = self.modes, autocast_state()
        now = recorded, grad, inference, modes, seen.trained, seen.forms, casts, torch_defaults(), self.hooks
        for known, state in self._states:
            if known == now:
                return state  # the same object keeps its cached number
        self._states.appendleft((now, CallState(*now)))
        return self._states[0][1]

    def seen(self, form: Callable[[Tensor], tuple[Any, ...]]) -> TensorSnapshot:
        """The snapshot of the tensors; in most calls the previous object, unchanged. Raises
        :class:`CaptureError` for removed or untied tensors."""
        known = self._seen
        if known is None or len(known.looks) != len(self.slots) + len(self.elsewhere) or not known.is_current():
            held = self.held()
            trained = tuple(held[name].requires_grad for name in self.parameters)
            places = [*self.slots.values(), *((self.elsewhere, name) for name in self.elsewhere)]
            looks = [
                (holder, leaf, t := holder[leaf], t.requires_grad, _tensor_signature(t)) for holder, leaf in places
            ]
            self._seen = known = TensorSnapshot(looks, trained, tuple(map(form, held.values())))
        return known

    def __deepcopy__(self, memo: dict[int, Any]) -> OriginalModel:
        self.check_present(())
        self._seen = self._places = None
        made = memo[id(self)] = object.__new__(OriginalModel)
        with deepcopy_functions(ids_in_model(self.model)):
            made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        made._without_values(self.absent)  # versions of copies differ
        made.taken_from = {}  # globals lead a copy to what it is a copy of
        return made

    def adopt(self, absent: Iterable[str] = ()) -> None:
        """Keep a meta skeleton for captures; ``parts`` hold tensors, ``absent`` ones empty."""
        self._without_values(absent)
        first: dict[int, str] = {}
        for name in self.slots:
            tied = first.setdefault(id(self.tensor(name)), name)
            if tied != name:
                self.ties[name] = tied
        adopt_hooks(self.model, self.parts)
        given = {id(x) for m in self.model.modules() for x in plain_containers(m).values()}
        self.model, self.adopted, self._places = meta_skeleton(self.model), True, None
        for path, module in self.model.named_modules(remove_duplicate=False):
            own = vars(self.parts[path])  # captures see what is written to these containers; the user's model does not
            own.update({n: x for n, x in plain_containers(module).items() if id(own.get(n)) in given})
        self.guards = AttributeGuards(self.parts)

    def _without_values(self, absent: Iterable[str]) -> None:
        self.absent = {name: (tensor := self.tensor(name), tensor._version) for name in absent}

    def note_origins(self) -> None:
        """Record identity and version of the user's tensors as they are taken over."""
        model = self.model
        tensors = (*parameters_of(model).items(), *model.named_buffers(remove_duplicate=False))
        self.origins = {name: _identity_and_version(t) for name, t in tensors}
        modules = model.named_modules(remove_duplicate=False)
        self.taken_from = {name: weakref.ref(x) for name, x in (*tensors, *modules)}

    def check_unchanged(self, name: str, now: Tensor, shown: str) -> None:
        """Raise :class:`SharedStateError` if the user wrote to ``now`` after a submodule took it:
        else that submodule would compute with the old values."""
        if self.origins.get(name) != _identity_and_version(now) and _storage_address(
            self.tensor(name)
        ) != _storage_address(now):
            raise SharedStateError(
                f"{shown!r} was changed after the first call of a submodule and before the first "
                "call of the full model. Compile the model again, or change it in the sharded "
                "module after the first call of the full model."
            )

    def check_present(self, names: Iterable[str]) -> None:
        """Raise :class:`CaptureError` for buffers among ``names`` that never got values."""
        for name, (empty, version) in list(self.absent.items()):
            now = self.tensor(name)
            if now is not empty or now._version != version:
                del self.absent[name]
        if missing := [name for name in names if name in self.absent]:
            raise CaptureError(
                f"buffers {', '.join(map(repr, missing))} are computed in the model's constructor "
                "and are not in checkpoints (persistent=False). They have no values, because the "
                "model was made on the meta device. Make it with autoshard.deferred_init, give "
                "their module a method reset_buffers() that computes them, or assign them."
            )

    def replace(self, name: str, tensor: Tensor) -> None:
        """Replace a buffer, as a forward does that assigns it."""
        holder, leaf = self.slots[name]
        holder[leaf] = tensor

    def released(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Turn these plain attributes of the skeleton into buffers; returns their tensors."""
        found = {name: attribute_or_none(self.model, name) for name in names}
        register_as_buffers(self.model, found)
        for name, tensor in found.items():
            path, _, leaf = name.rpartition(".")
            self.model.get_submodule(path)._buffers[leaf] = tensor.detach().to("meta")
        return found

    # --- captures ---

    @contextlib.contextmanager
    def as_it_is(self, check: Callable[[str, Tensor], None], whole: Callable[[str], Tensor]) -> Iterator[nn.Module]:
        """The model for capture with present modes; once adopted, with present types and flags.
        ``check(name, tensor)`` raises if unusable; ``whole(name)``: values of small buffers."""
        if self.adopted:
            self._follow(check)
        buffers = dict(self.model.named_buffers()) if self.adopted else {}
        for name, b in buffers.items():
            if b.numel() <= MAX_GUARDED_ELEMENTS:  # its values may decide control flow
                setattr(b, BUFFER_VALUES, whole(name))
        modules = dict(self.model.named_modules())
        before = {path: module.training for path, module in modules.items()}
        try:
            for path, module in modules.items():
                module.training = self.parts[path].training
            lent = hooks_during_trace(self.model, self.parts, self._standing_for(), self.own_hooks)
            with lent, self.users_own(self.model):
                self._check_fields()
                yield self.model
        finally:
            for path, training in before.items():
                modules[path].training = training
            for b in buffers.values():
                b.__dict__.pop(BUFFER_VALUES, None)

    def _check_fields(self) -> None:
        """Refuse changed fields of objects with modules or tensors, copied by the skeleton."""
        if not (changed := self.guards.changed):
            return
        ours, copies = ({id(x) for x in plain_objects(of)} for of in (self.parts.values(), self.model.modules()))
        for x, names in changed:
            if id(x) in ours - copies:
                raise SharedStateError(
                    f"field {next(iter(names))!r} of a {type(x).__name__} was set after compilation, but the object holds "
                    "modules or tensors, so programs do not follow it. Change the model, and compile it again."
                )

    @contextlib.contextmanager
    def users_own(self, model: nn.Module) -> Iterator[None]:
        """Inside, the user's modules, which a forward may reach by a global, are those of
        ``model``, a copy, and lead to its tensors."""
        given = {name: x for name, of in self.taken_from.items() if (x := of()) is not None} if self.adopted else {}
        modules = {path: m for path, m in model.named_modules(remove_duplicate=False) if path in given}
        held = [(x, vars(x)) for x in given.values() if isinstance(x, nn.Module)]
        tensors = (
            {**parameters_of(model), **dict(model.named_buffers(remove_duplicate=False))} if model is self.model else {}
        )
        try:
            for path, module in modules.items():
                object.__setattr__(given[path], "__dict__", vars(module))
            for name in tensors.keys() & given.keys():
                setattr(tensors[name], TAKEN_FROM, given[name])
            yield
        finally:
            for module, own in held:
                object.__setattr__(module, "__dict__", own)
            for tensor in tensors.values():
                vars(tensor).pop(TAKEN_FROM, None)

    def _standing_for(self) -> dict[int, Tensor]:
        """The model's tensors by id of the tensors in ``parts``."""
        model = self.model
        named = {**parameters_of(model), **dict(model.named_buffers(remove_duplicate=False))}
        return {id(self.tensor(name)): own for name, own in named.items()} if self.adopted else {}

    def _follow(self, check: Callable[[str, Tensor], None]) -> None:
        parameters = parameters_of(self.model)
        named = {**parameters, **dict(self.model.named_buffers(remove_duplicate=False))}
        for name, own in named.items():
            now = self.tensor(name)
            if name in parameters and now.shape != own.shape:
                raise CaptureError(
                    f"parameter {name!r} has shape {list(now.shape)}, but the module was "
                    f"compiled with {list(own.shape)}. Change the model, and compile it again."
                )
            check(name, now)
        for name, own in named.items():
            now = self.tensor(name)
            if own.shape != now.shape:
                own.data = torch.empty(now.shape, dtype=now.dtype, device="meta")
            elif own.dtype != now.dtype:
                own.data = own.data.to(now.dtype)
            own.requires_grad_(now.requires_grad)
        tensors = {name: self.tensor(name) for name in named}
        modules = {id(part): self.model.get_submodule(path) for path, part in self.parts.items()}
        carry_attributes(tensors, {id(t): named[name] for name, t in tensors.items()}, modules)


def _has_parametrizations(model: nn.Module) -> bool:
    return any("parametrizations" in module._modules for module in model.modules())


def meta_buffers(model: nn.Module, names: Collection[str]) -> list[str]:
    """Buffers among ``names`` that are on the meta device."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return [name for name in buffers if name in names and buffers[name].is_meta]


def non_persistent_buffers(model: nn.Module) -> set[str]:
    modules = model.named_modules()
    return {f"{path}.{name}" if path else name for path, m in modules for name in m._non_persistent_buffers_set}


def meta_skeleton(model: nn.Module) -> nn.Module:
    """A copy of ``model`` with meta parameters and buffers, ties kept. Other tensors are shared,
    and so are plain objects that hold none: later captures see writes to them."""
    memo: dict[int, Any] = {**plain_memo(model), id(recording_of(model)): None}
    for p in model.parameters():
        memo[id(p)] = meta_parameter(p)
    for b in model.buffers():
        memo[id(b)] = with_user_class(b.detach().to("meta"), b)
    for t in computed_attributes(model):
        memo[id(t)] = t.detach().to("meta")
        setattr(memo[id(t)], LEFT_BY_TRACE, True)
    with deepcopy_functions(ids_in_model(model)), deepcopy_without_tensors():
        try:
            made = copy.deepcopy(model, memo)
        except TypeError as error:  # Python's own: generators, locks, open files
            raise CaptureError(
                f"the model cannot be copied: {error}. Remove the attribute that cannot be "
                "copied, or give its class a __deepcopy__."
            ) from error
    for path, module in model.named_modules():
        if id(module) not in memo:  # its parent copies it by its own __getstate__, with other tensors
            twin = memo[id(module)] = made.get_submodule(path)
            for own, theirs in ((twin._parameters, module._parameters), (twin._buffers, module._buffers)):
                own.update({name: memo[id(x)] for name, x in theirs.items() if x is not None})
    replace_in_attributes(made, {i: memo[i] for i in ids_in_model(model)})
    return made


def computed_attributes(model: nn.Module) -> list[Tensor]:
    """Tensor attributes that are no leaves (old weight norm; ``copy.deepcopy`` refuses them) or
    share a parameter's memory."""
    attributes = [x for module in model.modules() for x in vars(module).values() if isinstance(x, Tensor)]
    parameters = storages_of(model.parameters())
    return [x for x in attributes if not x.is_leaf or not parameters.isdisjoint(storages_of([x]))]


def _identity_and_version(tensor: Tensor) -> tuple[int, int]:
    return id(tensor), 0 if tensor.is_inference() else tensor._version


def _storage_address(tensor: Tensor) -> int:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()

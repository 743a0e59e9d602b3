"""Hooks of users. Programs compute what the forward hooks present in a call return. A tensor hook
on an output (logits) sees in eager also the gradient of outputs computed from it (a loss); here
each output ends a program, so such a backward is refused."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import unserializable_hook

from autoshard.errors import CaptureError, RuntimeMismatchError
from autoshard.module.model.closures import copy_with_memo
from autoshard.passes.capture.exported.plain_objects import SET_LATER, plain_containers
from autoshard.passes.capture.exported.pytrees import CONSTANT_TYPES, constant_key
from autoshard.passes.capture.exported.snapshots import HOOK_FLAGS, NO_ATTRIBUTE
from autoshard.passes.ir.graph import Graph, Ref

FORWARD_HOOKS = "_forward_pre_hooks", "_forward_hooks"
HOOK_KINDS = (*FORWARD_HOOKS, "_backward_pre_hooks", "_backward_hooks")
HOOK_SNAPSHOT = "_given_hooks"
"""key in a submodule's dict: kind → (the user's hook dict, the hooks it had at adoption)"""
OWN_STATE = "_original", "_known", "_held", "_owner", HOOK_SNAPSHOT, SET_LATER
"""keys in a submodule's dict that are ours"""


@dataclass(frozen=True)
class Hook:
    """A registered forward hook, or a plain attribute that a hook may read from its module."""

    place: str
    name: str
    number: int = field(repr=False, default=0)
    """hook id, unique in this process; other processes number differently"""
    value: Any = None


def share_hooks(part: nn.Module, module: nn.Module) -> None:
    """Share the hook dicts of the user's module until :func:`adopt_hooks` separates them."""
    part.__dict__.update({kind: vars(module)[kind] for kind in (*HOOK_KINDS, *HOOK_FLAGS) if kind in vars(module)})


def adopt_hooks(model: nn.Module, parts: Mapping[str, nn.Module]) -> None:
    """Separate hooks of ``parts`` from ``model``: removals there still apply, additions do not."""
    for path, module in model.named_modules():
        own = vars(parts[path])
        for kind in (*HOOK_KINDS, *HOOK_FLAGS):
            if own[kind] is (theirs := vars(module)[kind]):
                own[kind] = OrderedDict((n, _fixed(hook, type(module))) for n, hook in theirs.items())
                if theirs and kind in HOOK_KINDS:
                    own.setdefault(HOOK_SNAPSHOT, {})[kind] = theirs, frozenset(theirs)


def refuse_change(what: str) -> NoReturn:
    raise CaptureError(
        f"{what}, but its programs compute what the model did when it was compiled. Change "
        "the model, and compile it again."
    )


def _fixed(hook: Any, of: type) -> Any:
    """``hook``; of a reparametrization a copy, whose removal is refused before any change."""
    if isinstance(hook, BasePruningMethod | SpectralNorm | WeightNorm):
        hook, what = copy.copy(hook), f"{type(hook).__name__} is removed from a {of.__name__}"
        hook.remove = lambda _: refuse_change(what)
    return hook


def forward_hooks_of(parts: Iterable[tuple[str, nn.Module]], own_hooks: bool = True) -> tuple[Hook, ...]:
    """The forward hooks of these modules, and the new attributes of modules that have any.
    ``own_hooks``: whether hooks of the model itself, path "", count."""
    found: list[Hook] = []
    for path, part in parts:
        if not (path or own_hooks):
            continue
        _drop_removed_hooks(part)
        hooks = [Hook(path, kind + _hook_name(f), n) for kind in FORWARD_HOOKS for n, f in vars(part)[kind].items()]
        found += hooks
        found += [Hook(path, n, value=constant_key(x)) for n, x in new_attributes(part).items() if hooks]
    return tuple(found)


def new_attributes(part: nn.Module) -> dict[str, Any]:
    """Plain attributes that the user's module lacked."""
    known = {*vars(nn.Module()), *OWN_STATE, *vars(part)[SET_LATER], *vars(part)["_known"]}
    return {n: x for n, x in vars(part).items() if n not in known and isinstance(x, CONSTANT_TYPES)}


def set_later(part: nn.Module, name: str, value: Any) -> None:
    """Set an attribute that programs follow. ``NO_ATTRIBUTE`` deletes it."""
    own = vars(part)
    number, before = own[SET_LATER].get(name) or (0, (own[name],) if name in own else ())
    own[SET_LATER][name] = number + 1, before
    own.pop(name, None)
    if value is not NO_ATTRIBUTE:
        own[name] = value


def take_later(own: dict[str, Any], part: nn.Module, name: str, memo: Mapping[int, Any]) -> Any:
    """Take attribute ``name`` as it was set or deleted later on ``part`` into ``own``, of its module; the value before."""
    before = own.pop(name, NO_ATTRIBUTE)
    if name in vars(part):
        own[name] = copy_with_memo(vars(part)[name], memo)
    return before


def _drop_removed_hooks(part: nn.Module) -> None:
    for kind, (theirs, given) in vars(part).get(HOOK_SNAPSHOT, {}).items():
        for number in given - theirs.keys():
            vars(part)[kind].pop(number, None)


@contextlib.contextmanager
def hooks_during_trace(
    model: nn.Module, parts: Mapping[str, nn.Module], tensors: Mapping[int, Tensor], own_hooks: bool
) -> Iterator[None]:
    """Inside, modules of ``model`` (itself only if ``own_hooks``) have their parts' hooks and later
    attributes. ``tensors``: its own, by part id."""
    modules = dict(model.named_modules())
    memo = {**{id(parts[path]): m for path, m in modules.items() if path in parts}, **tensors}
    before = {path: {kind: vars(m)[kind] for kind in (*HOOK_KINDS, *HOOK_FLAGS)} for path, m in modules.items()}
    lent: list[tuple[nn.Module, str, Any]] = []
    try:
        for path, module in modules.items():
            own, part = module.__dict__, parts[path]
            changed = {n for n, x in plain_containers(part).items() if own.get(n, x) is not x}
            later = changed | vars(part)[SET_LATER].keys()
            lent += [(module, name, take_later(own, part, name, memo)) for name in sorted(later)]
            if not (path or own_hooks):
                own.update({kind: OrderedDict() for kind in HOOK_KINDS})
                continue
            if own[FORWARD_HOOKS[0]] is vars(part)[FORWARD_HOOKS[0]]:
                continue  # not adopted yet
            _drop_removed_hooks(part)
            for kind in HOOK_KINDS:
                had, now = own[kind], vars(part)[kind].items()
                own[kind] = OrderedDict(
                    (
                        n,
                        had[n]
                        if n in had
                        else _refuse_observer(path, copy_with_memo(f, memo), kind == FORWARD_HOOKS[1]),
                    )
                    for n, f in now
                )
            own.update({kind: vars(part)[kind] for kind in HOOK_FLAGS})
            if own[FORWARD_HOOKS[0]] or own[FORWARD_HOOKS[1]]:
                lent += [(module, name, NO_ATTRIBUTE) for name in new_attributes(part)]
                own.update(new_attributes(part))
        yield
    finally:
        for path, module in modules.items():
            module.__dict__.update(before[path])
        for module, name, value in lent:
            module.__dict__.pop(name, None)
            if value is not NO_ATTRIBUTE:
                module.__dict__[name] = value


def _refuse_observer(path: str, hook: Callable[..., Any], sees_output: bool) -> Callable[..., Any]:
    """``hook``, refused if it only observes values: it would see one trace, not each call."""

    @functools.wraps(hook)
    def called(module: nn.Module, *given: Any) -> Any:
        tensors = [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]
        before, uses = [x._version for x in tensors], _TensorUses()
        held = sum(map(sys.getrefcount, tensors))
        with uses:
            found = hook(module, *given)
        if not (found is None or (sees_output and found is given[-1])) or before != [x._version for x in tensors]:
            return found
        found, code = None, _hook_code(hook)  # frees the result: references are counted below
        idle = uses.requires_grad or (code is not None and "training" in code.co_names)
        if uses.any or held != sum(map(sys.getrefcount, tensors)) or not idle:
            at = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
            raise CaptureError(
                f"hook {_hook_name(hook)}{at} of module {path!r} inside a sharded module changes "
                "nothing: it only observes values, and programs of the full model do not call "
                "it. Remove it and return the values from the forward, or register it on the "
                "sharded module."
            )
        return None

    return called


class _TensorUses(TorchFunctionMode):
    """Records whether the hook asks anything of tensors, and calls ``requires_grad_``."""

    any = requires_grad = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.requires_grad_:  # for checkpoints of frozen layers: nobody can ask for that gradient
            self.requires_grad = True
            return args[0]
        self.any = True
        return func(*args, **(kwargs or {}))


def _hook_name(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def _hook_code(hook: Any) -> CodeType | None:
    while isinstance(hook, functools.partial):
        hook = hook.func
    plain = hook if hasattr(hook, "__code__") or hasattr(hook, "__func__") else type(hook).__call__
    return getattr(getattr(plain, "__func__", plain), "__code__", None)


OutputSources = Mapping[int, tuple[int, ...]]
"""output number → numbers of the outputs that it is computed from"""


def find_output_sources(graph: Graph) -> OutputSources:
    """Which outputs feed which, through values with gradients; a duplicate by the first."""
    returned = [x.name if isinstance(x, Ref) and graph.types[x.name].grad else None for x in graph.outputs]
    first = {name: returned.index(name) for name in returned if name is not None}
    sources: dict[str, frozenset[int]] = {}

    def of(name: str) -> frozenset[int]:
        return sources.get(name, frozenset()) | ({first[name]} if name in first else frozenset())

    for node in graph.nodes:
        read = frozenset().union(*(of(name) for name in node.inputs if graph.types[name].grad))
        sources.update((name, read) for name in node.outputs if read and graph.types[name].grad)
    found: dict[int, tuple[int, ...]] = {}
    for number, name in enumerate(returned):
        if name is not None:
            read = frozenset(i for i, other in enumerate(returned) if other is not None and first[other] in of(name))
            if others := tuple(sorted(read - {number})):
                found[number] = others
    return found


def refuse_output_hooks(leaves: Sequence[Any], of: OutputSources) -> None:
    """Make the backward of an output raise :class:`RuntimeMismatchError` if a source has a hook."""
    if not of:
        return
    with torch.DisableTorchFunctionSubclass():  # the subclass route of sharded outputs is slow
        kept: dict[int, _OutputHooks] = {}
        for x in (leaves[i] for others in of.values() for i in others):
            if x.requires_grad and id(x) not in kept:
                kept[id(x)] = _OutputHooks(x)
        for number, others in of.items():
            x = leaves[number]
            computed = [i for i in others if id(leaves[i]) in kept and not _is_view_of(x, leaves[i])]
            sources = {i: kept[id(leaves[i])] for i in computed}
            if sources and x.requires_grad:
                handle = x.register_hook(_refusing_hook(number, sources))
                if id(x) in kept:
                    kept[id(x)].own.add(handle.id)


def _is_view_of(x: Tensor, other: Tensor) -> bool:
    """Whether a gradient of ``x`` comes by ``other``, where its hooks see it."""
    return x is other or x._base is other


class _OutputHooks:
    """The hooks of a tensor, without keeping it alive."""

    def __init__(self, x: Tensor) -> None:
        if x._backward_hooks is None:  # created here as by its first hook
            x._backward_hooks = OrderedDict()
            if x.grad_fn is not None:
                x.grad_fn._register_hook_dict(x)
        self.own: set[int] = set()
        self.all, self.tensor = x._backward_hooks, weakref.ref(x)

    @property
    def there(self) -> bool:
        if self.all.keys() - self.own:
            return True
        x = self.tensor()
        return x is not None and x.retains_grad


def _refusing_hook(number: int, sources: Mapping[int, _OutputHooks]) -> Any:
    @unserializable_hook  # type: ignore[untyped-decorator]
    def check(gradient: Tensor) -> None:
        with torch.DisableTorchFunctionSubclass():
            found = next((i for i, hooks in sources.items() if hooks.there), None)
        if found is not None:
            raise RuntimeMismatchError(
                f"output {found} has a hook or retain_grad(), but the forward computes output "
                f"{number} from it. The gradient through {number} would not reach the hook. "
                f"Compute {number} from {found} outside the module, or register no hook on {found}."
            )

    return check

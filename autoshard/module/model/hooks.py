"""Forward hooks of submodules: programs compute what the hooks present at a call return."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.overrides import TorchFunctionMode

from autoshard.errors import CaptureError
from autoshard.module.model.closures import copied
from autoshard.passes.capture.exported.trees import constant

FORWARD = "_forward_pre_hooks", "_forward_hooks"
HOOKS = (*FORWARD, "_backward_pre_hooks", "_backward_hooks")
FLAGS = "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"
GIVEN = "_given_hooks"
"""key in a submodule's dict: kind → (the user's hook dict, the hooks it had at adoption)"""
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))


@dataclass(frozen=True)
class Hook:
    """A registered forward hook, or a plain attribute that a hook may read from its module."""

    place: str
    name: str
    number: int = field(repr=False, default=0)
    """hook id, unique in this process; other processes number differently"""
    value: Any = None


def share(part: nn.Module, module: nn.Module) -> None:
    """Share the hook dicts of the user's module until :func:`adopt` separates them."""
    part.__dict__.update({kind: vars(module)[kind] for kind in (*HOOKS, *FLAGS) if kind in vars(module)})


def adopt(model: nn.Module, parts: Mapping[str, nn.Module]) -> None:
    """Separate hooks of ``parts`` from ``model``: removals there still apply, additions do not."""
    for path, module in model.named_modules():
        own = vars(parts[path])
        for kind in (*HOOKS, *FLAGS):
            if own[kind] is (theirs := vars(module)[kind]):
                own[kind] = OrderedDict(theirs)
                if theirs and kind in HOOKS:
                    own.setdefault(GIVEN, {})[kind] = theirs, frozenset(theirs)


def present(parts: Iterable[tuple[str, nn.Module]]) -> tuple[Hook, ...]:
    """The forward hooks of these modules, and plain attributes that users set after compilation."""
    found: list[Hook] = []
    for path, part in parts:
        _removed(part)
        hooks = [Hook(path, kind + _name(f), n) for kind in FORWARD for n, f in vars(part)[kind].items()]
        found += hooks
        found += [Hook(path, n, value=constant(x)) for n, x in new_attributes(part).items() if hooks]
    return tuple(found)


def new_attributes(part: nn.Module) -> dict[str, Any]:
    """Plain attributes that the user's module lacked."""
    known = {*vars(nn.Module()), "_original", "_known", GIVEN, *vars(part)["_known"]}
    return {n: x for n, x in vars(part).items() if n not in known and isinstance(x, _PLAIN)}


def _removed(part: nn.Module) -> None:
    for kind, (theirs, given) in vars(part).get(GIVEN, {}).items():
        for number in given - theirs.keys():
            vars(part)[kind].pop(number, None)


@contextlib.contextmanager
def called(model: nn.Module, parts: Mapping[str, nn.Module], tensors: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Inside, modules of ``model`` have their parts' hooks. ``tensors``: its own, by part id."""
    modules = dict(model.named_modules())
    memo = {**{id(parts[path]): m for path, m in modules.items()}, **tensors}
    before = {path: {kind: vars(m)[kind] for kind in (*HOOKS, *FLAGS)} for path, m in modules.items()}
    lent: list[tuple[nn.Module, str]] = []
    try:
        for path, module in modules.items():
            own, part = module.__dict__, parts[path]
            if own[FORWARD[0]] is vars(part)[FORWARD[0]]:
                continue  # not adopted yet
            _removed(part)
            for kind in HOOKS:
                had, now = own[kind], vars(part)[kind].items()
                own[kind] = OrderedDict(
                    (n, had[n] if n in had else _checked(path, copied(f, memo), kind == FORWARD[1])) for n, f in now
                )
            own.update({kind: vars(part)[kind] for kind in FLAGS})
            if own[FORWARD[0]] or own[FORWARD[1]]:
                lent += [(module, name) for name in new_attributes(part)]
                own.update(new_attributes(part))
        yield
    finally:
        for path, module in modules.items():
            module.__dict__.update(before[path])
        for module, name in lent:
            module.__dict__.pop(name, None)


def _checked(path: str, hook: Callable[..., Any], sees_output: bool) -> Callable[..., Any]:
    """``hook``, refused if it only observes values: it would see one trace, not each call."""

    @functools.wraps(hook)
    def called(module: nn.Module, *given: Any) -> Any:
        tensors = [x for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor)]
        before, uses = [x._version for x in tensors], _Uses()
        held = sum(map(sys.getrefcount, tensors))
        with uses:
            found = hook(module, *given)
        if not (found is None or (sees_output and found is given[-1])) or before != [x._version for x in tensors]:
            return found
        found, code = None, _code(hook)  # frees the result: references are counted below
        if uses.any or held != sum(map(sys.getrefcount, tensors)) or code is None or "training" not in code.co_names:
            at = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
            raise CaptureError(
                f"hook {_name(hook)}{at} of module {path!r} inside a sharded module changes nothing: it observes values, which "
                "programs of the whole model do not show it. Remove it, and have the forward return them, or put it on the "
                "sharded module itself."
            )
        return None

    return called


class _Uses(TorchFunctionMode):
    """Records whether the hook computes or asks anything of tensors."""

    any = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.any = True
        return func(*args, **(kwargs or {}))


def _name(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def _code(hook: Any) -> CodeType | None:
    while isinstance(hook, functools.partial):
        hook = hook.func
    plain = hook if hasattr(hook, "__code__") or hasattr(hook, "__func__") else type(hook).__call__
    return getattr(getattr(plain, "__func__", plain), "__code__", None)

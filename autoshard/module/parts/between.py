"""The code between parts: a copy of the model that runs as the user wrote it and calls its parts."""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import functools
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autoshard.dumps import asked_checks
from autoshard.errors import AutoshardError, BudgetError, LayoutError, PlanError, RuleError, RuntimeMismatchError
from autoshard.layout import Layout
from autoshard.module.model.closures import deepcopy_functions, held_in_attributes, ids_in_model, plain_memo
from autoshard.module.model.hooks import HOOK_KINDS, take_later
from autoshard.module.model.submodules import ShardedSubmodule, kept_attributes
from autoshard.module.parts.memory import PartLimits
from autoshard.module.parts.plans import FlopCount, share_of_flops
from autoshard.module.parts.tensors import PlainTensors
from autoshard.passes.capture.exported.plain_objects import SET_LATER, AttributeGuards
from autoshard.passes.capture.exported.snapshots import HOOK_FLAGS, parameters_of, replace_in_attributes
from autoshard.torch_private.autograd import forward_level, peek_interpreter_stack
from autoshard.torch_private.dispatch import without_dispatch_modes

log = logging.getLogger("autoshard")
program_log = logging.getLogger("autoshard.programs")

EAGER_MARK = "_autoshard_eager"
"""attribute of modules that :func:`eager` keeps out of the parts"""

MAX_FIXED_SHAPES = 4
"""programs of a part before its next one is for all lengths: values decide shapes (masks, mined pairs)"""

HEAVY_SHARE = 0.05
"""share of the FLOPs from which a module without parameters is tried as a part: a trace takes about a second"""

_NO_STATE = {*vars(nn.Module()), "forward"}
"""attributes that every module has"""

_NO_PROGRAM = PlanError, RuleError, LayoutError


def eager(module: nn.Module) -> nn.Module:
    """``module``, marked to run eagerly inside sharded models: its submodules may be parts."""
    object.__setattr__(module, EAGER_MARK, True)
    return module


def kept_out(model: nn.Module) -> tuple[str, ...]:
    """Paths of the modules that :func:`eager` marks."""
    return tuple(path for path, module in model.named_modules() if EAGER_MARK in vars(module))


class Between:
    """A copy of the model on the tensors of ``sharded``; calls of its modules are tried as parts.

    A module that cannot be captured in a mode (:meth:`_mode`) runs eagerly in that mode, and calls its submodules.
    """

    def __init__(self, sharded: Any) -> None:
        self.sharded = sharded
        self.refused: dict[tuple[str, Any], AutoshardError] = {}
        """(module path, mode) → why it cannot be captured"""
        self.used: dict[str, Any] = {}
        """path → part that ran in the last call"""
        self.own: dict[str, str] = {}
        """path → module that ran eagerly in the last call"""
        self.programs: dict[Any, list[Any]] = {}
        """programs by text of the graph: modules of equal structure share one"""
        self.calls: list[str] = []
        """paths of the parts that the last call ran, in order"""
        self.limits = PartLimits(self, sharded._settings.opts.budget(sharded.mesh.hardware))
        self.flops: float | None = None
        """FLOPs of products in the forward of plain code, in the first call"""
        self._counts = True
        """whether the next call counts FLOPs: the first, and the first with ``heavy`` parts"""
        self.products: Counter[str] = Counter()
        """path of a module without parameters → FLOPs of products in its forward, in the first call"""
        self.heavy: set[str] = set()
        """those of ``products`` that are tried as parts: they have a large share of all FLOPs"""
        self._count: FlopCount | None = None
        self.called = False
        """whether a call has ended: an optimizer may hold the parameters"""
        self.thread: int | None = None
        """the thread of the call that runs; a recomputation runs after it in any"""
        self.plain = PlainTensors(sharded)
        self._taken: dict[tuple[str, str], int] = {}
        """(path, name) → number of an assignment after compilation that plain code has"""
        self._seen: dict[str, int] = {}
        """path → number of laid-out tensors that its part knows"""
        self.renew()

    def renew(self) -> None:
        """Take a fresh copy of the model, as it was before any call."""
        of = self.sharded._original_model
        named = {**parameters_of(of.model), **dict(of.model.named_buffers(remove_duplicate=False))}
        # Attributes may hold them, too: lists, optimizers, averages.
        held = held_in_attributes(of.model, {id(x) for x in named.values()})
        self._held = [name for name, x in named.items() if id(x) in held]
        self.plain.read.update(self._held)
        shared = plain_memo(of.model)
        with deepcopy_functions(ids_in_model(of.model)):
            self.model = copy.deepcopy(of.model, {id(x): of.tensor(name) for name, x in named.items()} | shared)
        self._taken.clear()
        self.modules = dict(self.model.named_modules())
        self._guards = AttributeGuards(self.modules, of.guards.read, {*shared})
        self._own = {
            id(m): [(n, x) for n, x in vars(m).items() if n != "training" and type(x) in (bool, int, float, str)]
            for m in self.modules.values()
        }
        for path, module in self.modules.items():
            shown: Any = of.parts[path]._modules
            for name in [n for n, m in shown.items() if m is not None and not isinstance(m, ShardedSubmodule)]:
                module.__dict__.pop(name, None)
                module._modules[name] = shown[name]
            own, part = module.__dict__, of.parts[path].__dict__
            own["_non_persistent_buffers_set"] = part["_non_persistent_buffers_set"]
            for kind in ("_parameters", "_buffers"):
                own[kind] = self.plain.view(path, part[kind])
            if path and type(module).forward is not nn.Module.forward:
                own["forward"] = _Forward(self, path, module.forward)
        self._first = {
            path: {n: x for n, x in vars(module).items() if not isinstance(x, dict | list) or x}
            for path, module in self.modules.items()
        }
        self._show()

    @property
    def times(self) -> Counter[str]:
        """Path → calls of its part in the last call."""
        return Counter(self.calls)

    # --- calls ---

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], path: str = "") -> Any:
        """The outputs of the model, or of its module at ``path``."""
        parts = self.sharded._original_model.parts
        for name, module in self.modules.items():
            module.training = parts[name].training
            self._take_hooks(module.__dict__, parts[name].__dict__)
            self._take_attributes(name, module.__dict__)
        self.used, self.own, self.calls = {}, {}, []
        before = dict(self.refused)
        within, self.thread = self.thread, threading.get_ident()
        self.plain.renew()
        try:
            users_own = self.sharded._original_model.users_own(self.model)
            with self.sharded.same_draws(), users_own, self._local_references(), self._counted():
                outputs = self.model(*args, **kwargs) if not path else self.modules[path].forward(*args, **kwargs)
            self.called = True
            return outputs
        except Exception:
            self.refused = before  # the error may be eager's own
            raise
        finally:
            self.thread = within
            self.plain.settle()
            for name, module in self.modules.items():
                parts[name].training = module.training
            self._show()

    def show_added(self) -> None:
        """Show modules that the forward has made on the sharded module. They run eagerly, on tensors of their own."""
        for path, module in self.modules.items():
            part = vars(self.sharded._original_model.parts[path])
            for name, made in module._modules.items():
                if made is not None and id(made) not in self._own and part["_modules"].get(name) is not made:
                    dict.__setitem__(part["_modules"], name, made)
                    for shown in (part, vars(self.sharded)) if not path else (part,):
                        shown.pop(name, None)

    def _show(self) -> None:
        """Show the plain attributes of the model on the sharded module, and tensors that the forward has left in any."""
        self.sharded.__dict__.update(self._plain_attributes())
        for path, module in self.modules.items():
            first = self._first[path]
            found = {n: x for n, x in vars(module).items() if n not in _NO_STATE and x is not first.get(n)}
            found = {n: x for n, x in found.items() if any(map(torch.is_tensor, pytree.tree_leaves(x)))}
            vars(self.sharded._original_model.parts[path]).update(found)
            if not path:
                self.sharded.__dict__.update({n: x for n, x in found.items() if n not in self._taken_names})

    @contextlib.contextmanager
    def _local_references(self) -> Iterator[None]:
        """Inside, attributes have local tensors in place of DTensors, except optimizers, which read gradients."""
        tensors = map(self.sharded.tensor, self._held if self.sharded.has_local_tensors else ())
        pairs = [(x, local) for x in tensors if (local := self.plain.local(x)) is not None]
        if not pairs:
            yield
            return
        opaque = torch.optim.Optimizer, _Forward
        replace_in_attributes(self.model, {id(x): local for x, local in pairs}, opaque)
        try:
            yield
        finally:
            replace_in_attributes(self.model, {id(local): x for x, local in pairs}, opaque)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the FLOPs of plain code in the first call."""
        if not self._counts:
            yield
            return
        self._count = FlopCount()
        self.products.clear()
        try:
            with self._count:
                yield
            self.flops, self._counts = self._count.flops, False
        finally:
            self._count = None

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of the model itself, without its modules and tensors."""
        return {name: x for name, x in vars(self.model).items() if name not in _NO_STATE}

    def _plain_attributes(self) -> dict[str, Any]:
        """Plain attributes of the model, which its forward may have set."""
        taken = self._taken_names
        return {n: x for n, x in kept_attributes(self.model).items() if n not in taken and n != EAGER_MARK}

    @property
    def _taken_names(self) -> set[str]:
        """Attributes of a sharded module itself."""
        return {name for kind in type(self.sharded).__mro__ for name in vars(kind).get("__annotations__", ())}

    def copied(self, sharded: Any, memo: dict[int, Any]) -> Between:
        """The code between the parts of ``sharded``, a deep copy."""
        made = Between(sharded)
        made.refused, made.flops, made.heavy = dict(self.refused), self.flops, {*self.heavy}
        made._counts = self._counts
        made.plain.read, made.plain.laid_out = {*self.plain.read}, {*self.plain.laid_out}
        for path, module in self.modules.items():
            made._take_attributes(path, made.modules[path].__dict__)  # older than what plain code has
            made.modules[path].__dict__.update(copy.deepcopy(kept_attributes(module), memo))
        return made

    @staticmethod
    def _take_hooks(own: dict[str, Any], part: Mapping[str, Any]) -> None:
        for kind in HOOK_KINDS:
            if own[kind].keys() != part[kind].keys():
                had = dict(own[kind])
                own[kind] = type(own[kind])((n, had.get(n, hook)) for n, hook in part[kind].items())
        own.update({kind: part[kind] for kind in HOOK_FLAGS})

    def _take_attributes(self, path: str, own: dict[str, Any]) -> None:
        """Take over attributes that were set on the sharded module since the last call."""
        part = vars(self.sharded._original_model.parts[path])
        for name, (number, _) in part[SET_LATER].items():
            if self._taken.get((path, name)) != number:
                self._taken[path, name] = number
                parts, of = self.sharded._original_model.parts, id(self.modules[path])
                self._own[of] = [(n, x) for n, x in self._own[of] if n != name]
                take_later(own, parts[path], name, {id(parts[p]): m for p, m in self.modules.items()})

    def _call(self, path: str, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of the module at ``path``: of its program, or of its own forward ``plain``."""
        module = self.modules[path]
        if self.thread not in (None, threading.get_ident()):
            raise RuntimeMismatchError(
                f"{path} ({type(module).__name__}) is called in another thread than the forward around it, so ranks "
                "could make their calls in different orders. Call modules in the thread of the forward."
            )
        mode = self._mode(path)
        are_set = self.plain.are_replaced(path) or self._has_set(path)
        if mode is None or (path, mode) in self.refused or not self._may_be_part(path) or are_set:
            return self._run_plain(path, plain, args, kwargs)
        part = self._part(path)
        if len(part._executables) == MAX_FIXED_SHAPES and not part._settings.dynamic:
            object.__setattr__(part, "_settings", replace(part._settings, dynamic=True))
        self._tell_layouts(path, part)
        self.plain.settle()
        for below, inner in self._within(path):
            part._original_model.parts[below].training = inner.training
        part.training = module.training
        try:
            with contextlib.nullcontext() if self._count is None else without_dispatch_modes():
                found = part.run_as_part(args, kwargs)
        except BudgetError as error:
            raise self.limits.fails(path, error, torch.is_grad_enabled()) from error
        except AutoshardError as error:
            if not is_untraceable(error) and not isinstance(error, _NO_PROGRAM):
                raise
            self.refused[path, mode] = error
            return self._run_plain(path, plain, args, kwargs)
        self.used[path] = part
        self.calls.append(path)
        return found

    def _run_plain(self, path: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.own[path] = type(self.modules[path]).__name__
        count = self._count
        if count is None or self._has_parameters(path):
            return plain(*args, **kwargs)
        before = count.flops
        found = plain(*args, **kwargs)
        self.products[path] += int(count.flops - before)
        return found

    def finds_heavy(self) -> bool:
        """Whether the first call has shown modules without parameters that may be parts: FLOPs are counted again."""
        found = {path for path, n in self.products.items() if share_of_flops(self.sharded, n) >= HEAVY_SHARE}
        self.products.clear()
        if self.sharded._settings.parts != "auto" or found <= self.heavy:
            return False
        self.heavy |= found
        self._counts = True
        return True

    def _mode(self, path: str) -> Any:
        """What a refusal holds for: the modes of the module's submodules and grad mode; None: no part here."""
        if peek_interpreter_stack() is not None or forward_level() >= 0:  # programs have no batching rules, no duals
            return None
        return tuple(m.training for _, m in self._within(path)), torch.is_grad_enabled()

    def _has_set(self, path: str) -> bool:
        """Whether plain code has set what programs have otherwise: a number, flag or string of a module at or below
        ``path``, or a field that a part reads."""
        each = [(vars(m), self._own[id(m)]) for _, m in self._within(path)]
        return any(own.get(name) != x for own, held in each for name, x in held) or bool(self._guards.changes())

    def _within(self, path: str) -> list[tuple[str, nn.Module]]:
        """Modules at and below ``path`` by their paths there, without those that the forward has made."""
        return [(below, m) for below, m in self.modules[path].named_modules() if id(m) in self._own]

    def _may_be_part(self, path: str) -> bool:
        module, patterns = self.modules[path], self.sharded._settings.parts
        if kept_out(module):
            return False
        if patterns != "auto":
            return any(matches_part(path, pattern) for pattern in patterns)
        return path in self.heavy or self._has_parameters(path)

    def _has_parameters(self, path: str) -> bool:
        return any(name.startswith(f"{path}.") for name in self.sharded._original_model.parameters)

    def _part(self, path: str) -> Any:
        """The sharded module that runs the module at ``path``."""
        sharded = self.sharded
        if path not in sharded._inner_modules:
            sharded.callable_submodule(sharded._original_model.parts[path])
            part = sharded._inner_modules[path]
            hints = hints_within(sharded._settings.opts.hints, path, sharded._original_model)
            opts = replace(part._settings.opts, hints=hints)
            settings = replace(part._settings, gather_outputs=True, inputs="global", opts=opts)
            own = {"_part_of": (self, path), "_settings": settings, "_parameter_layouts": None, "_between": None}
            for name, value in {**own, "_deferred": False, "_runs_in_parts": False}.items():
                object.__setattr__(part, name, value)
        return sharded._inner_modules[path]

    # --- layouts of tensors, which are replicated until a part that reads them is compiled ---

    def _tell_layouts(self, path: str, part: Any) -> None:
        """Tell a part the layouts that other parts have chosen for its tensors."""
        if self._seen.get(path) != len(self.plain.laid_out):
            self._seen[path] = len(self.plain.laid_out)
            layouts = self.sharded._layout_of
            found = {n: layouts[f"{path}.{n}"] for n in part._original_model.slots if f"{path}.{n}" in layouts}
            part._layout_of.update(found)
            if part._parameter_layouts is not None:
                part._parameter_layouts.update(found)

    def fixed_layouts(self, path: str, part: Any) -> dict[str, Layout]:
        """Layouts of a part's tensors that other parts have chosen, and of those that plain code reads."""
        whole, layouts = Layout(self.sharded._program_mesh), self.sharded._layout_of
        chosen, read = self._also_named(self.plain.laid_out), self._also_named(self.plain.read)
        named = {name: f"{path}.{name}" for name in part._original_model.slots}
        # A rank's shards are new objects: where an optimizer may hold the parameters, they stay replicated.
        held = self.called and self.sharded.has_local_tensors
        return {n: layouts.get(fqn, whole) for n, fqn in named.items() if held or fqn in chosen or fqn in read}

    def _also_named(self, names: Collection[str]) -> dict[str, str]:
        """All names of these tensors → the name here: tied ones have several."""
        of = self.sharded._original_model
        by_id = {id(of.tensor(name)): name for name in names}
        return {name: by_id[id(x)] for name in of.slots if id(x := of.tensor(name)) in by_id}

    def laid_out(self, path: str, layouts: Mapping[str, Layout]) -> None:
        """Bring the tensors of a part into the layouts of its first program, for all that hold them."""
        named = {f"{path}.{name}": layout for name, layout in layouts.items()}
        new = {n: layout for n, layout in named.items() if n not in self._also_named(self.plain.laid_out)}
        new = {name: new[of] for name, of in self._also_named(new).items()}
        self.sharded.relay(new)
        self.plain.laid_out |= new.keys()

    def replicate(self, kept: Mapping[str, torch.Tensor], names: Collection[str]) -> None:
        """Replicate tensors that parts have sharded; the parts compile again. ``kept``: full tensors by name."""
        sharded, whole = self.sharded, Layout(self.sharded._program_mesh)
        names = list(self._also_named(names))
        for path in [path for path in sharded._inner_modules if any(n.startswith(f"{path}.") for n in names)]:
            del sharded._inner_modules[path]
        sharded.relay(dict.fromkeys(names, whole), kept)
        self.plain.laid_out -= {*names}
        self._seen.clear()
        self.programs.clear()


class _Forward:
    """The forward of the module at ``path`` between parts; a deep copy is the module's own forward ``plain``.

    Copies of the module's attributes hold it, too (``higher``, ``learn2learn``, ``copy.copy``): they have other weights.
    """

    def __init__(self, between: Between, path: str, plain: Callable[..., Any]) -> None:
        functools.update_wrapper(self, plain)
        self._between, self._path, self._plain = between, path, plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_locals.get("self")
        is_called = isinstance(caller, nn.Module) and vars(caller).get("forward") is self
        if is_called and caller is not self._between.modules[self._path] and isinstance(self._plain, MethodType):
            kind: Any = type(caller)
            return kind.forward(caller, *args, **kwargs)
        return self._between._call(self._path, self._plain, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._plain, memo)


def hints_within(hints: Mapping[str, Any] | None, path: str, of: Any) -> dict[str, Any] | None:
    """``hints`` of the model for the part at ``path``, by names in the part."""
    found: dict[str, Any] = {}
    for pattern, hint in (hints or {}).items():
        if isinstance(hint, str) and fnmatch.fnmatchcase(path, pattern):  # a style, for its own parameters
            found |= dict.fromkeys(of.parts[path]._parameters, hint)
        named = [n for n in (*of.parts, *of.slots) if n.startswith(f"{path}.") and fnmatch.fnmatchcase(n, pattern)]
        found |= {name[len(path) + 1 :]: hint for name in named}
    return found or None


def matches_part(path: str, pattern: str) -> bool:
    """Whether ``pattern`` means the module at ``path``; it may begin with ``model.``, for the model itself."""
    return any(fnmatch.fnmatchcase(name, pattern) for name in (path, f"model.{path}"))


def is_untraceable(error: BaseException | None) -> bool:
    """Whether ``error`` says that a program cannot be made, so that the module may still run eagerly.

    An error of autoshard itself is told, and AUTOSHARD_CHECK=errors raises it.
    """
    if not isinstance(error, AutoshardError) or not error.untraceable:
        return False
    if not error.is_internal:
        return True
    if "errors" in asked_checks():
        return False
    _tell_once(str(error))
    program_log.info("an error of autoshard", exc_info=error)
    return True


@functools.cache
def _tell_once(text: str) -> None:
    log.warning("modules run eagerly: %s. AUTOSHARD_CHECK=errors raises it", text)

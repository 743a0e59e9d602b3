"""Plain copies of sharded modules, and changes of the modules inside, as adapters make them."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from autoshard.errors import PlanError
from autoshard.module.model.closures import copy_with_memo, deepcopy_functions, ids_in_model
from autoshard.module.model.hooks import FORWARD_HOOKS, take_later
from autoshard.module.parts.between import kept_out
from autoshard.module.programs.call_checks import collective_method
from autoshard.module.sharded_module import ShardedModule
from autoshard.passes.capture.exported.plain_objects import SET_LATER
from autoshard.passes.capture.exported.snapshots import HOOK_FLAGS
from autoshard.passes.capture.exported.tensor_attributes import MOVED_MARK, with_user_class


@collective_method
def gathered_model(sharded: ShardedModule) -> nn.Module:
    """The model as it is now, unsharded: full tensors, modes, hooks, attributes. Collective."""
    of = sharded._original_model
    if sharded.is_staged:
        raise PlanError("a model in pipeline stages cannot be gathered: no rank holds all of it. Use full_state_dict()")
    with deepcopy_functions(ids_in_model(of.model)):
        model = copy.deepcopy(of.model)
    modules = dict(model.named_modules(remove_duplicate=False))
    memo = {id(of.parts[path]): module for path, module in modules.items()}
    full: dict[int, Tensor] = {}
    parameters = {*of.parameters}
    for name, held in of.held().items() if of.adopted else ():
        path, _, leaf = name.rpartition(".")
        slots: dict[str, Any] = vars(modules[path])["_parameters" if name in parameters else "_buffers"]
        if id(held) not in full:
            values = sharded._full(held.detach())
            made = nn.Parameter(values, held.requires_grad) if name in parameters else values
            full[id(held)] = with_user_class(made, slots[leaf])
        slots[leaf] = full[id(held)]
    for path, module in modules.items():
        part, own = vars(of.parts[path]), module.__dict__
        module.training = part["training"]
        for name in part[SET_LATER]:
            take_later(own, of.parts[path], name, memo)
        for kind in FORWARD_HOOKS if of.adopted else ():
            had = own[kind]
            hooks = ((n, had[n] if n in had else copy_with_memo(hook, memo)) for n, hook in part[kind].items())
            own[kind] = OrderedDict(hooks)
        own.update({kind: part[kind] for kind in HOOK_FLAGS if of.adopted})
    return model


def _take_modes(modules: Mapping[str, nn.Module], others: Mapping[str, nn.Module]) -> None:
    for path in modules.keys() & others.keys():
        modules[path].training = others[path].training


@contextlib.contextmanager
def changed_modules(sharded: ShardedModule) -> Iterator[nn.Module]:
    """Inside, the model, unsharded: modules that are put into it are the sharded module's afterwards. Collective.
    The next call compiles. Before the first one the model is the user's own, as
    :func:`autoshard.compile` got it."""
    of = sharded._original_model
    if not of.adopted:
        _take_modes(dict(of.model.named_modules()), of.parts)
        yield of.model
        sharded._renew()
        _take_modes(of.parts, dict(of.model.named_modules()))
        sharded._show()
        return
    model = gathered_model(sharded)
    yield model
    for p in sharded.parameters():  # an optimizer may have them
        setattr(p, MOVED_MARK, None)
    settings = sharded._settings
    options = replace(settings, opts=replace(settings.opts, plan=None), kept_out=kept_out(model))
    base = next(c for c in type(sharded).__mro__ if c.__module__.startswith("autoshard.module."))
    meshes = [vars(sharded)["device_mesh"]] if "device_mesh" in vars(sharded) else []
    made = base(model, sharded.mesh, options, *meshes)
    kept = {n: x for n, x in vars(sharded).items() if n not in vars(made)}
    vars(sharded).clear()
    vars(sharded).update({**kept, **vars(made)})
    object.__setattr__(sharded, "__class__", type(made))
    for part in sharded._original_model.parts.values():
        vars(part)["_owner"] = weakref.ref(sharded)

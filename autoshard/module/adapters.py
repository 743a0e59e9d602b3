"""Adapters of PEFT in sharded modules; needs the package peft.
Importing this file prepares PEFT's classes: adapters may be put into a sharded module, before its first call or later.
:func:`autoshard.compile` imports it if peft is imported. Adapters of other models are as before."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from peft.peft_model import PeftModel
from peft.tuners.tuners_utils import BaseTuner
from torch import nn

from autoshard.errors import CaptureError
from autoshard.module.gathered import changed_modules, gathered_model
from autoshard.module.model.submodules import ShardedSubmodule, save_full
from autoshard.module.sharded_module import ShardedModule


def _for_sharded(owner: type, *names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replaces methods of ``owner``, whose base model, or which itself, is (in) a sharded module.
    The function gets that, the method as it was (of the object and the module to adapt), the
    object, and the arguments."""

    def replace(ours: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            setattr(owner, name, _method(ours, getattr(owner, name)))
        return ours

    return replace


def _method(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, ShardedSubmodule):
            sharded, path = _owner(self)

            def inside(model: nn.Module) -> Any:
                own = model.get_submodule(path)
                return theirs(own, *[own.model if x is self.model else x for x in args], **kwargs)

            return ours(self, sharded, inside, *args, **kwargs)
        holder, name = _base(self)
        sharded = holder.get(name)
        if isinstance(self, ShardedModule) or not isinstance(sharded, ShardedModule):
            return theirs(self, *args, **kwargs)

        def on(model: nn.Module) -> Any:
            holder[name] = model
            try:
                return theirs(self, *[model if x is sharded else x for x in args], **kwargs)
            finally:
                holder[name] = sharded

        return ours(self, sharded, on, *args, **kwargs)

    return method


def _base(model: nn.Module) -> tuple[dict[str, Any], str]:
    """Where this tuner, or model of PEFT, has the model that it adapts: a dict, and the key."""
    tuner = model if isinstance(model, BaseTuner) else model._modules.get("base_model")
    return (tuner._modules, "model") if isinstance(tuner, BaseTuner) else (model._modules, "base_model")


def _owner(part: ShardedSubmodule) -> tuple[Any, str]:
    """The sharded module that ``part`` is a module of, and its path there."""
    sharded: Any = vars(part)["_owner"]()
    return sharded, next(path for path, other in sharded._original_model.parts.items() if other is part)


@_for_sharded(BaseTuner, "inject_adapter", "_cast_adapter_dtype", "delete_adapter")
def _changed(tuner: Any, sharded: ShardedModule, theirs: Callable[[nn.Module], Any], *_: Any, **__: Any) -> Any:
    with changed_modules(sharded) as model:
        return theirs(model)


@_for_sharded(BaseTuner, "merge_and_unload", "unload")
def _unloaded(tuner: Any, sharded: ShardedModule, theirs: Callable[[nn.Module], Any], *_: Any, **__: Any) -> Any:
    """The full model on every rank; the sharded one stays as it is. Collective."""
    return theirs(gathered_model(sharded))


@_for_sharded(BaseTuner, "merge_adapter", "unmerge_adapter")
def _refused(tuner: Any, *_: Any, **__: Any) -> None:
    raise CaptureError(
        f"an adapter of a {type(tuner).__name__} is merged in a sharded module, whose programs read base and adapter "
        "apart. Use merge_and_unload(): it returns the full merged model on every rank, and changes nothing here."
    )


@_for_sharded(PeftModel, "load_adapter")
def _loaded(
    model: Any,
    sharded: ShardedModule,
    theirs: Callable[[nn.Module], Any],
    model_id: Any,
    adapter_name: str,
    *_: Any,
    **__: Any,
) -> Any:
    if sharded._original_model.adopted and adapter_name in model.peft_config:
        return theirs(sharded)
    return _changed(model, sharded, theirs)


@_for_sharded(PeftModel, "_setup_prompt_encoder")
def _prompted(model: Any, sharded: ShardedModule, theirs: Callable[[nn.Module], Any], *_: Any, **__: Any) -> None:
    if sharded._original_model.adopted:
        theirs(sharded)
        return
    base = sharded._original_model.model
    theirs(base)
    path = next(path for path, module in base.named_modules() if module is model.word_embeddings)
    model.word_embeddings = sharded.get_submodule(path)


def _saved(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        holder, name = _base(self)
        sharded = holder.get(name)
        if isinstance(self, ShardedModule) or not isinstance(sharded, ShardedModule):
            return theirs(self, *args, **kwargs)
        return save_full(sharded, self, theirs, *args, **kwargs)

    return save_pretrained


PeftModel.save_pretrained = _saved(PeftModel.save_pretrained)

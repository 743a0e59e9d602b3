"""Submodules called alone on the sharded module's tensors, such as encoders in generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoshard.layout import Layout
from autoshard.module.model.original import Original
from autoshard.module.model.surface import class_of
from autoshard.module.programs.compiling import Compiling
from autoshard.plans.stages import budget_of
from autoshard.serving import is_asked


def inner(sharded: Compiling, part: nn.Module, base: type[Compiling]) -> Any:
    """``part`` of ``sharded`` as an instance of ``base`` that compiles it, on the same tensors.

    The tensors keep their layouts. If ``sharded`` is not compiled yet (:func:`may_come_first`), the
    call of ``part`` decides them. Hints and styles by name are those of the model.
    """
    path = next(path for path, other in sharded._of.parts.items() if other is part)
    if path not in sharded._inner:
        sharded._inner[path] = _made(sharded, path, base)
    return sharded._inner[path]


def _made(sharded: Compiling, path: str, base: type[Compiling]) -> Compiling:
    of, below = sharded._of, f"{path}."

    def within(named: dict[str, Any]) -> dict[str, Any]:
        return {name[len(below) :]: x for name, x in named.items() if name.startswith(below)}

    model = of.model.get_submodule(path)
    original = Original(model)
    original.parts = {"": of.parts[path], **within(of.parts)}
    layouts: dict[str, Layout] | None = None
    if of.adopted:
        original.slots = within(of.slots)
        original.parameters = [name[len(below) :] for name in of.parameters if name.startswith(below)]
        original.elsewhere = within(of.elsewhere)
        original.adopted = True
        layouts = within({name: sharded._layout_of.get(name, Layout(sharded._running)) for name in of.slots})
    settings, like = sharded._settings, sharded._settings.wishes.like
    wishes = replace(settings.wishes, hints=None, plan=None, like=None if _is_by_name(sharded) else like)
    made: Compiling = object.__new__(base)
    made.__dict__.update(sharded.__dict__)
    made.__dict__.update(
        _of=original,
        _title=type(model).__name__,
        _settings=replace(settings, wishes=wishes),
        _executables={},
        _latest=None,
        _inner={},
        _homes=sharded._homes and within(dict(sharded._homes)),
        _parameter_layouts=layouts,
        _layout_of=within(sharded._layout_of) if of.adopted else {},
    )
    made._alone()
    object.__setattr__(made, "__class__", class_of(base, type(model), Compiling))
    made._show()
    return made


def _is_by_name(sharded: Compiling) -> bool:
    """Whether the named strategy names modules of the full model."""
    like = sharded._settings.wishes.like
    by_axis = like if isinstance(like, Mapping) else dict.fromkeys(sharded.mesh.axes, like)
    plain = all(x is None or (isinstance(x, str) and x != "tp_plan") for x in by_axis.values())
    return not (plain and by_axis.keys() <= {*sharded.mesh.axes})


def may_come_first(sharded: Compiling) -> bool:
    """Whether a submodule may be compiled before the model: not if layouts depend on names,
    recorded calls or scarce memory of the model, nor without data."""
    wishes, tensors = sharded._settings.wishes, {id(t): t for t in sharded._of.tensors()}.values()
    of_whole = wishes.hints or wishes.plan or wishes.stages or is_asked(wishes) or _is_by_name(sharded)
    scarce = 2 * sum(t.nbytes for t in tensors) > budget_of(wishes, sharded.mesh.hardware)
    return not (of_whole or scarce or any(t.is_meta for t in tensors))


def compiled_for_generation(sharded: Any, inputs: torch.Tensor | None, kwargs: dict[str, Any]) -> None:
    """Compile an encoder–decoder model first, if only the model decides its layouts."""
    config, name = sharded.config, sharded.main_input_name
    given = kwargs.get(name) if inputs is None else inputs
    if (
        sharded._of.adopted
        or not getattr(config, "is_encoder_decoder", False)
        or given is None
        or may_come_first(sharded)
    ):
        return
    starts = (getattr(sharded.generation_config, n, None) for n in ("decoder_start_token_id", "bos_token_id"))
    start = torch.full((len(given), 1), next((n for n in starts if isinstance(n, int)), 0), device=given.device)
    mask = {n: x for n, x in kwargs.items() if n == "attention_mask"}
    sharded.specialise((), {name: given, **mask, "decoder_input_ids": start, "use_cache": True})

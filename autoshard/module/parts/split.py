"""Splitting a model into parts when it is not one graph: adoption of its tensors, calls, the plans' sums."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.errors import AutoshardError, CaptureError, SharedStateError
from autoshard.layout import Layout
from autoshard.module.model.original import OriginalModel
from autoshard.module.parts.between import Between, is_untraceable
from autoshard.module.parts.memory import MAX_ROUNDS
from autoshard.module.parts.plans import plans_of, summary
from autoshard.passes.capture.exported.plain_objects import plain_objects
from autoshard.passes.capture.exported.pytrees import flatten_registered
from autoshard.passes.capture.exported.snapshots import parameters_of, plain_tensors, restore_snapshot, take_snapshot
from autoshard.passes.capture.refusals.aliasing import storages_of
from autoshard.runtime.transport import torch_state

log = logging.getLogger("autoshard")


def run_in_parts(sharded: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One call of ``sharded``: as one graph, else by its parts and the code between them."""
    between, mode = sharded._between, _mode_of(sharded)
    if between is not None and ("", mode) in between.refused:
        return _called(sharded, between, args, kwargs)
    try:
        _check_asked_parts(sharded)
        found = sharded._run_one_graph(args, kwargs)
    except AutoshardError as error:
        if not is_untraceable(error):
            raise
        refusal = error
    else:
        object.__setattr__(sharded, "_runs_in_parts", False)
        return found
    _check_options(sharded, refusal)
    with _split(sharded, refusal) as between:
        is_scarce = sharded._settings.opts.memory_budget is not None
        if (sharded.has_local_tensors or is_scarce) and not between.used:
            _rehearse(sharded, between, args, kwargs)
        return _called(sharded, between, args, kwargs)


def prepare_parts(sharded: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Compile for these arguments: one graph, else the parts of a call, whose writes and draws are undone."""
    try:
        _check_asked_parts(sharded)
        sharded.specialise(args, kwargs)
        return
    except AutoshardError as error:
        if not is_untraceable(error):
            raise
        refusal = error
    _check_options(sharded, refusal)
    asked = sharded._settings.training
    with (
        torch.set_grad_enabled(sharded.training if asked is None else asked),
        _split(sharded, refusal) as between,
    ):
        _rehearse(sharded, between, args, kwargs)


def _check_asked_parts(sharded: Any) -> None:
    """Raise :class:`CaptureError` if the user asks for parts: by patterns, or by :func:`autoshard.eager`."""
    settings = sharded._settings
    if settings.parts == "auto" and not settings.kept_out:
        return
    by_name = "parts= names the modules that are compiled"
    error = CaptureError(by_name if settings.parts != "auto" else f"autoshard.eager keeps {settings.kept_out[0]!r} out")
    error.untraceable = True
    raise error


def _rehearse(sharded: Any, between: Between, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A call that compiles the parts and leaves no other trace.

    It begins again while plain code reads tensors that parts had taken for their own: they are replicated. So it
    does while the parts do not fit into memory together: their limits are lower then.
    """
    plain, limits, free = between.plain, between.limits, not between.plain.laid_out
    plain.rehearses, again, rounds = sharded.has_local_tensors, True, 0
    try:
        while again:
            plain.late, limits.failed, again = False, "", False
            with _undone(sharded) as kept:
                try:
                    _run(sharded, between, args, kwargs)
                except Exception:
                    can_fit = free and limits.failed and rounds < MAX_ROUNDS
                    again = bool(can_fit and limits.makes_room(plans_of(sharded)))
                    if not plain.late and not again:
                        raise
            if plain.late:
                again = True
                between.replicate(kept, plain.read & plain.laid_out)
            elif again or (free and between.used and limits.is_exceeded(plans_of(sharded), rounds)):
                rounds, again = rounds + 1, True
                between.replicate(kept, {*plain.laid_out})
            else:
                again = between.finds_heavy()
            between.renew()
    finally:
        plain.rehearses = False
        limits.most.clear()


def _mode_of(sharded: Any) -> Any:
    return sharded._original_model.modes, torch.is_grad_enabled()


def _run(sharded: Any, between: Between, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    object.__setattr__(sharded, "_runs_in_parts", True)
    leaves, spec = flatten_registered((args, kwargs))
    leaves = sharded.gathered_inputs(leaves, spec)
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return between(args, kwargs)


def _called(sharded: Any, between: Between, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One call whose writes stay."""
    outputs = _run(sharded, between, args, kwargs)
    between.finds_heavy()
    between.show_added()
    return outputs


def _check_options(sharded: Any, refusal: AutoshardError) -> None:
    """Raise :class:`CaptureError` for options that need one graph."""
    opts = sharded._settings.opts
    needs = {
        "micro_batches": opts.micro_batches != 1,
        "stages": opts.stages is not None,
        "plan": opts.plan is not None,
        "objective": opts.objective != "step",
        "profile": opts.profile is not None,
        "strict=True": opts.strict,
    }
    if asked := [name for name, is_asked in needs.items() if is_asked]:
        raise CaptureError(
            f"{str(refusal).removesuffix('.')}. {' and '.join(asked)} need{'s' * (len(asked) == 1)} one graph: leave "
            "it out to compile the parts"
        ) from refusal


@contextmanager
def _split(sharded: Any, refusal: AutoshardError) -> Iterator[Between]:
    """The code between the parts of ``sharded``. If the first call fails, nothing has changed."""
    before, original, first = dict(vars(sharded)), sharded._original_model, not sharded._original_model.adopted
    try:
        if first:
            _check_aliases(original.model)
            made = OriginalModel(original.model)
            made.take_over(original.parts)
            object.__setattr__(sharded, "_original_model", made)
            object.__setattr__(sharded, "_inner_modules", {})
            _adopt_replicated(sharded)
            sharded._show()
        if sharded._between is None:
            object.__setattr__(sharded, "_between", Between(sharded))
        between: Between = sharded._between
        between.refused["", _mode_of(sharded)] = refusal
        yield between
        log.log(logging.INFO if between.used else logging.WARNING, "%s: %s", sharded._title, summary(sharded))
    except Exception as error:
        if sharded._between is not None:
            sharded._between.refused.pop(("", _mode_of(sharded)), None)
        sharded.__dict__.update(before)
        if isinstance(error, AutoshardError):
            raise
        raise refusal from error


def _check_aliases(model: nn.Module) -> None:
    """Refuse tensors that code could read in a parameter's memory: they would miss its steps."""
    owners = {memory: name for name, p in model.named_parameters() for memory in storages_of([p])}
    others = {**dict(model.named_buffers()), **{name: x for name, (x, _) in plain_tensors(model).items()}}
    for name, x in others.items():
        if of := next((owners[memory] for memory in storages_of([x]) if memory in owners), None):
            raise SharedStateError(f"{name!r} shares memory with parameter {of!r}. Keep a clone() of it")


def _adopt_replicated(sharded: Any) -> None:
    """Take over all tensors of the model, replicated: the parts that read them lay them out."""
    model, whole = sharded._original_model.model, Layout(sharded._program_mesh)
    layouts = dict.fromkeys(parameters_of(model), whole)
    sharded._adopt(model, (), layouts)
    object.__setattr__(sharded, "_parameter_layouts", dict.fromkeys(sharded._original_model.slots, whole))


@contextmanager
def _undone(sharded: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Inside, writes to parameters, buffers and plain objects, and draws, are undone at the end.

    Yields full tensors by name.
    """
    names = list(sharded._original_model.slots)
    before = {name: sharded._full(sharded.tensor(name).detach()) for name in names}
    states = torch_state.generator_states(), random.getstate(), numpy.random.get_state()
    parts = map(vars, sharded._original_model.parts.values())
    objects = take_snapshot(plain_objects(sharded._original_model.parts.values()))
    places = [(own, dict(own)) for part in parts for own in (part["_parameters"], part["_buffers"])]
    try:
        yield before
    finally:
        restore_snapshot(objects)
        for own, held in places:
            for name in [name for name in own if name not in held]:  # registered by the forward
                del own[name]
            # Assigned by the forward; a rank's DTensor is the choice of a part.
            own.update({n: x for n, x in held.items() if x is None or not isinstance(own.get(n), DTensor)})
        torch_state.set_generator_states(states[0])
        random.setstate(states[1])
        numpy.random.set_state(states[2])
        with torch.no_grad():
            for name in names:
                sharded._load(sharded.tensor(name), before[name])

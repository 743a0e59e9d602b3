"""Warm-up call: a real first call of a model that fills caches, such as position tables or grids.

Checked: cache values depend on no input and no trained parameter; both calls' outputs are equal.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.passes.capture.exported.arguments import Example
from autoshard.passes.capture.exported.attributes import attribute, untouched
from autoshard.passes.capture.exported.contents import Contents, put, taken
from autoshard.passes.capture.refusals.second_call import SecondCallError
from autoshard.passes.ir.graph import Graph

log = logging.getLogger("autoshard")


def with_first_call(model: nn.Module, example: Example, again: Callable[[], Graph], error: SecondCallError) -> Graph:
    """The graph of ``model`` after a warm-up call with ``example``; only filled caches remain.

    ``again`` traces the model. Raises ``error`` and restores the model if caches are not why.
    """
    tensors = [*model.parameters(), *model.buffers(), *filter(torch.is_tensor, pytree.tree_leaves(example))]
    buffers = {name: attribute(model, name) for name in error.written}
    own = {id(vars(module)) for module in model.modules()}
    if any(id(attributes) not in own for attributes, _ in error.places) or any(t.is_meta for t in tensors):
        raise error  # state in a class or global, or no data to compute it
    if any(isinstance(x, nn.Parameter) for x in buffers.values()):
        raise error
    before = _values(buffers)
    try:
        with untouched(model):
            data = _Dependent(p for p in model.parameters() if p.requires_grad)
            state = _Dependent(x for x in _state(model) if all(x is not b for b in buffers.values()))
            first = _called(model, example, data, state)
            left = [attributes[name] for attributes, name in error.places]
            contents, after = taken(left), _values(buffers)
            graph = again()
            caches = buffers.keys() - graph.mutations.keys()
            kept = before | {name: after[name] for name in caches}
            filled = [buffers[name] for name in caches] + [x for x in _inside(left, contents) if torch.is_tensor(x)]
            _put(buffers, kept)
            put(contents)
            if data.asked or any(x in data for x in filled) or not _same(first, _called(model, example)):
                raise error
    except Exception:
        _put(buffers, before)
        raise error from error.__cause__
    _put(buffers, kept)
    for (attributes, name), value in zip(error.places, left, strict=True):
        attributes[name] = value
    put(contents)
    known = any(x in state for x in filled)
    log.log(
        logging.WARNING if known else logging.INFO,
        "%s: its first call fills %s, so compiling made that call%s",
        type(model).__name__,
        ", ".join(map(repr, [*error.left, *sorted(caches)])),
        ". It reads buffers or frozen parameters: load a checkpoint before compiling." if known else "",
    )
    return graph


class _Dependent(TorchDispatchMode):
    """Tracks tensors computed from values of ``sources``, or drawn at random."""

    def __init__(self, sources: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = {StorageWeakRef(x.untyped_storage()) for x in sources}
        self.asked = False
        """whether Python read a tracked value"""

    def __contains__(self, x: torch.Tensor) -> bool:
        return StorageWeakRef(x.untyped_storage()) in self.found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.rpartition("::")[2]
        given = [] if name.startswith("new_") or name.endswith("_like") else _tensors((args, kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags or any(x in self for x in given):
            writes = [
                x for x, s in zip(args, func._schema.arguments, strict=False) if s.alias_info and s.alias_info.is_write
            ]
            made = _tensors((out, writes))
            self.asked |= not made
            self.found |= {StorageWeakRef(x.untyped_storage()) for x in made}
        return out


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _state(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from (p for p in model.parameters() if not p.requires_grad)
    yield from model.buffers()


def _called(model: nn.Module, example: Example, *modes: _Dependent) -> Any:
    """Output of ``model`` for a copy of ``example``, a source of ``modes[0]``. Forks the RNG."""
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda x: x.detach().clone().requires_grad_(x.requires_grad), example
    )
    with torch.random.fork_rng(), contextlib.ExitStack() as stack:
        for mode in modes[:1]:
            mode.found |= {StorageWeakRef(x.untyped_storage()) for x in _tensors((args, kwargs))}
        for mode in modes:
            stack.enter_context(mode)
        return model(*args, **kwargs)


def _same(one: Any, other: Any) -> bool:
    """Whether two outputs have equal tensors."""
    try:
        torch.testing.assert_close(_tensors(other), _tensors(one), equal_nan=True)
    except AssertionError:
        return False
    return True


def _values(buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in buffers.items()}


def _put(buffers: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, x in buffers.items():
            x.detach().copy_(values[name])


def _inside(values: list[Any], contents: Contents) -> Iterator[Any]:
    """Attribute values, and the contents of their containers."""
    yield from values
    for _, held in contents:
        yield from held.values() if isinstance(held, dict) else held

"""Shared regions of a trace: one of several equal modules is traced, others become one op. Modules
are equal for a call if they make the same calls (:mod:`recording`). If one differs, the trace is
repeated with it traced too; if several of a kind do, none of the kind is shared.
Tensors of a region are identified by their position in its arguments. In a list with one entry per
layer, such as KV caches, a layer's own entry has the same role in every layer; other entries count
as tensors from outside."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx.traceback import get_current_meta, preserve_node_meta

from autoshard.passes.capture.observer import ObservedCall, Observer, ObserverAnswer, Patch, replacement_patch
from autoshard.passes.capture.shared_regions.recording import (
    REGION_KEY,
    REGION_RESULTS,
    REPEATED_REGION,
    TRACED_REGION,
    RegionMismatchError,
    RegionRecording,
    RegionReplay,
    RegionTensors,
    modes_of_torch,
)
from autoshard.passes.ir.text import is_number

OWN_ENTRY = "own"


def argument_roles(path: str, arguments: Any) -> dict[Any, Tensor]:
    """Position → tensor in ``arguments`` of the module at ``path``, its own entries only."""
    try:
        found = [(tuple(map(_plain_path_key, keys)), x) for keys, x in pytree.tree_flatten_with_path(arguments)[0]]
    except ValueError:  # a pytree class without key paths
        found = [((i,), x) for i, x in enumerate(pytree.tree_leaves(arguments))]
    tensors = [(where, x) for where, x in found if isinstance(x, Tensor)]
    number = next((int(name) for name in reversed(path.split(".")) if is_number(name)), -1)
    counted: defaultdict[Any, set[int]] = defaultdict(set)
    for where, _ in tensors:
        for depth in range(2, len(where)):
            if isinstance(where[depth], int):
                counted[where[:depth]].add(where[depth])
    # pairs (cosines and sines) belong to all modules
    lists = {where for where, entries in counted.items() if len(entries) > 2 and number in entries}
    named: dict[Any, Tensor] = {}
    for where, x in tensors:
        entries = {depth: where[depth] for depth in range(2, len(where)) if where[:depth] in lists}
        if all(i == number for i in entries.values()):
            named[tuple(OWN_ENTRY if depth in entries else key for depth, key in enumerate(where))] = x
    return named


def _plain_path_key(key: Any) -> Any:
    """A pytree key as a plain list index, dict key or attribute name."""
    return next((getattr(key, name) for name in ("idx", "key", "name") if hasattr(key, name)), str(key))


MIN_EQUAL_MODULES, MAX_MISMATCHES = 3, 3
"""fewest equal modules that are shared; most mismatches per kind"""

_unobserved = torch.DisableTorchFunction
"""context for our own queries about tensors, hidden from tracers and observers"""

log = logging.getLogger("autoshard")
_region_numbers = itertools.count(1)


@dataclass(frozen=True)
class _RegionMember:
    path: str
    kind: Any
    """equal for modules of equal structure"""
    attributes: frozenset[Any]
    """plain attributes, to choose the most similar recording first"""


class SharedRegions(Observer):
    """Shared regions of ``model`` (None: none). Outlives a trace, to learn from failed ones."""

    def __init__(self, model: nn.Module | None) -> None:
        self.members = {} if model is None else _region_members(model)
        self.mismatched_pairs: set[tuple[str, str]] = set()
        """(path, path of the recording that it did not match)"""
        self.mismatches: Counter[Any] = Counter()
        self.leaves: defaultdict[str, frozenset[int]] = defaultdict(frozenset)
        """path of a traced module → numbers of its tensors kept elsewhere than in its output"""
        self.recorded: dict[Any, list[tuple[_RegionMember, RegionRecording]]] = {}
        self.active: RegionRecording | RegionReplay | None = None
        self.numbers: list[int] = []
        """regions whose :data:`REGION_RESULTS` are kept until :meth:`close`"""
        self.learnt = False

    def patches(self) -> Iterable[Patch]:
        if self.members:
            yield replacement_patch(nn.Module, "_call_impl", self._watched)  # keeps the model's own names

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        self.recorded, self.active, self.learnt = defaultdict(list), None, False
        with super().around():
            yield
        if self.learnt:  # the model swallowed the error
            raise RegionMismatchError("modules are not equal")

    def end(self, output: Any) -> None:
        self.recorded = defaultdict(list)  # export looks for leaked tensors

    def learn(self, error: Exception) -> bool:
        return self.learnt

    def close(self) -> None:
        """Forget the traces."""
        for number in self.numbers:
            del REGION_RESULTS[number]
        self.numbers.clear()

    def before(self, call: ObservedCall) -> ObserverAnswer | None:
        if call.func in (TRACED_REGION, REPEATED_REGION):
            return ObserverAnswer(call.make(), "")
        if isinstance(self.active, RegionReplay):
            with _unobserved():
                return ObserverAnswer(self.active.answer(call), "")
        if self.active is not None:
            self.active.before(call)
        return None

    def after(self, call: ObservedCall, result: Any) -> Any:
        if isinstance(self.active, RegionRecording):
            self.active.after(call, result)
        return result

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            member = self.members.get(id(vars(module)))  # shared by export's wrappers
            if member is None or self.active is not None or self.mismatches[member.kind] >= MAX_MISMATCHES:
                return original(module, *args, **kwargs)
            with _unobserved():
                tensors = RegionTensors(module, argument_roles(member.path, (args, kwargs)))
                state = _region_state(tensors)
            same = [
                r
                for m, r in self.recorded[member.kind]
                if r.state == state and (member.path, m.path) not in self.mismatched_pairs
            ]
            run = functools.partial(original, module, *args, **kwargs)
            if not same:
                return self._record(member, tensors, state, run)
            near = {m.path: len(m.attributes & member.attributes) for m, _ in self.recorded[member.kind]}
            return self._repeat(member, max(same, key=lambda r: near[r.path]), tensors, run)

        return call

    def _record(self, member: _RegionMember, tensors: RegionTensors, state: Any, run: Callable[[], Any]) -> Any:
        found = RegionRecording(next(_region_numbers), member.path, state, tensors, self.leaves[member.path])
        self.active = found
        try:
            with preserve_node_meta():
                meta = get_current_meta()  # annotate() would mark nodes around it, too
                meta["custom"] = {**(meta.get("custom") or {}), REGION_KEY: found.number}
                output = run()
        finally:
            self.active = None
        try:
            results = found.finish(output)
        except RegionMismatchError as error:
            log.debug("calls of %s are not repeated: %s", member.path, error)
            return output
        self.numbers.append(found.number)
        REGION_RESULTS[found.number] = [found.made[i] for i in found.exports]
        operands = [tensors.by_name[name] for name in found.operands]
        self.recorded[member.kind].append((member, found))
        return found.replaced(output, _with_recorded_grads(TRACED_REGION(operands, results, found.number), found))

    def _repeat(
        self, member: _RegionMember, found: RegionRecording, tensors: RegionTensors, run: Callable[[], Any]
    ) -> Any:
        """Output of a call that repeats ``found``, else learns: :class:`RegionMismatchError`."""
        outer = {name: x for name, x in found.tensors.by_name.items() if name[0] == "outer"}
        operands = [outer[name] if name in outer else tensors.by_name[name] for name in found.operands]
        results = dict(
            zip(found.exports, _with_recorded_grads(REPEATED_REGION(operands, found.number), found), strict=True)
        )
        replay = self.active = RegionReplay(found, tensors, results)
        try:
            output = run()
            replay.finish(output)
        except Exception as error:
            self.mismatched_pairs.add((member.path, found.path))
            self.mismatches[member.kind] += 1
            self.learnt = True
            log.debug("%s is not called as %s: %s", member.path, found.path, error)
            raise RegionMismatchError(f"{member.path} is not called as {found.path}: {error}") from error
        finally:
            self.active = None
        if left := replay.left_behind():
            self.leaves[found.path] |= left
            self.learnt = True
            log.debug("a result of %s is kept elsewhere", member.path)
            raise RegionMismatchError(f"a result of {member.path} is kept elsewhere")
        return output


def _with_recorded_grads(results: list[Tensor], found: RegionRecording) -> list[Tensor]:
    """``results`` of a marker, detached if the recorded ones had no gradient."""
    return [
        x if needs or not x.requires_grad else x.detach() for x, needs in zip(results, found.needs_grad, strict=True)
    ]


def _region_state(tensors: RegionTensors) -> Any:
    """State on which answers to the module's queries depend: tensor types, torch's modes."""
    types = [
        (name, type(x), x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.requires_grad, x.is_leaf)
        for name, x in tensors.by_name.items()
    ]
    return types, modes_of_torch()


def _region_members(model: nn.Module) -> dict[int, _RegionMember]:
    """id of a module's attributes → member, for outermost modules with enough equals."""
    kinds = {
        path: (*_module_structure(module), re.sub(r"\d+", "#", path))
        for path, module in model.named_modules(remove_duplicate=False)
    }
    counts = Counter(kinds.values())
    found: dict[int, _RegionMember] = {}

    def visit(module: nn.Module, path: str) -> None:
        if counts[kinds[path]] >= MIN_EQUAL_MODULES and next(module.children(), None) is not None:
            found[id(vars(module))] = _RegionMember(path, kinds[path], frozenset(_plain_attributes(module)))
            return
        for name, child in module.named_children():
            visit(child, f"{path}.{name}" if path else name)

    visit(model, "")
    return found


def _module_structure(module: nn.Module) -> Any:
    tensors = [(n, t) for of in (module._parameters, module._buffers) for n, t in of.items() if t is not None]
    own = tuple((n, t.shape, t.dtype, t.requires_grad, t.device) for n, t in tensors)
    return (
        type(module),
        module.training,
        own,
        tuple((n, _module_structure(child)) for n, child in module.named_children()),
    )


def _plain_attributes(module: nn.Module) -> Iterator[Any]:
    for path, inner in module.named_modules():
        for name, value in vars(inner).items():
            if isinstance(value, int | float | str):
                yield path, name, value

"""Shared regions in a trace: one of several equal modules is traced, others become one op each.

Modules are equal for a call if they make the same calls. If one differs, the trace is repeated with
that module traced, too; after several mismatches no module of its kind is shared.
"""

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
from torch import nn
from torch.fx.traceback import get_current_meta, preserve_node_meta

from autoshard.passes.capture.observer import Answer, Call, Observer, Patch, replacing
from autoshard.passes.capture.repeats.calls import Recording, Replay, Tensors, UnequalError, modes
from autoshard.passes.capture.repeats.markers import CALLED, CALLED_AGAIN, REPEATED, RESULTS
from autoshard.passes.capture.repeats.roles import roles

FEWEST, MISTAKES = 3, 3
"""fewest equal modules that are shared; most mismatches per kind"""

_unasked = torch._C.DisableTorchFunction
"""context for our own queries about tensors, hidden from tracers and observers"""

log = logging.getLogger("autoshard")
_numbers = itertools.count(1)


@dataclass(frozen=True)
class _Member:
    path: str
    kind: Any
    """equal for modules of equal structure"""
    attributes: frozenset[Any]
    """plain attributes, to choose the most similar recording first"""


class Repeats(Observer):
    """Shared regions of ``model`` (None: none). Outlives a trace, to learn from failed ones."""

    def __init__(self, model: nn.Module | None) -> None:
        self.members = {} if model is None else _members(model)
        self.unequal: set[tuple[str, str]] = set()
        """(path, path of the recording that it did not match)"""
        self.mistakes: Counter[Any] = Counter()
        self.leaves: defaultdict[str, frozenset[int]] = defaultdict(frozenset)
        """path of a traced module → numbers of its tensors kept elsewhere than in its output"""
        self.recorded: dict[Any, list[tuple[_Member, Recording]]] = {}
        self.active: Recording | Replay | None = None
        self.numbers: list[int] = []
        """regions whose :data:`RESULTS` are kept until :meth:`close`"""
        self.learnt = False

    def patches(self) -> Iterable[Patch]:
        if self.members:
            yield replacing(nn.Module, "_call_impl", self._watched)  # keeps the model's own names

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        self.recorded, self.active, self.learnt = defaultdict(list), None, False
        with super().around():
            yield
        if self.learnt:  # the model swallowed the error
            raise UnequalError("modules are not equal")

    def end(self, output: Any) -> None:
        self.recorded = defaultdict(list)  # export looks for leaked tensors

    def learn(self, error: Exception) -> bool:
        return self.learnt

    def close(self) -> None:
        """Forget the traces."""
        for number in self.numbers:
            del RESULTS[number]
        self.numbers.clear()

    def before(self, call: Call) -> Answer | None:
        if call.func in (CALLED, CALLED_AGAIN):
            return Answer(call.make(), "")
        if isinstance(self.active, Replay):
            with _unasked():
                return Answer(self.active.answer(call), "")
        if self.active is not None:
            self.active.before(call)
        return None

    def after(self, call: Call, result: Any) -> Any:
        if isinstance(self.active, Recording):
            self.active.after(call, result)
        return result

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            member = self.members.get(id(vars(module)))  # shared by export's wrappers
            if member is None or self.active is not None or self.mistakes[member.kind] >= MISTAKES:
                return original(module, *args, **kwargs)
            with _unasked():
                tensors = Tensors(module, roles(member.path, (args, kwargs)))
                state = _state(tensors)
            same = [
                r
                for m, r in self.recorded[member.kind]
                if r.state == state and (member.path, m.path) not in self.unequal
            ]
            run = functools.partial(original, module, *args, **kwargs)
            if not same:
                return self._record(member, tensors, state, run)
            near = {m.path: len(m.attributes & member.attributes) for m, _ in self.recorded[member.kind]}
            return self._repeat(member, max(same, key=lambda r: near[r.path]), tensors, run)

        return call

    def _record(self, member: _Member, tensors: Tensors, state: Any, run: Callable[[], Any]) -> Any:
        found = Recording(next(_numbers), member.path, state, tensors, self.leaves[member.path])
        self.active = found
        try:
            with preserve_node_meta():
                meta = get_current_meta()  # annotate() would mark nodes around it, too
                meta["custom"] = {**(meta.get("custom") or {}), REPEATED: found.number}
                output = run()
        finally:
            self.active = None
        try:
            results = found.finish(output)
        except UnequalError as error:
            log.debug("calls of %s are not repeated: %s", member.path, error)
            return output
        self.numbers.append(found.number)
        RESULTS[found.number] = [found.made[i] for i in found.exports]
        operands = [tensors.by_name[name] for name in found.operands]
        self.recorded[member.kind].append((member, found))
        return found.replaced(output, _apart(CALLED(operands, results, found.number), found))

    def _repeat(self, member: _Member, found: Recording, tensors: Tensors, run: Callable[[], Any]) -> Any:
        """Output of a call that repeats ``found``. Else learns and raises :class:`UnequalError`."""
        outer = {name: x for name, x in found.tensors.by_name.items() if name[0] == "outer"}
        operands = [outer[name] if name in outer else tensors.by_name[name] for name in found.operands]
        results = dict(zip(found.exports, _apart(CALLED_AGAIN(operands, found.number), found), strict=True))
        replay = self.active = Replay(found, tensors, results)
        try:
            output = run()
            replay.finish(output)
        except Exception as error:
            self.unequal.add((member.path, found.path))
            self.mistakes[member.kind] += 1
            self.learnt = True
            log.debug("%s is not called as %s: %s", member.path, found.path, error)
            raise UnequalError(f"{member.path} is not called as {found.path}: {error}") from error
        finally:
            self.active = None
        if left := replay.left_behind():
            self.leaves[found.path] |= left
            self.learnt = True
            log.debug("what %s makes is kept elsewhere", member.path)
            raise UnequalError(f"what {member.path} makes is kept elsewhere")
        return output


def _apart(results: list[torch.Tensor], found: Recording) -> list[torch.Tensor]:
    """``results`` of a marker, detached if the recorded ones had no gradient."""
    return [
        x if needs or not x.requires_grad else x.detach() for x, needs in zip(results, found.needs_grad, strict=True)
    ]


def _state(tensors: Tensors) -> Any:
    """State on which answers to the module's queries depend: tensor types, torch's modes."""
    types = [
        (name, type(x), x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.requires_grad, x.is_leaf)
        for name, x in tensors.by_name.items()
    ]
    return types, modes()


def _members(model: nn.Module) -> dict[int, _Member]:
    """id of a module's attributes → member, for outermost modules with enough equals."""
    kinds = {
        path: (*_form(module), re.sub(r"\d+", "#", path))
        for path, module in model.named_modules(remove_duplicate=False)
    }
    counts = Counter(kinds.values())
    found: dict[int, _Member] = {}

    def visit(module: nn.Module, path: str) -> None:
        if counts[kinds[path]] >= FEWEST and next(module.children(), None) is not None:
            found[id(vars(module))] = _Member(path, kinds[path], frozenset(_attributes(module)))
            return
        for name, child in module.named_children():
            visit(child, f"{path}.{name}" if path else name)

    visit(model, "")
    return found


def _form(module: nn.Module) -> Any:
    tensors = [(n, t) for of in (module._parameters, module._buffers) for n, t in of.items() if t is not None]
    own = tuple((n, t.shape, t.dtype, t.requires_grad, t.device) for n, t in tensors)
    return type(module), module.training, own, tuple((n, _form(child)) for n, child in module.named_children())


def _attributes(module: nn.Module) -> Iterator[Any]:
    for path, inner in module.named_modules():
        for name, value in vars(inner).items():
            if isinstance(value, int | float | str):
                yield path, name, value

"""Recordings of a region's calls to torch, and marker ops that stand for the region in a trace. An
equal module runs its Python on tensors without data; each call must match the recording. So a
difference in attributes, globals, closures or hooks shows in the calls."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx.traceback import get_current_meta

from autoshard.passes.capture.exported.provenance import CHECKPOINT_KEY
from autoshard.passes.capture.observer import ObservedCall
from autoshard.runtime.transport.torch_state import autocast_state
from autoshard.torch_private.dispatch import storage_id, without_dispatch_modes
from autoshard.torch_private.fake import FakeTensor, FakeTensorMode

StridedMeta = tuple[Sequence[int], Sequence[int], torch.dtype, torch.device]
"""(sizes, strides, dtype, device) of a tensor"""

REGION_KEY = "autoshard_repeated"
"""key in a node's custom meta: number of its traced region"""

REGION_RESULTS: dict[int, Sequence[StridedMeta]] = {}
"""number of a traced region → its results; a trace adds and removes its own"""


def strided_meta_of(x: Tensor) -> StridedMeta:
    """Sizes, strides, dtype and device of ``x``."""
    return tuple(x.shape), x.stride(), x.dtype, x.device


def empty_from_meta(of: StridedMeta, device: torch.device | None = None) -> Tensor:
    """An uninitialised tensor of these sizes, strides and dtype."""
    size, stride, dtype, own = of
    return torch.empty_strided(size, stride, dtype=dtype, device=device or own)


@torch.library.custom_op("autoshard::called", mutates_args=())
def traced_region(operands: list[Tensor], results: list[Tensor], number: int) -> list[Tensor]:
    """Marks the end of a traced region, with its ``operands`` and ``results``."""
    return [x.clone() for x in results]


@traced_region.register_fake
def _(operands: list[Tensor], results: list[Tensor], number: int) -> list[Tensor]:
    return [empty_from_meta(strided_meta_of(x)) for x in results]


@torch.library.custom_op("autoshard::called_again", mutates_args=())
def repeated_region(operands: list[Tensor], number: int) -> list[Tensor]:
    """Stands for a repeat of region ``number`` with other ``operands``."""
    raise NotImplementedError("an op that only traces have")


@repeated_region.register_fake
def _(operands: list[Tensor], number: int) -> list[Tensor]:
    return [empty_from_meta(of) for of in REGION_RESULTS[number]]


TRACED_REGION, REPEATED_REGION = torch.ops.autoshard.called.default, torch.ops.autoshard.called_again.default


TensorRole = tuple[str, Any]
"""role of a tensor in a region: ("input", position), ("own", path), ("made", i) or ("outer", id)"""

_FACT_TYPES = (torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format, bool, int, type(None))
_METADATA_QUERIES = frozenset(
    "size stride dim ndimension numel nelement element_size storage_offset get_device is_contiguous is_floating_point "
    "is_complex is_signed __len__ __get__ result_type promote_types can_cast".split()
)
"""functions whose answers depend on tensor metadata only"""


class RegionMismatchError(Exception):
    """A call that differs from the recording, or cannot be recorded."""


def modes_of_torch() -> Any:
    """Torch's modes that change calls: grad mode, autocast, default dtype."""
    return torch.is_grad_enabled(), autocast_state(), torch.get_default_dtype()


def _current_checkpoint() -> Any:
    return (get_current_meta().get("custom") or {}).get(CHECKPOINT_KEY)


class RegionTensors:
    """Tensors of one call of a region, by role."""

    def __init__(self, module: nn.Module, inputs: Mapping[Any, Tensor]) -> None:
        """``inputs``: argument position → tensor, see ``roles``."""
        self.names: dict[int, TensorRole] = {}
        self.by_name: dict[TensorRole, Tensor] = {}
        self.versions: dict[TensorRole, int] = {}
        self.checkpoints = {_current_checkpoint(): 0}
        for where, x in inputs.items():
            self.add(("input", where), x)
        own = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        for path, x in own:
            self.add(("own", path), x)

    def add(self, name: TensorRole, x: Tensor) -> None:
        self.by_name[name] = x
        self.names.setdefault(id(x), name)
        self.versions[name] = x._version

    def name(self, x: Tensor) -> TensorRole:
        if id(x) not in self.names:
            self.add(("outer", id(x)), x)
        return self.names[id(x)]

    def place(self) -> Any:
        """(torch's modes, number of the region's checkpoint) of a call made now."""
        return modes_of_torch(), self.checkpoints.setdefault(_current_checkpoint(), len(self.checkpoints))

    def written(self, tree: Any) -> Any:
        """Comparison key of ``tree``, tensors by role. May raise :class:`RegionMismatchError`."""
        if isinstance(tree, Tensor):
            return self.name(tree)
        if isinstance(tree, list | tuple):
            return type(tree), tuple(map(self.written, tree))
        if isinstance(tree, dict):
            return type(tree), tuple((k, self.written(v)) for k, v in tree.items())
        if isinstance(tree, slice):
            return slice, self.written((tree.start, tree.stop, tree.step))
        if isinstance(tree, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise RegionMismatchError("a length is open")
        if isinstance(tree, float | complex):
            return type(tree), repr(tree)
        if isinstance(tree, (*_FACT_TYPES, str, type, type(Ellipsis))) or callable(tree):
            return type(tree), tree
        raise RegionMismatchError(f"a {type(tree).__name__} is an argument")


@dataclass(frozen=True)
class RecordedCall:
    """One recorded call and its result: tensors by role, other values unchanged."""

    func: Any
    place: Any
    given: Any
    outcome: tuple[Any, ...]
    spec: Any


@dataclass
class RegionRecording:
    """Recording of a traced region."""

    number: int
    path: str
    state: Any
    """types of its inputs, and torch's modes"""
    tensors: RegionTensors
    leaves: frozenset[int]
    """numbers of tensors made in it that are kept elsewhere than in its output"""
    steps: list[RecordedCall] = field(default_factory=list)
    made: list[StridedMeta] = field(default_factory=list)
    failed: bool = False
    asked: ObservedCall | None = None
    exports: tuple[int, ...] = ()
    needs_grad: tuple[bool, ...] = ()
    operands: tuple[TensorRole, ...] = ()

    def before(self, call: ObservedCall) -> None:
        self.asked = call

    def after(self, call: ObservedCall, result: Any) -> None:
        """Record ``result``. Calls answered by observers are unseen: their region is not shared."""
        asked, self.asked = self.asked, None
        if asked is None or list(map(id, asked.operands)) != list(map(id, call.operands)):
            self.failed = True  # an observer replaced tensors by values
        try:
            given = self.tensors.written((call.args if asked is None else asked.args, dict(call.kwargs)))
            leaves, spec = pytree.tree_flatten(result, is_leaf=lambda x: isinstance(x, torch.Size))
            made = any(isinstance(x, Tensor) for x in leaves)
            outcome = tuple(map(self._gives, leaves))
        except RegionMismatchError:
            self.failed = True
            return
        func = call.func if asked is None else asked.func
        if not made and not (
            getattr(func, "__name__", "") in _METADATA_QUERIES and all(isinstance(x, _FACT_TYPES) for x in leaves)
        ):
            self.failed = True
        self.steps.append(RecordedCall(func, self.tensors.place(), given, outcome, spec))

    def _gives(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in self.tensors.names:
            self.tensors.add(("made", len(self.made)), leaf)
            self.made.append(strided_meta_of(leaf))
        return _RoleOfResult(self.tensors.names[id(leaf)])

    def finish(self, output: Any) -> list[Tensor]:
        """Tensors that leave the region; :class:`RegionMismatchError` if not to be shared."""
        if self.failed:
            raise RegionMismatchError("it asks about values")
        tensors = self.tensors
        by_name = tensors.by_name
        if any(x._version != tensors.versions[name] for name, x in by_name.items() if name[0] != "made"):
            raise RegionMismatchError("it writes to its arguments")
        names = [tensors.names.get(id(x)) for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
        if None in names:
            raise RegionMismatchError("its output was computed by an unseen call")
        if _are_referenced_elsewhere(
            [x for x in pytree.tree_leaves(output) if tensors.names.get(id(x), "?")[0] == "made"], output, by_name
        ):
            raise RegionMismatchError("its output is kept elsewhere, where it would be another tensor")
        leaving = {name[1] for name in names if name is not None and name[0] == "made"}
        self.exports = tuple(sorted(leaving | self.leaves))
        given = [name for step in self.steps for name in _roles_in(step.given)]
        self.operands = tuple(dict.fromkeys(name for name in given if name[0] != "made"))
        found = [by_name["made", i] for i in self.exports]
        storages = [storage_id(x) for x in (*(by_name[n] for n in self.operands), *found)]
        if len(set(storages[len(self.operands) :]) - set(storages[: len(self.operands)])) < len(found):
            raise RegionMismatchError("its output shares memory")
        self.needs_grad = tuple(x.requires_grad for x in found)
        return found

    def replaced(self, output: Any, results: Sequence[Tensor]) -> Any:
        """``output`` with ``results`` in place of the tensors that leave the region."""
        by_name = self.tensors.by_name
        new = {id(by_name["made", i]): x for i, x in zip(self.exports, results, strict=True)}
        return pytree.tree_map_only(Tensor, lambda x: new.get(id(x), x), output)


def _are_referenced_elsewhere(tensors: list[Any], *known: Any) -> bool:
    """Whether anything but frames and ``known`` containers references one of ``tensors``."""
    held, todo = {id(tensors)}, [known]
    while todo:
        holder: Any = todo.pop()
        held.add(id(holder))
        if isinstance(holder, Mapping):
            todo += holder.values()
        elif isinstance(holder, list | tuple):
            todo += holder
        if isinstance(holder, Mapping) and hasattr(holder, "__dict__"):  # items are attributes, too
            held.add(id(vars(holder)))
    return any(id(x) not in held and not isinstance(x, FrameType) for x in gc.get_referrers(*tensors))


def _fake_tensor_like(of: StridedMeta, mode: FakeTensorMode | None) -> Tensor:
    meta = empty_from_meta(of, torch.device("meta"))
    return meta if mode is None else FakeTensor(mode, meta, of[-1])


def _function_name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name


@dataclass(frozen=True)
class _RoleOfResult:
    name: TensorRole


def _roles_in(written: Any) -> Iterator[TensorRole]:
    if isinstance(written, tuple):
        if len(written) == 2 and written[0] in ("input", "own", "made", "outer") and not isinstance(written[0], type):
            yield written
        else:
            for item in written:
                yield from _roles_in(item)


class RegionReplay:
    """A call of an equal module, checked against ``recording``. ``results``: outputs by number."""

    def __init__(self, recording: RegionRecording, tensors: RegionTensors, results: Mapping[int, Tensor]) -> None:
        self.recording, self.tensors = recording, tensors
        self.steps = iter(recording.steps)
        mode = next((x.fake_mode for x in tensors.by_name.values() if isinstance(x, FakeTensor)), None)
        with torch.DisableTorchFunction(), without_dispatch_modes():
            made = [results[i] if i in results else _fake_tensor_like(x, mode) for i, x in enumerate(recording.made)]
            for i, x in enumerate(made):
                tensors.add(("made", i), x)
        self.inside = {i: weakref.ref(x) for i, x in enumerate(made) if i not in results}

    def answer(self, call: ObservedCall) -> Any:
        """The recorded result of ``call``; :class:`RegionMismatchError` if it is another."""
        step = next(self.steps, None)
        if step is None or call.func != step.func:
            raise RegionMismatchError(
                f"{_function_name(call.func)} is called, not {_function_name(step and step.func)}"
            )
        if (place := self.tensors.place()) != step.place:
            raise RegionMismatchError(f"{_function_name(call.func)} is called in {place}, not {step.place}")
        if (given := self.tensors.written((call.args, dict(call.kwargs)))) != step.given:
            raise RegionMismatchError(f"{_function_name(call.func)} is called with {given}, not {step.given}")
        by_name = self.tensors.by_name
        return pytree.tree_unflatten(
            [by_name[x.name] if isinstance(x, _RoleOfResult) else x for x in step.outcome], step.spec
        )

    def finish(self, output: Any) -> None:
        """Raises :class:`RegionMismatchError` for missing calls, or an output of other tensors."""
        if next(self.steps, None) is not None:
            raise RegionMismatchError("it makes fewer calls")
        for x in pytree.tree_leaves(output):
            if isinstance(x, Tensor):
                kind, i = self.tensors.names.get(id(x), ("unseen", None))
                if kind == "unseen" or (kind == "made" and i in self.inside):
                    raise RegionMismatchError("it returns something else")

    def left_behind(self) -> frozenset[int]:
        """Numbers of inner tensors that outlive the call."""
        self.tensors.by_name.clear()
        return frozenset(i for i, x in self.inside.items() if x() is not None)

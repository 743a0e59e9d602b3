"""A compiled program: the compiler's results, the rank module's class, and the calls it serves."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoshard.errors import CaptureError, RuntimeMismatchError
from autoshard.module.dtensors.outputs import ShardedOutput, shape_and_dtype
from autoshard.module.dtensors.views import record_view_source
from autoshard.module.inputs import InputLayouts
from autoshard.module.model.hooks import OutputSources, find_output_sources
from autoshard.module.model.original import CallState
from autoshard.module.programs.kv_cache import CachedShards
from autoshard.passes.capture.exported.pytrees import constant_key
from autoshard.passes.capture.exported.tensor_attributes import AttributeRead
from autoshard.passes.codegen import root_class
from autoshard.passes.ir.graph import Graph, OutputView, Ref
from autoshard.passes.ir.sizes import (
    InputShapes,
    evaluate_length,
    shape_checker,
    shape_function,
    shape_mismatch,
    solve_symbols,
)
from autoshard.plans.plan import Compiled
from autoshard.runtime.operations.checks import (
    EXACTLY,
    OTHER_BUFFERS,
    TOO_SHORT,
    is_specialization_error,
    is_specialization_message,
)
from autoshard.runtime.transport import torch_state
from autoshard.runtime.transport.profiling import name_lines

log = logging.getLogger("autoshard")

_INFERENCE_LAYOUTS_NOTE = (
    "the layouts were chosen by an earlier program, for inference. To choose them for training, "
    "call model.train() before compile(), or pass training=True"
)


@dataclass(frozen=True)
class ModuleCall:
    """The argument leaves of a call, and the state in which it is made."""

    leaves: Sequence[Any]
    spec: Any
    """pytree structure of (args, kwargs)"""
    state: CallState
    cuts: InputLayouts = ()
    """layouts of local inputs, by leaf"""

    keys: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """cached guards, by ``exactly``"""
    programs: dict[int, Executable] = field(default_factory=dict, compare=False, repr=False)
    """number → program that served this call, latest last"""

    def with_leaves(self, leaves: Sequence[Any]) -> ModuleCall:
        """This call with other ``leaves`` that differ in data only."""
        return ModuleCall(leaves, self.spec, self.state, self.cuts, self.keys, self.programs)

    def key(self, number: int = 0, exactly: bool | Callable[[Any], bool] = True) -> Any:
        """The guards; ranks compare them. ``exactly``: see :func:`leaf_signature`, or per leaf."""
        if exactly not in self.keys:
            one_by_one = exactly if callable(exactly) else None
            found = (leaf_signature(x, bool(exactly if one_by_one is None else one_by_one(x))) for x in self.leaves)
            self.keys[exactly] = tuple(found)
        return (*self.keys[exactly], self.spec, self.state, number)

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)``"""
        return pytree.tree_unflatten(self.leaves, self.spec)


def key_difference(key: Any, other: Any) -> str:
    """What differs between two keys of calls, as text for the log."""
    *arguments, state, number = key
    *others, before, tried = other
    parts = ["shapes, dtypes or constants of the arguments"] * (arguments != others)
    parts += [f.name for f in fields(CallState) if getattr(state, f.name) != getattr(before, f.name)]
    return ", ".join(parts + ["integers in tensors"] * (number != tried)) or "tensors of others were written to"


@dataclass
class Executable:
    """A compiled program with its rank module class."""

    compiled: Compiled
    rank_module: type[Any]
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """shape, dtype and value range of each input it was compiled for"""

    carried: Sequence[bool] = ()
    """per output whether it is state for the next call"""

    structure: Any = None
    """guards of calls with any lengths; None if it serves one signature only"""

    parts: tuple[Executable, ...] = ()
    """one per pipeline stage; ``rank_module`` is that of the first"""

    attached: tuple[AttributeRead, ...] = ()
    """attributes of tensors that the forward read, with their values"""

    @staticmethod
    def of(compiled: Compiled, inputs: Mapping[str, Any], carried: Sequence[bool], structure: Any) -> Executable:
        """``compiled`` with its source loaded."""
        source = compiled.source
        if not compiled.parts:
            return Executable(compiled, load_source(source.text, source.modules), inputs, carried, structure)
        names = [root_class(number) for number in range(len(compiled.parts))]
        classes = load_classes(source.text, source.modules, names)
        assert compiled.pipeline is not None
        given = (
            (*[False] * len(stage.sent), *(carried[i] for i in stage.results)) if carried else ()
            for stage in compiled.pipeline.each
        )
        parts = tuple(
            Executable(part, kind, {}, kept) for part, kind, kept in zip(compiled.parts, classes, given, strict=True)
        )
        return Executable(compiled, classes[0], inputs, carried, structure, parts)

    @cached_property
    def graph(self) -> Graph:
        return self.compiled.graph

    @cached_property
    def computed(self) -> torch.dtype | None:
        """The least precise floating dtype of the program's values; None without any."""
        found = {t.dtype for t in self.graph.types.values() if t.dtype.is_floating_point}
        return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=None)

    @cached_property
    def feeding(self) -> OutputSources:
        """Which outputs feed which others."""
        return find_output_sources(self.graph)

    @cached_property
    def written_parametrizations(self) -> list[str]:
        """Buffers of parametrizations that the forward writes."""
        return [fqn for fqn in self.graph.mutations if "parametrizations" in fqn.split(".")]

    @cached_property
    def _stops(self) -> bool:
        """Whether a run may find that the program is for other integers or buffers."""
        text = str(self.graph)
        return is_specialization_message(text) or str(EXACTLY) in text

    def tried(self, tensor: Callable[[str], Tensor], inputs: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Context of a run: if the program is for other values, draws and writes (``tensor``,
        ``inputs``: of buffers, and written inputs) are undone: a stage writes before later
        stages check."""
        if not self._stops:
            return contextlib.nullcontext()
        return _undo_on_other_values(
            [inputs[n] if n in inputs else tensor(n) for n in self.compiled.in_place if self.parts]
        )

    def refuses(self, structure: Any, leaves: Sequence[Any]) -> str:
        """Why it cannot serve a call of this structure with these leaves; "" if it can."""
        if self.structure is None or self.structure != structure:
            return "the arguments differ in more than lengths"
        named = {
            name: shape_and_dtype(x)[0]
            for name, x in zip(self.graph.flat_inputs, leaves, strict=True)
            if name is not None
        }
        if self._serves(tuple(named.values())):
            return ""
        return shape_mismatch(self.graph.types, self.compiled.symbols, named)

    @cached_property
    def _serves(self) -> Callable[[InputShapes], bool]:
        names = [name for name in self.graph.flat_inputs if name is not None]
        return shape_checker(self.graph.types, self.compiled.symbols, names)

    def apart(self, leaves: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Tensor]]:
        """(leaves with written inputs cloned, written inputs by fqn): the values of the program
        must not see what is written back, unless it writes in place."""
        written = self._written
        if not written:
            return leaves, {}
        named = dict(zip(self.graph.flat_inputs, leaves, strict=True))
        for name, fqn in written.items():
            for other, tensor in named.items():
                if other not in (None, name) and overlap(named[name], tensor):
                    raise CaptureError(
                        f"the forward writes in place to its input {fqn!r}, which shares memory with input "
                        f"{other!r}, and the program would miss the write there. Pass a clone of one of them."
                    )
        aside = {name for name, fqn in written.items() if fqn not in self.compiled.in_place}
        copies = [x.clone() if n in aside else x for n, x in zip(self.graph.flat_inputs, leaves, strict=True)]
        return copies, {fqn: named[name] for name, fqn in written.items()}

    @cached_property
    def _written(self) -> Mapping[str, str]:
        """Name → fqn of inputs that the forward mutates."""
        return {i.name: i.fqn for i in self.graph.of_kind("input") if i.fqn in self.graph.mutations}

    def named(self, leaves: Sequence[Any]) -> dict[str, Tensor]:
        """Tensor arguments by input name of the graph."""
        return {n: leaf for n, leaf in zip(self.graph.flat_inputs, leaves, strict=True) if n is not None}

    def as_typed(self, leaves: Sequence[Any]) -> list[Any]:
        """Outputs, detached if the graph gives them no gradient: they share an autograd node."""
        found = list(leaves)
        for i in self._without_gradient:
            x = found[i]
            with torch.DisableTorchFunctionSubclass():  # an output's own getter is slow
                is_free = isinstance(x, Tensor) and x.requires_grad
            found[i] = x.detach() if is_free else x
        return found

    def sharing_memory(
        self, leaves: Sequence[Any], given: Sequence[Any], own: Sequence[Any], ordered: bool = False
    ) -> list[Any]:
        """Outputs as views of each other and of the arguments ``given``, as in eager. ``own``: the
        arguments as the program knows them (parts of a tensor differ). ``ordered``: other
        outputs have eager's memory order."""
        found, names = list(leaves), self.graph.flat_inputs
        values = solve_symbols(self.compiled.symbols, {n: x.shape for n, x in self.named(own).items()})
        for (is_input, of), views in self._views.items():
            owner = (given if is_input else found)[of]
            if not (ordered or is_input) and views[0].number == of:
                continue
            if is_input and (type(owner) is not Tensor or owner is not own[of]):
                continue
            written = is_input and names[of] in self._written
            with torch.DisableTorchFunctionSubclass():
                owner = _owner_of(owner, [(found[v.number], v.same) for v in views])
                for view in views if owner is not None else ():
                    if _can_be_view(found[view.number], owner, written):
                        made = _as_view(found[view.number], owner, view, lambda n: evaluate_length(n, values))
                        owner, found[view.number] = made
                if not is_input and owner is not None:
                    found[of] = owner
        return found

    @cached_property
    def _views(self) -> dict[tuple[bool, int], list[OutputView]]:
        """By owner; views of parts first: for them it may be copied into another memory order."""
        views = sorted(self.graph.views, key=lambda v: v.same or str((v.stride, v.offset)) == str((v.memory, 0)))
        return {key: [v for v in views if (v.is_input, v.of) == key] for key in {(v.is_input, v.of): 0 for v in views}}

    @cached_property
    def _without_gradient(self) -> Sequence[int]:
        """Numbers of the outputs without gradient."""
        values = enumerate(self.graph.outputs)
        return [i for i, x in values if isinstance(x, Ref) and not self.graph.types[x.name].grad]

    def shapes(self, inputs: Sequence[Tensor]) -> Sequence[tuple[int, ...] | None]:
        """Global shapes of outputs, then of mutated states, for a call with these ``inputs``; None
        for non-tensors and data-dependent lengths, where every rank has the full tensor."""
        return self._shapes([shape_and_dtype(x)[0] for x in inputs])

    def lengths(self, inputs: Sequence[Tensor]) -> Callable[[Sequence[int]], tuple[int, ...]]:
        """A function from symbolic shapes to the shapes of a call with these ``inputs``."""
        shapes = {name: x.shape for name, x in zip(self.compiled.source.inputs, inputs, strict=True)}
        values = solve_symbols(self.compiled.symbols, shapes)
        return lambda shape: tuple(evaluate_length(n, values) for n in shape)

    @cached_property
    def global_shapes(self) -> Sequence[tuple[int, ...] | None]:
        """:meth:`shapes` in the program's symbols."""
        program = self.compiled.program
        names = [*(x.name if isinstance(x, Ref) else None for x in program.outputs), *program.mutations.values()]
        types = [None if name is None else program.types[name] for name in names]
        return [None if t is None or t.unknown else tuple(t.shape) for t in types]

    @cached_property
    def _shapes(self) -> Callable[[InputShapes], Any]:
        return shape_function(self.global_shapes, self.compiled.symbols, self.compiled.source.inputs)


def _owner_of(owner: Any, shown: Sequence[tuple[Any, bool]]) -> Any:
    """``owner`` as a tensor of which all can be views, or None. ``shown``: outputs to become views,
    and whether eager gives ``owner`` itself. State for the next call stays sharded only where no
    view is plain."""
    kinds = {type(x) for x in (owner, *(x for x, _ in shown))}
    if not kinds <= {Tensor, ShardedOutput, CachedShards}:
        return None
    if type(owner) is Tensor or kinds == {ShardedOutput}:
        return owner
    if owner.requires_grad:
        return None
    whole = next((x for x, same in shown if same and type(x) is Tensor), None)
    if whole is not None:
        return whole
    return owner.whole() if isinstance(owner, CachedShards) else owner.full_tensor()


def _can_be_view(made: Any, owner: Any, written: bool) -> bool:
    """Whether output ``made`` can be a view of ``owner``, with its history."""
    if (made.dtype, made.device) != (owner.dtype, owner.device):
        return False
    return not made.requires_grad or (owner.requires_grad and not written)


def _as_view(made: Any, owner: Any, view: OutputView, length: Callable[[int], int]) -> tuple[Any, Any]:
    """(``owner`` in the memory order of the trace, ``made`` as a view of it)."""
    if view.number == view.of and not view.is_input:
        steps = tuple(map(length, view.memory))
        if type(owner) is Tensor and owner.stride() != steps:
            owner = owner.new_empty_strided(owner.shape, steps).copy_(owner)
        return owner, owner
    detached = owner.requires_grad and not made.requires_grad
    if view.same and not detached:
        return owner, owner
    size, stride, memory = (tuple(map(length, lengths)) for lengths in (view.size, view.stride, view.memory))
    place: tuple[Any, ...] = (stride, length(view.offset))
    if view.same or (size, *place) == (owner.shape, memory, 0):
        place = ()
    elif isinstance(owner, DTensor) or view.is_input:
        order = torch.empty(owner.shape, device="meta") if isinstance(owner, DTensor) else owner
        if order.stride() != memory:
            return owner, made
    elif owner.stride() != memory:
        owner = owner.new_empty_strided(owner.shape, memory).copy_(owner)
    if isinstance(owner, DTensor):
        return owner, record_view_source(owner, made, _view_in_memory, (detached, size, *place))
    return owner, _view_in_memory(owner, detached, size, *place)


def _view_in_memory(x: Tensor, detached: bool, size: Any, stride: Any = None, offset: int = 0) -> Tensor:
    """A view of ``x``: all of it, or the part with this size, stride and offset from its start."""
    x = x.detach() if detached else x
    return x.view(size) if stride is None else x.as_strided(size, stride, x.storage_offset() + offset)


@contextlib.contextmanager
def _undo_on_other_values(written: Sequence[Tensor]) -> Iterator[None]:
    """Inside, restore generators and ``written`` if the program is for other values."""
    # During CUDA graph capture the device's generator state cannot be read.
    before = torch_state.generator_states(
        cuda=torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()
    )
    values = [x.detach().clone() for x in written]
    try:
        yield
    except RuntimeError as error:
        if is_specialization_error(error):
            torch_state.set_generator_states(before)
            with torch.no_grad():
                for x, value in zip(written, values, strict=True):
                    x.copy_(value)
        raise


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share an element in memory."""
    a, b = (x.to_local() if isinstance(x, DTensor) else x for x in (a, b))
    if a.is_meta or b.is_meta:
        return False
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr() or not a.numel() or not b.numel():
        return False
    if a.dtype != b.dtype:
        return True
    touched = torch.zeros(a.untyped_storage().nbytes() // a.itemsize, dtype=torch.bool)
    touched.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
    return bool(touched.as_strided(b.shape, b.stride(), b.storage_offset()).any())


_module_numbers = itertools.count()


def load_classes(text: str, modules: Mapping[int, str] | None, names: Sequence[str]) -> tuple[type[Any], ...]:
    """Classes ``names`` of generated source; its module stays importable while the first class
    lives: torch.compile looks up globals there. ``modules``: of its lines, see
    :class:`Source`."""
    module = types.ModuleType(f"autoshard_rank_module_{next(_module_numbers)}")
    exec(compile(text, "<autoshard rank_module.py>", "exec"), module.__dict__)
    found = tuple(getattr(module, name) for name in names)
    for kind in found:
        name_lines(kind, modules or {})
    sys.modules[module.__name__] = module
    weakref.finalize(found[0], sys.modules.pop, module.__name__, None)
    return found


def load_source(text: str, modules: Mapping[int, str] | None = None) -> type[Any]:
    """The ``RankModule`` class of generated source; see :func:`load_classes`."""
    return load_classes(text, modules, (root_class(),))[0]


def input_descriptions(graph: Graph, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Input name → shape, dtype, value range, whether it ascends: for synthetic inputs."""
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    found = {}
    for name, x in zip(graph.flat_inputs, leaves, strict=True):
        if name is None:
            continue
        entry: dict[str, Any] = {"shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch.")}
        if not (x.dtype.is_floating_point or x.dtype.is_complex):
            known = x.numel() and not x.is_meta
            low, high = _value_range(x) if known else (0, 1)
            entry |= {"low": low, "high": high}
            if (
                known
                and x.ndim == 1
                and len(x) > 1
                and x.dtype in (torch.int32, torch.int64)
                and not (x.diff() < 0).any()
            ):
                entry["ascending"] = True
        found[name] = entry
    return found


def _value_range(x: Tensor) -> tuple[int, int]:
    """Minimum and maximum of an integer tensor; torch lacks the kernel for wide unsigned types."""
    if x.dtype in (torch.uint16, torch.uint32, torch.uint64):
        numbers = x.detach().cpu().numpy()
        return int(numbers.min()), int(numbers.max())
    return int(x.min()), int(x.max())


def note_inference_layouts(earlier: Mapping[Any, Executable], made: Compiled) -> Compiled:
    """``made``, with a note if its layouts come from ``earlier`` programs for inference."""
    for_training = (e for e in earlier.values() if e.graph.training)
    if (
        not earlier
        or not made.graph.training
        or any(_INFERENCE_LAYOUTS_NOTE not in e.compiled.plan.notes for e in for_training)
    ):
        return made
    return replace(made, plan=replace(made.plan, notes=(*made.plan.notes, _INFERENCE_LAYOUTS_NOTE)))


def leaf_signature(leaf: Any, exactly: bool = True) -> Any:
    """Guard of an argument leaf; without ``exactly`` a tensor's lengths are ignored."""
    if isinstance(leaf, Tensor):
        shape, dtype = shape_and_dtype(leaf)
        return (
            shape if exactly else len(shape),
            dtype,
            leaf.requires_grad,
            *getattr(leaf, "placements", ()),
        )
    try:
        hash(leaf)
    except Exception:  # also from a user's __hash__
        raise CaptureError(
            f"argument of type {type(leaf).__name__} is neither a tensor nor a hashable constant; "
            "pass tensors in tuples, lists or dicts"
        ) from None
    return constant_key(leaf)


_MAX_PROGRAMS = 16
"""most programs per signature, for inputs whose integers differ: else every call may compile"""

Served = TypeVar("Served")


_INPUT_ADVICE = "Pad to fixed lengths, or mask."
_BUFFER_ADVICE = (
    "Compare the buffer itself, as in `if self.count < 10`. A number read from it by item() or "
    "int() needs a program for each value."
)


def run_first_match(serve: Callable[[int], Served], served: Iterable[int] = ()) -> Served:
    """``serve(number)`` of the first program that fits the integers of inputs and buffers.
    ``served``: numbers that fitted earlier calls, latest last; tried first."""
    latest = list(served)[::-1]
    numbers = (*latest, *(n for n in range(_MAX_PROGRAMS) if n not in latest))
    for number in numbers:
        try:
            return serve(number)
        except RuntimeError as error:
            if not is_specialization_error(error):
                raise
            if TOO_SHORT in str(error):
                said = RuntimeMismatchError(f"{error}. Every program of this model needs a longer one. Pad, or mask.")
                said.untraceable = True
                raise said from error
            if number == numbers[-1]:
                advice = _BUFFER_ADVICE if OTHER_BUFFERS in str(error) else _INPUT_ADVICE
                said = RuntimeMismatchError(
                    f"{error}. There are {_MAX_PROGRAMS} programs for inputs of these shapes "
                    f"already, for other values. {advice}"
                )
                said.untraceable = True
                raise said from error
            log.info("a program does not fit this call: %s", error)
    raise AssertionError

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
from torch.distributed.tensor import DTensor

from autoshard.errors import CaptureError, RuntimeMismatchError
from autoshard.module.dtensors.outputs import form_of
from autoshard.module.hooked import Feeding, feeding
from autoshard.module.inputs import Cuts
from autoshard.module.model.state import State
from autoshard.passes.capture.exported.attached import Read
from autoshard.passes.capture.exported.trees import constant
from autoshard.passes.codegen import root_class
from autoshard.passes.ir.graph import Graph, Ref
from autoshard.passes.ir.symbols import Shapes, bind, check, evaluate, mismatch, shapes_of
from autoshard.plans.compiled import Compiled
from autoshard.runtime.operations.exactly import EXACTLY, OTHER_BUFFERS, is_of_other_values, says_other_values
from autoshard.runtime.transport import generators
from autoshard.runtime.transport.profiling import name_lines

log = logging.getLogger("autoshard")

_FOR_INFERENCE = (
    "the layouts are those of an earlier program, which was for inference; to have them chosen for training call model.train() "
    "before compile(), or give training=True"
)


@dataclass(frozen=True)
class Call:
    """The argument leaves of a call, and the state in which it is made."""

    leaves: Sequence[Any]
    spec: Any
    """pytree structure of (args, kwargs)"""
    state: State
    cuts: Cuts = ()
    """layouts of local inputs, by leaf"""

    keys: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """cached guards, by ``exactly``"""
    programs: dict[int, Executable] = field(default_factory=dict, compare=False, repr=False)
    """number → program that served this call, latest last"""

    def again(self, leaves: Sequence[Any]) -> Call:
        """This call with other ``leaves`` that differ in data only."""
        return Call(leaves, self.spec, self.state, self.cuts, self.keys, self.programs)

    def key(self, number: int = 0, exactly: bool | Callable[[Any], bool] = True) -> Any:
        """The guards; ranks compare them. ``exactly``: see :func:`signature_of`, or per leaf."""
        if exactly not in self.keys:
            one_by_one = exactly if callable(exactly) else None
            found = (signature_of(x, bool(exactly if one_by_one is None else one_by_one(x))) for x in self.leaves)
            self.keys[exactly] = tuple(found)
        return (*self.keys[exactly], self.spec, self.state, number)

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)``"""
        found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(self.leaves, self.spec)
        return found


def difference(key: Any, other: Any) -> str:
    """What differs between two keys of calls, as text for the log."""
    *arguments, state, number = key
    *others, before, tried = other
    parts = ["shapes, dtypes or constants of the arguments"] * (arguments != others)
    parts += [f.name for f in fields(State) if getattr(state, f.name) != getattr(before, f.name)]
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

    attached: tuple[Read, ...] = ()
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
    def feeding(self) -> Feeding:
        """Which outputs feed which others."""
        return feeding(self.graph)

    @cached_property
    def _stops(self) -> bool:
        """Whether a run may find that the program is for other integers or buffers."""
        text = str(self.graph)
        return says_other_values(text) or str(EXACTLY) in text

    def tried(
        self, tensor: Callable[[str], torch.Tensor], inputs: Mapping[str, torch.Tensor]
    ) -> AbstractContextManager[None]:
        """Context of a run: if the program is for other values, draws and writes are undone.

        ``tensor``, ``inputs``: buffers, and written inputs. One program checks before it writes,
        but a stage writes before later stages check.
        """
        if not self._stops:
            return contextlib.nullcontext()
        return _undone([inputs[n] if n in inputs else tensor(n) for n in self.compiled.in_place if self.parts])

    def refuses(self, structure: Any, leaves: Sequence[Any]) -> str:
        """Why it cannot serve a call of this structure with these leaves; "" if it can."""
        if self.structure is None or self.structure != structure:
            return "the arguments differ in more than lengths"
        named = {
            name: form_of(x)[0] for name, x in zip(self.graph.flat_inputs, leaves, strict=True) if name is not None
        }
        if self._serves(tuple(named.values())):
            return ""
        return mismatch(self.graph.types, self.compiled.symbols, named)

    @cached_property
    def _serves(self) -> Callable[[Shapes], bool]:
        names = [name for name in self.graph.flat_inputs if name is not None]
        return check(self.graph.types, self.compiled.symbols, names)

    def apart(self, leaves: Sequence[Any]) -> tuple[Sequence[Any], dict[str, torch.Tensor]]:
        """(leaves with written inputs cloned, written inputs by fqn).

        The values of the program must not see what is written back, unless it writes in place.
        """
        written = self._written
        if not written:
            return leaves, {}
        named = dict(zip(self.graph.flat_inputs, leaves, strict=True))
        for name, fqn in written.items():
            for other, tensor in named.items():
                if other not in (None, name) and overlap(named[name], tensor):
                    raise CaptureError(
                        f"the forward writes in place into its input {fqn!r}, which shares memory with input {other!r}: "
                        "the program would not see the write there. Pass a clone of one of them."
                    )
        aside = {name for name, fqn in written.items() if fqn not in self.compiled.in_place}
        copies = [x.clone() if n in aside else x for n, x in zip(self.graph.flat_inputs, leaves, strict=True)]
        return copies, {fqn: named[name] for name, fqn in written.items()}

    @cached_property
    def _written(self) -> Mapping[str, str]:
        """Name → fqn of inputs that the forward mutates."""
        return {i.name: i.fqn for i in self.graph.inputs if i.kind == "input" and i.fqn in self.graph.mutations}

    def named(self, leaves: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Tensor arguments by input name of the graph."""
        return {n: leaf for n, leaf in zip(self.graph.flat_inputs, leaves, strict=True) if n is not None}

    def as_typed(self, leaves: Sequence[Any]) -> list[Any]:
        """Outputs, detached if the graph gives them no gradient: they share an autograd node."""
        found = list(leaves)
        for i in self._without_gradient:
            x = found[i]
            with torch._C.DisableTorchFunctionSubclass():  # an output's own getter is slow
                is_free = isinstance(x, torch.Tensor) and x.requires_grad
            found[i] = x.detach() if is_free else x
        return found

    @cached_property
    def _without_gradient(self) -> Sequence[int]:
        """Numbers of the outputs without gradient."""
        values = enumerate(self.graph.outputs)
        return [i for i, x in values if isinstance(x, Ref) and not self.graph.types[x.name].grad]

    def shapes(self, inputs: Sequence[torch.Tensor]) -> Sequence[tuple[int, ...] | None]:
        """Global shapes of outputs, then of mutated states, for a call with these ``inputs``.

        None for non-tensors and data-dependent lengths, where every rank has the full tensor.
        """
        found: Sequence[tuple[int, ...] | None] = self._shapes([form_of(x)[0] for x in inputs])
        return found

    def lengths(self, inputs: Sequence[torch.Tensor]) -> Callable[[Sequence[int]], tuple[int, ...]]:
        """A function from symbolic shapes to the shapes of a call with these ``inputs``."""
        shapes = {name: x.shape for name, x in zip(self.compiled.source.inputs, inputs, strict=True)}
        values = bind(self.compiled.symbols, shapes)
        return lambda shape: tuple(evaluate(n, values) for n in shape)

    @cached_property
    def global_shapes(self) -> Sequence[tuple[int, ...] | None]:
        """:meth:`shapes` in the program's symbols."""
        program = self.compiled.program
        names = [*(x.name if isinstance(x, Ref) else None for x in program.outputs), *program.mutations.values()]
        types = [None if name is None else program.types[name] for name in names]
        return [None if t is None or t.unknown else tuple(t.shape) for t in types]

    @cached_property
    def _shapes(self) -> Callable[[Shapes], Any]:
        return shapes_of(self.global_shapes, self.compiled.symbols, self.compiled.source.inputs)


@contextlib.contextmanager
def _undone(written: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, restore generators and ``written`` if the program is for other values."""
    # During CUDA graph capture the device's generator state cannot be read.
    before = generators.states(cuda=torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing())
    values = [x.detach().clone() for x in written]
    try:
        yield
    except RuntimeError as error:
        if is_of_other_values(error):
            generators.set_states(before)
            with torch.no_grad():
                for x, value in zip(written, values, strict=True):
                    x.copy_(value)
        raise


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
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


_loaded = itertools.count()


def load_classes(text: str, modules: Mapping[int, str] | None, names: Sequence[str]) -> tuple[type[Any], ...]:
    """Classes ``names`` of generated source. ``modules``: of its lines, see :class:`Source`.

    Its module stays importable while the first class lives: torch.compile looks up globals there.
    """
    module = types.ModuleType(f"autoshard_rank_module_{next(_loaded)}")
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


def described(graph: Graph, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Input name → shape, dtype, value range, whether it ascends: for synthetic inputs."""
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    found = {}
    for name, x in zip(graph.flat_inputs, leaves, strict=True):
        if name is None:
            continue
        entry: dict[str, Any] = {"shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch.")}
        if not (x.dtype.is_floating_point or x.dtype.is_complex):
            known = x.numel() and not x.is_meta
            low, high = _range(x) if known else (0, 1)
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


def _range(x: torch.Tensor) -> tuple[int, int]:
    """Minimum and maximum of an integer tensor; torch lacks the kernel for wide unsigned types."""
    if x.dtype in (torch.uint16, torch.uint32, torch.uint64):
        numbers = x.detach().cpu().numpy()
        return int(numbers.min()), int(numbers.max())
    return int(x.min()), int(x.max())


def noted(earlier: Mapping[Any, Executable], made: Compiled) -> Compiled:
    """``made``, with a note if its layouts come from ``earlier`` programs for inference."""
    for_training = (e for e in earlier.values() if e.graph.training)
    if not earlier or not made.graph.training or any(_FOR_INFERENCE not in e.compiled.plan.notes for e in for_training):
        return made
    return replace(made, plan=replace(made.plan, notes=(*made.plan.notes, _FOR_INFERENCE)))


def signature_of(leaf: Any, exactly: bool = True) -> Any:
    """Guard of an argument leaf; without ``exactly`` a tensor's lengths are ignored."""
    if isinstance(leaf, torch.Tensor):
        shape, dtype = form_of(leaf)
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
    return constant(leaf)


_PROGRAMS = 16
"""most programs per signature, for inputs whose integers differ: else every call may compile"""

Served = TypeVar("Served")


_OF_INPUTS = "Pad to fixed lengths, or mask."
_OF_BUFFERS = (
    "Compare the buffer itself, as `if self.count < 10`: a number that is read of it, by item() or int(), makes a program of "
    "its own."
)


def first_that_serves(serve: Callable[[int], Served], served: Iterable[int] = ()) -> Served:
    """``serve(number)`` of the first program that fits the integers of inputs and buffers.

    ``served``: numbers that fitted earlier calls, latest last; tried first.
    """
    latest = list(served)[::-1]
    numbers = (*latest, *(n for n in range(_PROGRAMS) if n not in latest))
    for number in numbers:
        try:
            return serve(number)
        except RuntimeError as error:
            if not is_of_other_values(error):
                raise
            if number == numbers[-1]:
                advice = _OF_BUFFERS if OTHER_BUFFERS in str(error) else _OF_INPUTS
                raise RuntimeMismatchError(
                    f"{error}. {_PROGRAMS} programs for inputs of these shapes serve others. {advice}"
                ) from error
            log.info("a program does not serve this call: %s", error)
    raise AssertionError

"""One compiled program: the compiler's stages, the class that every rank runs, and the calls it serves."""

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
    """The tensors and constants in the arguments of a call, and the state in which it is made."""

    leaves: Sequence[Any]
    spec: Any
    """the structure of (args, kwargs)"""
    state: State
    cuts: Cuts = ()
    """per leaf, of one that this process brings its part of: how it is cut"""

    keys: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """those that were asked for"""
    programs: dict[int, Executable] = field(default_factory=dict, compare=False, repr=False)
    """by number, those that served it, the latest last"""

    def again(self, leaves: Sequence[Any]) -> Call:
        """A call that differs from this one in the data of its ``leaves`` alone."""
        return Call(leaves, self.spec, self.state, self.cuts, self.keys, self.programs)

    def key(self, number: int = 0, exactly: bool | Callable[[Any], bool] = True) -> Any:
        """What a program is compiled for; the ranks compare it. ``exactly``: see :func:`signature_of`, of all or by leaf."""
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
    """In which parts two keys of calls differ, in words for a log."""
    *arguments, state, number = key
    *others, before, tried = other
    parts = ["shapes, dtypes or constants of the arguments"] * (arguments != others)
    parts += [f.name for f in fields(State) if getattr(state, f.name) != getattr(before, f.name)]
    return ", ".join(parts + ["integers in tensors"] * (number != tried)) or "tensors of others were written to"


@dataclass
class Executable:
    """One compiled input signature: the compiler's stages and the class of the rank module."""

    compiled: Compiled
    rank_module: type[Any]
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """shape, dtype and value range of every input it was compiled for"""

    carried: Sequence[bool] = ()
    """per output whether it is part of a state that the next call takes"""

    structure: Any = None
    """what calls that it may serve have in common, apart from lengths; None where it serves one signature"""

    parts: tuple[Executable, ...] = ()
    """per stage, where the graph is cut into stages; ``rank_module`` is that of the first"""

    attached: tuple[Read, ...] = ()
    """attributes of parameters and buffers that the forward read, and what they were"""

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
        """Which outputs are computed from which."""
        return feeding(self.graph)

    @cached_property
    def _stops(self) -> bool:
        """Whether a run may end with the finding that it is for other integers or buffers than there are."""
        text = str(self.graph)
        return says_other_values(text) or str(EXACTLY) in text

    def tried(
        self, tensor: Callable[[str], torch.Tensor], inputs: Mapping[str, torch.Tensor]
    ) -> AbstractContextManager[None]:
        """Around a run: where the program turns out to be for other values, nothing was drawn or written.

        ``tensor``, ``inputs``: buffers, and the inputs that are written. One program checks before it writes in place, but
        a stage writes before the next one checks.
        """
        if not self._stops:
            return contextlib.nullcontext()
        return _undone([inputs[n] if n in inputs else tensor(n) for n in self.compiled.in_place if self.parts])

    def refuses(self, structure: Any, leaves: Sequence[Any]) -> str:
        """Why it does not serve a call of this structure with these leaves; "" where it does."""
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
        """The arguments with copies of the tensors that the forward writes to, and these tensors by their fqn.

        The program's values must not see what is written back, unless it writes in place.
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
        """Name → fqn of the arguments that the forward writes to."""
        return {i.name: i.fqn for i in self.graph.inputs if i.kind == "input" and i.fqn in self.graph.mutations}

    def named(self, leaves: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The tensors among the arguments by the names of the graph's inputs."""
        return {n: leaf for n, leaf in zip(self.graph.flat_inputs, leaves, strict=True) if n is not None}

    def as_typed(self, leaves: Sequence[Any]) -> list[Any]:
        """The outputs without the gradients that no value of the graph has: what goes together shares one autograd node."""
        found = list(leaves)
        for i in self._without_gradient:
            x = found[i]
            with torch._C.DisableTorchFunctionSubclass():  # the question alone would go through that of an output
                is_free = isinstance(x, torch.Tensor) and x.requires_grad
            found[i] = x.detach() if is_free else x
        return found

    @cached_property
    def _without_gradient(self) -> Sequence[int]:
        """Numbers of the outputs that have none."""
        values = enumerate(self.graph.outputs)
        return [i for i, x in values if isinstance(x, Ref) and not self.graph.types[x.name].grad]

    def shapes(self, inputs: Sequence[torch.Tensor]) -> Sequence[tuple[int, ...] | None]:
        """The global shapes of the outputs, then of what is written, in a call with these ``inputs``.

        None for what is no tensor, and where a length depends on the data: then the whole is on every rank.
        """
        found: Sequence[tuple[int, ...] | None] = self._shapes([form_of(x)[0] for x in inputs])
        return found

    def lengths(self, inputs: Sequence[torch.Tensor]) -> Callable[[Sequence[int]], tuple[int, ...]]:
        """What turns shapes of the program's values, and of its stages', into those of a call with these ``inputs``."""
        shapes = {name: x.shape for name, x in zip(self.compiled.source.inputs, inputs, strict=True)}
        values = bind(self.compiled.symbols, shapes)
        return lambda shape: tuple(evaluate(n, values) for n in shape)

    @cached_property
    def global_shapes(self) -> Sequence[tuple[int, ...] | None]:
        """:meth:`shapes` over the program's symbols."""
        program = self.compiled.program
        names = [*(x.name if isinstance(x, Ref) else None for x in program.outputs), *program.mutations.values()]
        types = [None if name is None else program.types[name] for name in names]
        return [None if t is None or t.unknown else tuple(t.shape) for t in types]

    @cached_property
    def _shapes(self) -> Callable[[Shapes], Any]:
        return shapes_of(self.global_shapes, self.compiled.symbols, self.compiled.source.inputs)


@contextlib.contextmanager
def _undone(written: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, generators advance and ``written`` change unless the program turns out to be for other values."""
    # Inside the capture of a CUDA graph the device's state cannot be read.
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
    """Whether two tensors have an element of memory in common."""
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
    """The classes of these ``names`` in generated source. ``modules``: of its lines, see :class:`Source`.

    Its module can be imported as long as the first of them lives: torch.compile looks there for the names that a forward reads.
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
    """Input name → shape, dtype and, for integers, the range of values, and whether they ascend as offsets do, for synthetic
    inputs later."""
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
    """The least and the largest element of an integer tensor; wide unsigned types have no such kernel in torch."""
    if x.dtype in (torch.uint16, torch.uint32, torch.uint64):
        numbers = x.detach().cpu().numpy()
        return int(numbers.min()), int(numbers.max())
    return int(x.min()), int(x.max())


def noted(earlier: Mapping[Any, Executable], made: Compiled) -> Compiled:
    """``made`` after ``earlier`` programs, whose layouts it has: its plan says where these were chosen for inference."""
    for_training = (e for e in earlier.values() if e.graph.training)
    if not earlier or not made.graph.training or any(_FOR_INFERENCE not in e.compiled.plan.notes for e in for_training):
        return made
    return replace(made, plan=replace(made.plan, notes=(*made.plan.notes, _FOR_INFERENCE)))


def signature_of(leaf: Any, exactly: bool = True) -> Any:
    """What a program depends on of a leaf; unless ``exactly``, a tensor's lengths do not count."""
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
    except Exception:  # of the class's own __hash__, too
        raise CaptureError(
            f"argument of type {type(leaf).__name__} is neither a tensor nor a hashable constant; "
            "pass tensors in tuples, lists or dicts"
        ) from None
    return constant(leaf)


_PROGRAMS = 16
"""programs for one signature, of inputs whose integers decide otherwise; more would hide that every call compiles one"""

Served = TypeVar("Served")


_OF_INPUTS = "Pad to fixed lengths, or mask."
_OF_BUFFERS = (
    "Compare the buffer itself, as `if self.count < 10`: a number that is read of it, by item() or int(), makes a program of "
    "its own."
)


def first_that_serves(serve: Callable[[int], Served], served: Iterable[int] = ()) -> Served:
    """``serve(number)`` of the first number whose program is for the integers in the inputs, and for the buffers.

    ``served``: numbers that did in earlier calls, the latest last; they come first.
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

"""The graph all passes share: values with types, operations in program order. Frozen; a pass builds a new one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from autoshard.errors import RuleError
from autoshard.frames import place
from autoshard.passes.ir.schema import argument_names, places_and_defaults, tensor_arguments
from autoshard.passes.ir.walk import Applied, map_tree, walk

Parts = tuple[int, tuple[int, ...]]
"""a dim, and the ratio of the lengths of the parts that it is split into"""


class OfRows(NamedTuple):
    """What moves of a sparse gradient: rows, and their numbers."""

    dtype: torch.dtype
    looked_up: int
    """rows in all ranks' parts, at most"""


Moves = bool | torch.dtype | OfRows
"""whether a value's gradient is moved back; a dtype: its own, where that is another than the value's"""


@dataclass(frozen=True, slots=True)
class TensorType:
    """A value's global shape and dtype, and whether a gradient flows through it."""

    shape: tuple[int, ...]
    """a length that differs from call to call is a :class:`~autoshard.passes.ir.sizes.Size`"""
    dtype: torch.dtype
    grad: bool = False
    unknown: tuple[int, ...] = ()
    """dims whose length depends on the data: ``shape`` has an estimate there; they are never cut"""
    number: int | float | None = None
    """an estimate of its value, if it is no tensor but a Python number that depends on the data"""
    permuted: bool = False
    """whether its dims lie in memory in another order than row-major, where that counts: see ``exact.py``"""
    stored: torch.dtype | None = None
    """of a parameter in mixed precision: the dtype it is kept in, and its gradient; None: ``dtype``"""
    summed: torch.dtype | None = None
    """of a parameter in mixed precision: the dtype its gradient is summed in over the ranks; None: ``dtype``"""
    looked_up: int = 0
    """of an embedding table that only look-ups read: how many rows of it they read, at most; else 0"""
    sparse: bool = False
    """whether its gradient is sparse"""
    tables: int = 0
    """of a table, or a matrix of one expert, that may lie whole on one rank: how many may of half its size or more, with it"""
    together: int = 1
    """of such a table: how many look-ups go in one call with one in it, itself included, where all lie so"""
    parts: Parts | None = None
    """a dim that is split later, of each part of which a rank may hold a chunk"""

    def __hash__(self) -> int:  # of what differs most: it is asked for tens of thousands of times
        return hash((self.shape, self.dtype, self.grad))

    @property
    def numel(self) -> int:
        """Elements, in the example where lengths are symbolic."""
        return math.prod(map(int, self.shape))

    @property
    def example(self) -> TensorType:
        """The same with the example's lengths."""
        plain = all(type(n) is int for n in self.shape)
        return self if plain else replace(self, shape=tuple(map(int, self.shape)))

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def kept(self) -> TensorType:
        """The type of a parameter as it is kept."""
        return self if self.stored is None else replace(self, dtype=self.stored)

    @property
    def moves(self) -> Moves:
        """Whether a gradient comes back, and in which dtype where that is another; of a sparse one, how many rows."""
        if self.grad and self.sparse:
            return OfRows(self.kept.dtype, self.looked_up)
        return (self.summed or True) if self.grad else False

    @property
    def updates(self) -> TensorType:
        """The type of what a step changes of a parameter: of a table with sparse gradients the rows that are looked up."""
        rows = [min(int(n), self.looked_up) for n in self.shape[:1]]
        return replace(self, shape=(*rows, *self.shape[1:])) if self.sparse else self

    def __str__(self) -> str:
        short = str(self.dtype).removeprefix("torch.").replace("float", "f").replace("int", "i")
        return f"{short} number" if self.number is not None else f"{short}[{', '.join(self.lengths)}]"

    @property
    def lengths(self) -> tuple[str, ...]:
        """The shape as text: ``~20`` for a length that is an estimate."""
        return tuple(f"~{n}" if d in self.unknown else str(n) for d, n in enumerate(self.shape))


@dataclass(frozen=True, slots=True)
class Ref:
    """A use of a value, wherever it stands in a node's arguments."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Node(Applied):
    """One operation. Tensor operands are the :class:`Ref` in ``args``/``kwargs``, in order of appearance."""

    name: str
    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[str, ...]
    """names of the values it defines; an output that is not a tensor or is never made is not listed"""
    output_slots: tuple[int, ...]
    """position of each of ``outputs`` in the op's result (all 0 for an op with one result)"""
    fqn: str = ""
    """module path"""
    module_types: tuple[tuple[str, str], ...] = ()
    """the module stack, outermost first: (path, class name)"""
    frames: tuple[tuple[str, int], ...] = ()
    """(file, line number) of the user's lines that were running, outermost first"""
    origin: str = ""
    """the op without a rule that it was decomposed from"""
    checkpoint: int = 0
    """number of the ``torch.utils.checkpoint`` that it stands in; 0: it stands in none"""
    order: tuple[int, ...] = ()
    """of a random op: the dims of its operand as they lie in memory, if not as they are numbered"""
    batch: int | None = None
    """of a random op in one of several micro-batches: the dim of what it draws that they share"""

    @cached_property
    def source(self) -> str:
        """The user's innermost ``file:line``, or ""."""
        return place(*self.frames[-1]) if self.frames else ""

    @cached_property
    def known(self) -> dict[Any, Any]:
        """See :func:`~autoshard.passes.ir.known.known_of_node`."""
        return {}

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of tensor operands in order of appearance; a value used twice stands twice."""
        return tuple(ref.name for ref in refs((self.args, self.kwargs)))

    @property
    def given(self) -> list[tuple[str, Any]]:
        """The arguments by name, without those left to their defaults."""
        return [*zip(argument_names(self.op), self.args, strict=False), *self.kwargs.items()]

    @cached_property
    def input_slots(self) -> tuple[int, ...]:
        """Position of the argument of each of ``inputs`` among :func:`tensor_arguments`."""
        names, slots = tensor_arguments(self.op), list[int]()
        for name, value in self.given:
            found = len(list(refs(value)))
            if found and name not in names:
                raise RuleError(f"{self.op}: argument {name!r} takes no tensor, got {value}")
            slots += [names.index(name)] * found if found else []
        return tuple(slots)

    @cached_property
    def positions(self) -> dict[str, int]:
        """Argument name → where its tensor stands in ``inputs``; arguments without a tensor are left out."""
        return {tensor_arguments(self.op)[slot]: i for i, slot in enumerate(self.input_slots)}

    def argument(self, name: str, *absent: Any) -> Any:
        """The value of the op's argument ``name``, or its default; ``absent`` where the op has none such.

        Raises :class:`RuleError` without ``absent``.
        """
        if name in (known := places_and_defaults(self.op)):
            place, default = known[name]
            return self.kwargs.get(name, self.args[place] if place < len(self.args) else default)
        if absent:
            return absent[0]
        raise RuleError(f"{self.op} has no argument {name!r}; it has {[*known]}")

    def with_arguments(self, /, **changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` with some arguments replaced; a missing one is added by name."""
        args, kwargs = list(self.args), dict(self.kwargs)
        known = places_and_defaults(self.op)
        for name, value in changes.items():
            if name not in kwargs and known[name][0] < len(args):
                args[known[name][0]] = value
            else:
                kwargs[name] = value
        return tuple(args), kwargs

    def __str__(self) -> str:
        return f"{', '.join(self.outputs) or '_'} = {show_call(self.op, self)}"


@dataclass(frozen=True, slots=True)
class Input:
    """A value that exists before the first node. ``kind``: parameter, buffer, input or constant."""

    name: str
    kind: str
    fqn: str
    """the parameter's or buffer's original name; for an input its argument path, such as ``labels`` or ``args[0]``"""
    aliases: tuple[str, ...] = ()
    """further names of the same (tied) parameter or buffer"""


@dataclass(frozen=True, slots=True)
class Symbol:
    """A length that may differ from call to call: ``factor`` of it and ``offset`` are a dim of an input."""

    name: str
    value: str
    """the input"""
    dim: int
    factor: int = 1
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Symbols:
    """What a program was not fixed to; empty for one of static shapes."""

    read: tuple[Symbol, ...] = ()
    conditions: tuple[str, ...] = ()
    """Python over the symbols' names: where one does not hold, the program does not"""
    fixed: tuple[str, ...] = ()
    """lengths that were to be open, and are not: which, and why"""


STATIC = Symbols()


@dataclass(frozen=True)
class Graph:
    """A captured program over full (global) tensors. Functional: no op writes to a value."""

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    types: Mapping[str, TensorType]
    outputs: tuple[Any, ...]
    """flat outputs: :class:`Ref` for tensors, anything else is returned as it is; those of ``changed`` are last"""
    out_spec: Any
    """pytree spec that rebuilds the model's own output type from the first of ``outputs``"""
    in_spec: Any
    """pytree spec of ``(args, kwargs)``"""
    mutations: Mapping[str, str] = field(default_factory=dict)
    """fqn of a buffer or an input → value written back to it after the forward"""
    clamped: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    """fqn of a parameter → the least and the greatest that it is clamped to, in place, before the forward; None: no bound"""
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """lifted, by input name"""
    outside: tuple[tuple[torch.Tensor, int], ...] = field(default=(), compare=False, repr=False)
    """what the forward read of tensors with data, and their versions then: of constants, and of what decided a branch"""
    attached: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """(fqn, attribute of it that the forward read)"""
    symbols: Symbols = STATIC
    """the lengths of inputs that types may depend on"""
    flat_inputs: tuple[str | None, ...] = ()
    """per leaf of ``in_spec``: the name of its Input, or None where the leaf is no tensor (baked in)"""
    training: bool = True
    enables: bool = field(default=False, compare=False)
    """whether the forward turns gradients on where its call has them off, of which a graph without a backward has none"""
    handed: tuple[tuple[tuple[Any, ...], tuple[Any, ...]], ...] = field(default=(), compare=False)
    """of objects that are handed in and come out as they are, such as caches: where in ``(args, kwargs)``, and in the output"""
    changed: tuple[tuple[tuple[Any, ...], tuple[Any, ...], Any], ...] = ()
    """of dicts that are handed in, changed, and do not come out: where in ``(args, kwargs)``, which keys they lose, and the
    structure of a dict of what they gain"""
    passes: int = 1
    """how many of it, one after another, are a step: micro-batches"""

    @cached_property
    def is_double(self) -> bool:
        """Whether the model computes in float64: its parameters, or its inputs where it has none."""
        parameters = [self.types[i.name].dtype for i in self.inputs if i.kind == "parameter"]
        return torch.float64 in (parameters or [self.types[i.name].dtype for i in self.inputs])

    @property
    def is_outdated(self) -> bool:
        """Whether a tensor that the forward read outside of its parameters, buffers and inputs was written since."""
        return any(x._version != version for x, version in self.outside)

    @cached_property
    def example(self) -> Graph:
        """The graph with the example's lengths as its types: for costs."""
        if not self.symbols.read:
            return self
        return replace(self, types={n: t.example for n, t in self.types.items()}, symbols=STATIC)

    @cached_property
    def known(self) -> dict[Any, Any]:
        """What one pass found of this graph and another one asks for again."""
        return {}

    @cached_property
    def parameters(self) -> frozenset[str]:
        """Names of the inputs that are parameters."""
        return frozenset(i.name for i in self.inputs if i.kind == "parameter")

    @cached_property
    def fqns(self) -> dict[str, str]:
        """Name of every input → what the model calls it."""
        return {i.name: i.fqn for i in self.inputs}

    @cached_property
    def states(self) -> dict[str, str]:
        """Buffers and inputs that the forward writes and that keep their type: fqn → name.

        Old and new value have one layout.
        """
        names = {i.fqn: i.name for i in self.inputs if i.fqn in self.mutations}
        old_and_new = {fqn: (self.types[old], self.types[self.mutations[fqn]]) for fqn, old in names.items()}
        alike = {
            fqn for fqn, (a, b) in old_and_new.items() if (a.shape, a.dtype, a.unknown) == (b.shape, b.dtype, b.unknown)
        }
        return {fqn: old for fqn, old in names.items() if fqn in alike}

    def renamed(self, names: Mapping[str, str]) -> Graph:
        """The graph in which some values are read, and given back, under other names; what defines them stays."""

        def new(ref: Ref) -> Ref:
            return Ref(names.get(ref.name, ref.name))

        mutations = {fqn: names.get(name, name) for fqn, name in self.mutations.items()}
        nodes, outputs = map_refs((self.nodes, self.outputs), new)
        return replace(self, nodes=nodes, outputs=outputs, mutations=mutations)

    @cached_property
    def returned(self) -> frozenset[str]:
        """Names of the values that it gives back, or writes into buffers and inputs."""
        return frozenset([*(ref.name for ref in refs(self.outputs)), *self.mutations.values()])

    @cached_property
    def producers(self) -> dict[str, Node]:
        """value name → the node that defines it (absent for inputs)."""
        return {out: node for node in self.nodes for out in node.outputs}

    @cached_property
    def uses(self) -> dict[str, tuple[Node, ...]]:
        """value name → nodes that read it, in order, each once."""
        uses: dict[str, list[Node]] = {name: [] for name in self.types}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                uses[name].append(node)
        return {name: tuple(nodes) for name, nodes in uses.items()}

    def shape(self, value: Ref | str) -> tuple[int, ...]:
        """The global shape of a value."""
        return self.types[value.name if isinstance(value, Ref) else value].shape

    def shapes(self, values: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The global shapes of several, such as ``node.inputs``."""
        return tuple(self.types[name].shape for name in values)

    def __str__(self) -> str:
        lines = ["graph(" + ", ".join(f"{i.name}: {self.types[i.name]}" for i in self.inputs) + "):"]
        for node in self.nodes:
            types = ", ".join(str(self.types[o]) for o in node.outputs)
            lines.append(f"    {node}    # {types}  {node.fqn}  {node.source}".rstrip())
        lines.append(f"    return {', '.join(show(o) for o in self.outputs)}")
        lines += [f"    {fqn} ← {name}" for fqn, name in self.mutations.items()]
        return "\n".join(lines)


def refs(tree: Any) -> Iterator[Ref]:
    """All :class:`Ref` in nested arguments and calls, in order."""
    return (item for item in walk(tree) if isinstance(item, Ref))


def map_refs(tree: Any, f: Callable[[Ref], Any]) -> Any:
    """``tree`` with every :class:`Ref` replaced by ``f(ref)``; ``f`` sees them in the order of :func:`refs`."""
    return map_tree(tree, lambda item: f(item) if isinstance(item, Ref) else item)


def show(value: Any) -> str:
    """An argument as text."""
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(show, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{show(k)}: {show(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Ref | Applied):
        return str(value)
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else repr(value)


def show_call(name: object, call: Applied) -> str:
    """``name`` of a call's arguments as text."""
    return f"{name}({', '.join([*map(show, call.args), *(f'{k}={show(v)}' for k, v in call.kwargs.items())])})"

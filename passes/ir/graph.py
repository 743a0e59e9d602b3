"""The graph that all passes share: typed values, and operations in program order.
Graphs are frozen; a pass builds a new one. Nested arguments are read by :func:`walk` and
rewritten by :func:`map_tree`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoshard.errors import RuleError
from autoshard.frames import location_text
from autoshard.torch_private.ops import OpOverload


class CallLike:
    """Base of dataclasses with arguments: operations of a graph, calls on local tensors."""

    __slots__ = ()

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def walk(tree: Any) -> Iterator[Any]:
    """The leaves of nested tuples, lists and dicts, in order; a call, then its arguments."""
    found: list[Any] = []
    _collect_items(tree, found)
    return iter(found)


def _collect_items(tree: Any, found: list[Any]) -> None:
    kind = _CONTAINER_KINDS[type(tree)]
    if kind is None:
        found.append(tree)
    elif kind is CallLike:
        found.append(tree)
        _collect_items(tree.args, found)
        _collect_items(tree.kwargs, found)
    else:
        for item in tree if kind is list else tree.values():
            _collect_items(item, found)


class _ContainerKinds(dict[type, type | None]):
    """Class → how to reach the items of its objects; None: a leaf."""

    def __missing__(self, cls: type) -> type | None:
        kinds = {CallLike: CallLike, tuple: list, list: list, Mapping: dict}
        self[cls] = next((kind for base, kind in kinds.items() if issubclass(cls, base)), None)
        return self[cls]


_CONTAINER_KINDS = _ContainerKinds()


def map_tree(tree: Any, f: Callable[[Any], Any]) -> Any:
    """``tree`` with ``f`` applied to all that :func:`walk` finds, to arguments before calls."""
    kind = _CONTAINER_KINDS[type(tree)]
    if kind is None:
        return f(tree)
    if kind is CallLike:
        call: Any = tree
        return f(replace(call, args=map_tree(tree.args, f), kwargs=map_tree(tree.kwargs, f)))
    if kind is list:
        return type(tree)([map_tree(item, f) for item in tree])
    return {k: map_tree(item, f) for k, item in tree.items()}


@cache
def argument_names(op: OpOverload) -> tuple[str, ...]:
    return tuple(a.name for a in op._schema.arguments)


@cache
def argument_defaults(op: OpOverload) -> dict[str, tuple[int, Any]]:
    """Argument name → (position, default); a missing default is None."""
    return {a.name: (i, a.default_value) for i, a in enumerate(op._schema.arguments)}


@cache
def tensor_arguments(op: OpOverload) -> tuple[str, ...]:
    """Names of the op's arguments that take tensors, in schema order."""
    return tuple(a.name for a in op._schema.arguments if "Tensor" in str(a.type))


DimSegments = tuple[int, tuple[int, ...]]
"""(dim, ratio of the lengths of the segments that it is split into later)"""


class SparseRows(NamedTuple):
    """A sparse gradient as communicated: rows and their indices."""

    dtype: torch.dtype
    looked_up: int
    """upper bound of the number of rows, over all ranks"""


GradientTransfer = bool | torch.dtype | SparseRows
"""whether a gradient is communicated; a dtype, where it differs from the value's"""


@dataclass(frozen=True, slots=True)
class TensorType:
    """Global shape and dtype of a value, whether it has a gradient, facts for rules and costs."""

    shape: tuple[int, ...]
    """dynamic lengths are :class:`~autoshard.passes.ir.sizes.Size`"""
    dtype: torch.dtype
    grad: bool = False
    unknown: tuple[int, ...] = ()
    """dims of data-dependent length: ``shape`` has an estimate there; they are never sharded"""
    number: int | float | None = None
    """estimated value of a data-dependent Python number; None: a tensor"""
    stored: torch.dtype | None = None
    """mixed precision: dtype in which a parameter and its gradient are stored; None: ``dtype``"""
    summed: torch.dtype | None = None
    """mixed precision: dtype in which ranks reduce a parameter's gradient; None: ``dtype``"""
    looked_up: int = 0
    """of an embedding table that only look-ups read: maximal number of rows read; else 0"""
    sparse: bool = False
    """whether its gradient is sparse"""
    tables: int = 0
    """of a table or expert matrix that may be placed table-wise (owned by one rank): the number of
    such tensors of at least half its size, itself included; else 0"""
    together: int = 1
    """of such a table: the number of look-ups in one grouped look-up if all are table-wise"""
    parts: DimSegments | None = None
    """fused dim whose segments may be sharded separately, as of a QKV projection"""

    def __hash__(self) -> int:  # hot: hashes the fields that differ most
        return hash((self.shape, self.dtype, self.grad))

    @property
    def numel(self) -> int:
        """Number of elements, of the example where lengths are symbolic."""
        return math.prod(map(int, self.shape))

    @property
    def example(self) -> TensorType:
        """The type with the lengths of the example."""
        plain = all(type(n) is int for n in self.shape)
        return self if plain else replace(self, shape=tuple(map(int, self.shape)))

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def kept(self) -> TensorType:
        """The type in which a parameter is stored: mixed precision computes in another dtype."""
        return self if self.stored is None else replace(self, dtype=self.stored)

    @property
    def moves(self) -> GradientTransfer:
        """Whether a gradient is communicated, its dtype if that differs, or its rows if sparse."""
        if self.grad and self.sparse:
            return SparseRows(self.kept.dtype, self.looked_up)
        return (self.summed or True) if self.grad else False

    @property
    def updates(self) -> TensorType:
        """The type of a step's update: of a table with sparse gradients only the rows read."""
        rows = [min(int(n), self.looked_up) for n in self.shape[:1]]
        return replace(self, shape=(*rows, *self.shape[1:])) if self.sparse else self

    def __str__(self) -> str:
        short = str(self.dtype).removeprefix("torch.").replace("float", "f").replace("int", "i")
        return f"{short} number" if self.number is not None else f"{short}[{', '.join(self.lengths)}]"

    @property
    def lengths(self) -> tuple[str, ...]:
        """The shape as text: ``~20`` for an estimated length."""
        return tuple(f"~{n}" if d in self.unknown else str(n) for d, n in enumerate(self.shape))


@dataclass(frozen=True, slots=True)
class Ref:
    """A use of a value in the arguments of a node."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Node(CallLike):
    """One operation. Its operands are the :class:`Ref` in ``args`` and ``kwargs``, in order."""

    name: str
    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[str, ...]
    """names of the values it defines, without unused results and results that are no tensors"""
    output_slots: tuple[int, ...]
    """position of each output in the op's result (0 for an op with one result)"""
    fqn: str = ""
    """module path"""
    module_types: tuple[tuple[str, str], ...] = ()
    """the module stack, outermost first: (path, class name)"""
    frames: tuple[tuple[str, int], ...] = ()
    """stack of the user's code, outermost first: (file, line number)"""
    origin: str = ""
    """the op without a sharding rule that this one was decomposed from"""
    checkpoint: int = 0
    """number of the enclosing ``torch.utils.checkpoint`` (activation checkpointing); 0: none"""
    order: tuple[int, ...] = ()
    """of a random op: memory order of the operand's dims, if not row-major; draws follow it"""
    batch: int | None = None
    """of a random op in a micro-batch: the dim of its draw that micro-batches divide"""
    exact: bool = True
    """of dropout: it drops what one device drops; else each shard has a random stream of its own"""

    @cached_property
    def source(self) -> str:
        """Innermost ``file:line`` of the user's code, or ""."""
        return location_text(*self.frames[-1]) if self.frames else ""

    @cached_property
    def known(self) -> dict[Any, Any]:
        """Cache of :func:`~autoshard.passes.ir.analyses.cached_per_node`."""
        return {}

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the operands in order; a value used twice is listed twice."""
        return tuple(ref.name for ref in refs((self.args, self.kwargs)))

    @property
    def values(self) -> tuple[str, ...]:
        """Names of the operands, then of the results."""
        return (*self.inputs, *self.outputs)

    @property
    def given(self) -> list[tuple[str, Any]]:
        """(name, value) of the arguments that are given, defaults left out."""
        return [*zip(argument_names(self.op), self.args, strict=False), *self.kwargs.items()]

    @cached_property
    def input_slots(self) -> tuple[int, ...]:
        """Per entry of ``inputs``, its position in :func:`tensor_arguments`, else
        :class:`RuleError`."""
        names, slots = tensor_arguments(self.op), list[int]()
        for name, value in self.given:
            found = len(list(refs(value)))
            if found and name not in names:
                raise RuleError(f"{self.op}: argument {name!r} takes no tensor, got {value}")
            slots += [names.index(name)] * found if found else []
        return tuple(slots)

    @cached_property
    def positions(self) -> dict[str, int]:
        """Argument name → index of its tensor in ``inputs``; only arguments with a tensor."""
        return {tensor_arguments(self.op)[slot]: i for i, slot in enumerate(self.input_slots)}

    def argument(self, name: str, *absent: Any) -> Any:
        """The value of argument ``name``, else its default, else ``absent``. Raises
        :class:`RuleError` where the op has no such argument and ``absent`` is not given."""
        if name in (known := argument_defaults(self.op)):
            place, default = known[name]
            return self.kwargs.get(name, self.args[place] if place < len(self.args) else default)
        if absent:
            return absent[0]
        raise RuleError(f"{self.op} has no argument {name!r}; it has {[*known]}")

    def with_arguments(self, /, **changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` with some arguments replaced, or added by name."""
        args, kwargs = list(self.args), dict(self.kwargs)
        known = argument_defaults(self.op)
        for name, value in changes.items():
            if name not in kwargs and known[name][0] < len(args):
                args[known[name][0]] = value
            else:
                kwargs[name] = value
        return tuple(args), kwargs

    def __str__(self) -> str:
        return f"{', '.join(self.outputs) or '_'} = {format_call(self.op, self)}"


@dataclass(frozen=True, slots=True)
class Input:
    """A value that exists before the first node. ``kind``: parameter, buffer, input or constant."""

    name: str
    kind: str
    fqn: str
    """name of the parameter or buffer; of an input its path, such as ``labels`` or ``args[0]``"""
    aliases: tuple[str, ...] = ()
    """other names of a tied parameter or buffer"""


@dataclass(frozen=True, slots=True)
class Symbol:
    """A dynamic length: dim ``dim`` of input ``value`` is ``factor`` · symbol + ``offset``."""

    name: str
    value: str
    """name of the input"""
    dim: int
    factor: int = 1
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Symbols:
    """Dynamic lengths of a program, and their guards; empty for static shapes."""

    read: tuple[Symbol, ...] = ()
    conditions: tuple[str, ...] = ()
    """guards, Python expressions of the symbols: a call must fulfil all of them"""
    fixed: tuple[str, ...] = ()
    """lengths that were requested as dynamic and had to be fixed, with the reason"""


STATIC = Symbols()


@dataclass(frozen=True, slots=True)
class OutputView:
    """An output that in eager views another or an input, or is not contiguous; in elements."""

    number: int
    """of the output leaf"""
    of: int
    """number of the output leaf, or of the argument leaf (``is_input``), in whose memory it lies; its own if no other's"""
    is_input: bool
    same: bool
    """whether both are one object"""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """from the first element of the other"""
    memory: tuple[int, ...]
    """strides of the other, for which ``stride`` and ``offset`` are"""


@dataclass(frozen=True)
class Graph:
    """A captured program over full (global) tensors. Functional: no op writes to a value."""

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    types: Mapping[str, TensorType]
    outputs: tuple[Any, ...]
    """flat outputs: :class:`Ref` for tensors, else constants; those of ``changed`` are last"""
    out_spec: Any
    """pytree spec that rebuilds the model's output type from the first ``outputs``"""
    in_spec: Any
    """pytree spec of ``(args, kwargs)``"""
    mutations: Mapping[str, str] = field(default_factory=dict)
    """fqn of a buffer or an input → value written back to it after the forward"""
    clamped: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    """fqn of a parameter → (min, max) of its in-place clamp before the forward; None: no bound"""
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    """input name → tensor that the trace lifted"""
    outside: tuple[tuple[Tensor, int], ...] = field(default=(), compare=False, repr=False)
    """(tensor, version) that the trace read: constants, and tensors that decided a branch"""
    attached: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """(fqn, attribute) of tensors whose own attributes the forward read"""
    fields: frozenset[tuple[type, str]] = field(default=frozenset(), compare=False, repr=False)
    """(class, name) of fields that the forward read from plain objects, such as a configuration"""
    symbols: Symbols = STATIC
    """dynamic lengths of inputs that types depend on"""
    flat_inputs: tuple[str | None, ...] = ()
    """per leaf of ``in_spec``: the name of its Input; None: no tensor, specialized to its value"""
    training: bool = True
    enables_grad: bool = field(default=False, compare=False)
    """whether the forward uses ``enable_grad``, which a graph without a backward leaves out"""
    handed: tuple[tuple[tuple[Any, ...], tuple[Any, ...]], ...] = field(default=(), compare=False)
    """(path in ``(args, kwargs)``, path in the output) of objects passed through: KV caches"""
    changed: tuple[tuple[tuple[Any, ...], tuple[Any, ...], Any], ...] = ()
    """(path in ``(args, kwargs)``, removed keys, pytree spec of new entries) of changed dicts"""
    views: tuple[OutputView, ...] = field(default=(), compare=False)
    """outputs in the memory of others, or of inputs"""
    passes: int = 1
    """number of micro-batches in a step, each one run of this graph"""

    @property
    def is_outdated(self) -> bool:
        """Whether a tensor of ``outside`` was written since the trace."""
        return any(x._version != version for x, version in self.outside)

    @cached_property
    def example(self) -> Graph:
        """The graph with the lengths of the example, for costs."""
        if not self.symbols.read:
            return self
        return replace(self, types={n: t.example for n, t in self.types.items()}, symbols=STATIC)

    @cached_property
    def known(self) -> dict[Any, Any]:
        """Cache of :func:`~autoshard.passes.ir.analyses.cached_per_graph`."""
        return {}

    def of_kind(self, *kinds: str) -> Iterator[Input]:
        """The inputs of these kinds: parameter, buffer, input or constant."""
        return (i for i in self.inputs if i.kind in kinds)

    @cached_property
    def parameters(self) -> frozenset[str]:
        return frozenset(i.name for i in self.of_kind("parameter"))

    @cached_property
    def fqns(self) -> dict[str, str]:
        """Input name → fqn in the model."""
        return {i.name: i.fqn for i in self.inputs}

    @cached_property
    def states(self) -> dict[str, str]:
        """Mutated buffers and inputs that keep type and layout: fqn → name."""
        names = {i.fqn: i.name for i in self.inputs if i.fqn in self.mutations}
        old_and_new = {fqn: (self.types[old], self.types[self.mutations[fqn]]) for fqn, old in names.items()}
        alike = {
            fqn for fqn, (a, b) in old_and_new.items() if (a.shape, a.dtype, a.unknown) == (b.shape, b.dtype, b.unknown)
        }
        return {fqn: old for fqn, old in names.items() if fqn in alike}

    def renamed(self, names: Mapping[str, str]) -> Graph:
        """The graph whose reads, outputs and mutations use new names; definitions keep theirs."""

        def new(ref: Ref) -> Ref:
            return Ref(names.get(ref.name, ref.name))

        mutations = {fqn: names.get(name, name) for fqn, name in self.mutations.items()}
        nodes, outputs = map_refs((self.nodes, self.outputs), new)
        return replace(self, nodes=nodes, outputs=outputs, mutations=mutations)

    @cached_property
    def returned(self) -> frozenset[str]:
        """Names of returned values, mutations included."""
        return frozenset([*(ref.name for ref in refs(self.outputs)), *self.mutations.values()])

    @cached_property
    def producers(self) -> dict[str, Node]:
        """value name → the node that defines it (absent for inputs)."""
        return {out: node for node in self.nodes for out in node.outputs}

    @cached_property
    def uses(self) -> dict[str, tuple[Node, ...]]:
        """value name → the nodes that read it, in program order, each once."""
        uses: dict[str, list[Node]] = {name: [] for name in self.types}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                uses[name].append(node)
        return {name: tuple(nodes) for name, nodes in uses.items()}

    def is_differentiable(self, node: Node) -> bool:
        """Whether a result of ``node`` requires a gradient."""
        return any(self.types[name].grad for name in node.outputs)

    def shape(self, value: Ref | str) -> tuple[int, ...]:
        return self.types[value.name if isinstance(value, Ref) else value].shape

    def shapes(self, values: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The global shapes of several values, such as ``node.inputs``."""
        return tuple(self.types[name].shape for name in values)

    def __str__(self) -> str:
        lines = ["graph(" + ", ".join(f"{i.name}: {self.types[i.name]}" for i in self.inputs) + "):"]
        for node in self.nodes:
            types = ", ".join(str(self.types[o]) for o in node.outputs)
            lines.append(f"    {node}    # {types}  {node.fqn}  {node.source}".rstrip())
        lines.append(f"    return {', '.join(format_argument(o) for o in self.outputs)}")
        lines += [f"    {fqn} ← {name}" for fqn, name in self.mutations.items()]
        return "\n".join(lines)


def refs(tree: Any) -> Iterator[Ref]:
    """All :class:`Ref` in nested arguments and calls, in order."""
    return (item for item in walk(tree) if isinstance(item, Ref))


def map_refs(tree: Any, f: Callable[[Ref], Any]) -> Any:
    """``tree`` with every :class:`Ref` replaced by ``f(ref)``, in the order of :func:`refs`."""
    return map_tree(tree, lambda item: f(item) if isinstance(item, Ref) else item)


def format_argument(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(format_argument, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{format_argument(k)}: {format_argument(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Ref | CallLike):
        return str(value)
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else repr(value)


def format_call(name: object, call: CallLike) -> str:
    """``name(arguments)`` as text."""
    named = (f"{k}={format_argument(v)}" for k, v in call.kwargs.items())
    return f"{name}({', '.join([*map(format_argument, call.args), *named])})"

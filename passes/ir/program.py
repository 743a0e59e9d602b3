"""The program of one rank: statements on local tensors, redistribution steps, and merged calls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from types import MappingProxyType
from typing import Any

from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Assignment
from autoshard.passes.ir.graph import CallLike, Graph, Node, Ref, TensorType, format_argument, format_call, refs
from autoshard.runtime.transport.move import COLLECTIVES
from autoshard.torch_private.ops import OpOverload


@dataclass(frozen=True)
class RedistributionStep:
    """One step of a redistribution: one collective or local call on one group of mesh axes. Bytes
    are those that a rank sends in a ring; uneven shards count as the largest."""

    kind: str
    """function of ``autoshard.runtime``: all_gather, reduce_scatter, all_reduce, all_to_all,
    permute, slice, pad, enter, leave, partial; or reshape"""
    axes: tuple[str, ...]
    """mesh axes of the group, outermost first"""
    src: Layout
    dst: Layout
    shape: tuple[int, ...]
    """global shape"""
    dims: tuple[int, ...] = ()
    """(dim,) of all_gather, reduce_scatter, slice, pad; (source, target) of all_to_all; else ()"""
    order: tuple[str, ...] = ()
    """of a permute: the shard at coordinates along ``axes`` moves to these along ``order``"""
    forward_bytes: float = 0
    backward: str | None = None
    """collective of the backward; None: the backward is local, or there is no gradient"""
    backward_bytes: float = 0
    seconds: float = field(default=0.0, compare=False)
    """predicted time of forward and backward"""
    to_shape: tuple[int, ...] = ()
    """of a reshape: global shape of the result"""

    @property
    def group(self) -> tuple[str, ...]:
        """``axes`` in reports: without axes of size 1; of a permute in mesh order."""
        mesh = self.src.mesh
        axes = mesh.axes if self.kind == "permute" else self.axes
        return tuple(a for a in axes if a in self.axes and mesh.size_of(a) > 1)

    @property
    def is_collective(self) -> bool:
        """Whether the forward communicates."""
        return self.kind in COLLECTIVES

    def __str__(self) -> str:
        if self.kind == "reshape":
            return f"reshape {list(self.shape)} → {list(self.to_shape)}: {self.src} → {self.dst}    local"
        group = ", ".join(self.axes)
        what = f"{self.kind}({group})" if not self.order else f"{self.kind}({group} to {', '.join(self.order)})"
        text = f"{what}: {self.src} → {self.dst}"
        text += f"    {binary_bytes(self.forward_bytes)}" if self.is_collective else "    local"
        if self.backward:
            text += f"; backward {self.backward} {binary_bytes(self.backward_bytes)}"
        return text


@dataclass(frozen=True)
class LocalCall(CallLike):
    """A call on local tensors of an op or, by name, of a function of ``autoshard.runtime``.
    Arguments: :class:`~autoshard.passes.ir.graph.Ref`, literals, :class:`Local`,
    :class:`Offset`, nested calls."""

    fn: OpOverload | str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Local names that it reads, in order."""
        return tuple(ref.name for ref in refs((self.args, self.kwargs)))

    def __str__(self) -> str:
        return format_call(f"runtime.{self.fn}" if isinstance(self.fn, str) else self.fn, self)


SPEC_TYPES = ("AttentionSpec", "ExpertForm")
"""runtime types that a call takes; their fields are keyword arguments of its operation"""


@dataclass(frozen=True, slots=True)
class Local:
    """This rank's length of a dim of global ``size``, sharded along ``axes`` (outer to inner)."""

    size: int
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Offset:
    """Start of this rank's shard of a dim of global ``size``, sharded along ``axes``."""

    size: int
    axes: tuple[str, ...]


def axes_argument(axes: Sequence[str]) -> str | tuple[str, ...]:
    """Mesh axes as an argument in generated code: a string for one axis, else a tuple."""
    return axes[0] if len(axes) == 1 else tuple(axes)


@dataclass(frozen=True, slots=True)
class InternalCollective:
    """A collective inside a local form, which is no redistribution step."""

    kind: str
    axes: tuple[str, ...]
    bytes: float
    """rank 0's operand of an all-reduce, a gathered result, or a received halo; not ring bytes"""
    phase: str
    what: str
    beside: float = 0.0
    """share of the operation's compute in this phase that overlaps with it"""
    spared: int | None = None
    """operand that makes the collective unnecessary: ranks that held it replicated before it was
    sharded know the result"""
    share: float = 1.0
    """its share of the latency; the collectives that are coalesced with it pay the rest"""

    @property
    def kept(self) -> bool:
        """Whether recomputation reuses the forward's result: all-reduced sums are small."""
        return self.kind == "all_reduce" and self.phase == "forward"


@dataclass(frozen=True)
class Statement:
    """``outputs = call`` on every rank."""

    outputs: tuple[str, ...]
    """local names by slot of the call's result; "_": unused"""
    call: LocalCall
    layouts: tuple[Layout | None, ...]
    """per output; None for "_" """
    node: Node | None = None
    """its operation; of a redistribution the operation that reads the result"""
    block: str = ""
    """numbered module whose class emits it, such as ``layers.3``; "": the root"""
    step: RedistributionStep | None = None
    """its redistribution step, if it is one; of merged statements the first one's"""
    value: str = ""
    """of a redistribution: the value of the graph"""
    parameter: bool = False
    """whether it redistributes a parameter from its stored layout"""
    internal: tuple[InternalCollective, ...] = ()
    """collectives inside the local form"""
    again: int = 0
    """number of the recomputed part (activation checkpoint) that it is in; 0: none"""
    dead_after: tuple[str, ...] = ()
    """locals deleted after it: this is their last use (liveness)"""
    members: tuple[Statement, ...] = ()
    """the statements merged into this one, in sequence or side by side"""

    @property
    def parts(self) -> tuple[Statement, ...]:
        """The unmerged statements of which it consists; itself, if it has no members."""
        return tuple(part for m in self.members for part in m.parts) if self.members else (self,)

    @property
    def why(self) -> str:
        """Its origin as text: redistribution step, or module and source line of its operation."""
        if self.step is not None:
            return "" if self.members else str(self.step)
        return "" if self.node is None else f"{self.node.fqn}  {self.node.source}".strip()


@dataclass(frozen=True)
class Program:
    """The program of one rank. Names of ``graph.inputs`` stand for local shards."""

    graph: Graph
    mesh: Mesh
    assignment: Assignment
    statements: tuple[Statement, ...]
    types: Mapping[str, TensorType]
    """local name → global type"""
    layouts: Mapping[str, Layout]
    """local name → layout"""
    outputs: tuple[Any, ...]
    """flat outputs: :class:`Ref` of local names, or constants"""
    mutations: Mapping[str, str]
    """fqn of a mutated buffer or input → local name of its new value"""
    in_place: frozenset[str] = frozenset()
    """fqns in ``mutations`` that are written in place"""

    @cached_property
    def returned(self) -> frozenset[str]:
        """Local names of returned values, mutations included."""
        return frozenset([*(ref.name for ref in refs(self.outputs)), *self.mutations.values()])

    @cached_property
    def values(self) -> dict[str, str]:
        """Local name → the value of the graph that it holds."""
        return {o: part.value or o for s in self.statements for part in s.parts for o in part.outputs}

    def __str__(self) -> str:
        lines = ["program(" + ", ".join(self._typed(i.name) for i in self.graph.inputs) + "):"]
        for block, statements in groupby(self.statements, key=lambda s: s.block):
            lines += [f"  {block}:"] if block else ["  (root):"]
            for s in statements:
                lines.append(
                    f"    {', '.join(map(self._typed, s.outputs)) or '_'} = {s.call}    # {s.why}".rstrip(" #")
                )
                lines += [f"        {part.outputs[0]}: {part.why}" for part in s.parts if s.members]
        lines.append(f"  return {', '.join(format_argument(o) for o in self.outputs)}")
        lines += [f"  {fqn} ← {name}" for fqn, name in self.mutations.items()]
        return "\n".join(lines)

    def _typed(self, name: str) -> str:
        return f"{name}: {self.types[name]} {self.layouts[name]}" if name in self.types else name


def reads(statement: Statement) -> tuple[str, ...]:
    """Local names a statement reads, in order."""
    return statement.call.reads


def binary_bytes(n: float) -> str:
    """Bytes with a binary unit: ``1.5 MiB``."""
    if n < 1024:
        return f"{n:.6g} B"
    power = min(int(math.log(n, 1024)), 4)
    return f"{n / 1024**power:.4g} {('', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


TABLE_WISE = "table_wise"
"""runtime function: look-ups in tables that are placed table-wise"""

POOLED_LOOKUP, POOLED_LOOKUPS = "pooled", "pooled_together"
"""runtime functions: pooled look-up in one table, replicated or sharded, and in several"""

GATHER_PRODUCTS, SCATTER_PRODUCT = "gather_products", "scatter_product"
"""runtime functions of collective matmuls: all-gather + products, product + reduce-scatter"""
COLLECTIVE_MATMULS = frozenset({GATHER_PRODUCTS, SCATTER_PRODUCT})


def merge_statements(
    function: str, members: Sequence[Statement], zero: Mapping[str, int] = MappingProxyType({})
) -> Statement:
    """Redistribution steps of one kind over the same axes as one call of ``function`` (a bucket).
    Arguments but the axes become tuples: ``all_gather(w, 0, "dp", to="R")`` and the same of ``b``
    become ``gather_parameters((w, b), (0, 0), "dp", to="R")``. ``sizes`` holds gathered lengths
    where shards are uneven. ``zero``: see
    :attr:`~autoshard.passes.ir.assignment.Assignment.zero`."""
    if function in _MERGE_FUNCTIONS:
        return _MERGE_FUNCTIONS[function](members)
    first = members[0]
    *dims, axes = zip(*(s.call.args[1:] for s in members), strict=True)
    kwargs = {k: v for k, v in first.call.kwargs.items() if k != "size"}
    if any("size" in s.call.kwargs for s in members):
        kwargs["sizes"] = tuple(s.call.kwargs.get("size") or _gathered_length(s) for s in members)
    if function == "gather_parameters" and first.value in zero:
        kwargs["zero"] = zero[first.value]
    return replace(
        first,
        outputs=tuple(s.outputs[0] for s in members),
        call=LocalCall(function, (tuple(Ref(reads(s)[0]) for s in members), *dims, axes[0]), kwargs),
        layouts=tuple(s.layouts[0] for s in members),
        members=tuple(members),
    )


def _merge_table_lookups(members: Sequence[Statement]) -> Statement:
    """Table-wise look-ups as one grouped look-up: their tuple arguments are concatenated."""
    first, calls = members[0], [s.call for s in members]

    def joint(values: Sequence[Any]) -> Any:
        return tuple(x for value in values for x in value) if isinstance(values[0], tuple) else values[0]

    names = dict.fromkeys(name for call in calls for name in call.kwargs)
    lists = {"offsets", "weights", "padding"}
    kwargs = {n: joint([c.kwargs.get(n, (None,) if n in lists else None) for c in calls]) for n in names}
    args = (*(joint([c.args[i] for c in calls]) for i in range(3)), *first.call.args[3:])
    return _concatenate_results(members, LocalCall(TABLE_WISE, args, kwargs))


def _merge_pooled_lookups(members: Sequence[Statement]) -> Statement:
    """Pooled look-ups in one table each as one grouped look-up."""
    calls = [s.call for s in members]
    tables, indices, modes = zip(*(c.args for c in calls), strict=True)
    kwargs: dict[str, Any] = {}
    if any("padding_idx" in c.kwargs for c in calls):
        kwargs["padding"] = tuple(c.kwargs.get("padding_idx", -1) for c in calls)
    if "axes" in calls[0].kwargs:
        kwargs |= {"sizes": tuple(c.kwargs["size"] for c in calls), "axes": calls[0].kwargs["axes"]}
    return _concatenate_results(members, LocalCall(POOLED_LOOKUPS, (tables, indices, modes[0]), kwargs))


def _concatenate_results(members: Sequence[Statement], call: LocalCall) -> Statement:
    return replace(
        members[0],
        outputs=tuple(o for s in members for o in s.outputs),
        call=call,
        layouts=tuple(x for s in members for x in s.layouts),
        members=tuple(members),
    )


def _merge_gather_products(members: Sequence[Statement]) -> Statement:
    """Collective matmul: an all-gather and the products that read its result."""
    gather, *products = members
    calls = [s.call for s in products]
    kwargs = {k: v for k, v in gather.call.kwargs.items() if k == "size"}
    biases = tuple(c.args[2] if len(c.args) > 2 else None for c in calls)
    if any(b is not None for b in biases):
        kwargs["biases"] = biases
    if gather.again and not products[0].again:
        kwargs["again"] = True
    args = gather.call.args[0], tuple(c.args[1] for c in calls), *gather.call.args[1:]
    return replace(
        products[0],
        outputs=tuple(s.outputs[0] for s in products),
        call=LocalCall(GATHER_PRODUCTS, args, kwargs),
        layouts=tuple(s.layouts[0] for s in products),
        members=tuple(members),
    )


def _merge_scatter_product(members: Sequence[Statement]) -> Statement:
    """Collective matmul: a product and the reduce-scatter of its result."""
    product, scatter = members
    x, weight, *bias = product.call.args
    kwargs = {"bias": bias[0]} if bias and bias[0] is not None else {}
    call = LocalCall(SCATTER_PRODUCT, (x, weight, *scatter.call.args[1:]), kwargs)
    return replace(product, outputs=scatter.outputs, call=call, layouts=scatter.layouts, members=(product, scatter))


_MERGE_FUNCTIONS = {
    TABLE_WISE: _merge_table_lookups,
    POOLED_LOOKUPS: _merge_pooled_lookups,
    GATHER_PRODUCTS: _merge_gather_products,
    SCATTER_PRODUCT: _merge_scatter_product,
}


def fuse_replica_gather(enter: Statement, gather: Statement) -> Statement:
    """I → R over replicas and the all-gather of a shard as one call (hybrid sharding), whose
    backward reduce-scatters, then all-reduces. In mixed precision ``enter`` may be the cast,
    where the gather reduces no gradient."""
    replicas = enter.step.axes if enter.step is not None else ()
    kwargs = {**enter.call.kwargs, **gather.call.kwargs, "replicas": replicas}
    call = LocalCall(gather.call.fn, (enter.call.args[0], *gather.call.args[1:]), kwargs)
    return replace(gather, call=call, members=(enter, gather))


def _gathered_length(s: Statement) -> Any:
    """Local length of the gathered dim afterwards; None where an owner rank knows it alone."""
    step = s.step
    if step is None or step.src.owner:
        return None
    left = step.dst.axes_of(step.dims[0])
    return Local(step.shape[step.dims[0]], left) if left else step.shape[step.dims[0]]

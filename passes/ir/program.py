"""The program of one rank: calls on local tensors, and redistribution steps between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import torch

from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Assignment
from autoshard.passes.ir.graph import Graph, Node, TensorType, refs, show, show_call
from autoshard.passes.ir.walk import Applied
from autoshard.runtime.transport.move import COLLECTIVES


@dataclass(frozen=True)
class Step:
    """One step of a redistribution: one collective or local call on one group of mesh axes.

    Bytes are those that a rank sends in a ring. Where sizes do not divide, every shard counts as
    the largest: all-gather and reduce-scatter pad, all-to-all and permute send at most as much.
    """

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
        text += f"    {bytes_text(self.forward_bytes)}" if self.is_collective else "    local"
        if self.backward:
            text += f"; backward {self.backward} {bytes_text(self.backward_bytes)}"
        return text


@dataclass(frozen=True)
class Call(Applied):
    """A call on local tensors. ``fn``: an op, or the name of a function of ``autoshard.runtime``.

    Arguments are :class:`~autoshard.passes.ir.graph.Ref`, literals, :class:`Local`,
    :class:`Offset`, and nested calls.
    """

    fn: torch._ops.OpOverload | str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Local names that it reads, in order."""
        return tuple(ref.name for ref in refs((self.args, self.kwargs)))

    def __str__(self) -> str:
        return show_call(f"runtime.{self.fn}" if isinstance(self.fn, str) else self.fn, self)


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


def spell(axes: Sequence[str]) -> str | tuple[str, ...]:
    """Mesh axes as an argument in generated code: a string for one axis, else a tuple."""
    return axes[0] if len(axes) == 1 else tuple(axes)


@dataclass(frozen=True, slots=True)
class Internal:
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
    call: Call
    layouts: tuple[Layout | None, ...]
    """per output; None for "_" """
    node: Node | None = None
    """its operation; of a redistribution the operation that reads the result"""
    block: str = ""
    """numbered module whose class emits it, such as ``layers.3``; "": the root"""
    step: Step | None = None
    """its redistribution step, if it is one; of merged statements the first one's"""
    value: str = ""
    """of a redistribution: the value of the graph"""
    parameter: bool = False
    """whether it redistributes a parameter from its stored layout"""
    internal: tuple[Internal, ...] = ()
    """collectives inside the local form"""
    again: int = 0
    """number of the recomputed part (activation checkpoint) that it is in; 0: none"""
    frees: tuple[str, ...] = ()
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
        lines.append(f"  return {', '.join(show(o) for o in self.outputs)}")
        lines += [f"  {fqn} ← {name}" for fqn, name in self.mutations.items()]
        return "\n".join(lines)

    def _typed(self, name: str) -> str:
        return f"{name}: {self.types[name]} {self.layouts[name]}" if name in self.types else name


def reads(statement: Statement) -> tuple[str, ...]:
    """Local names a statement reads, in order."""
    return statement.call.reads


def bytes_text(n: float) -> str:
    """Bytes with a binary unit: ``1.5 MiB``."""
    if n < 1024:
        return f"{n:.6g} B"
    power = min(int(math.log(n, 1024)), 4)
    return f"{n / 1024**power:.4g} {('', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"

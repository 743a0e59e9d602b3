"""What one rank runs: statements of calls on local tensors, and the redistribution steps among them."""

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
    """One runtime call on one group of mesh axes.

    Bytes are ring bytes on the wire per rank; where sizes do not divide, every chunk counts as the largest one. That
    is what an all-gather and a reduce-scatter send, which pad; an all-to-all and a permute send no more than that.
    """

    kind: str
    """the function of ``autoshard.runtime``: all_gather, reduce_scatter, all_reduce, all_to_all, permute, slice, pad,
    enter, leave or partial; or reshape"""
    axes: tuple[str, ...]
    """the group, flattened, first axis outermost"""
    src: Layout
    dst: Layout
    shape: tuple[int, ...]
    """the global shape"""
    dims: tuple[int, ...] = ()
    """(dim,) of all_gather, reduce_scatter, slice and pad; (source dim, target dim) of all_to_all; else empty"""
    order: tuple[str, ...] = ()
    """of a permute: the chunk at coordinates along ``axes`` goes to the same coordinates along ``order``"""
    forward_bytes: float = 0
    backward: str | None = None
    """the collective that the backward runs, None where it is local or there is no gradient"""
    backward_bytes: float = 0
    seconds: float = field(default=0.0, compare=False)
    """forward, and backward where a gradient flows"""
    to_shape: tuple[int, ...] = ()
    """of a reshape: the global shape afterwards"""

    @property
    def group(self) -> tuple[str, ...]:
        """``axes`` as reports name them: without axes of size 1, and in mesh order where a permute renumbers."""
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

    ``args``/``kwargs`` hold :class:`~autoshard.passes.ir.Ref`, literals, :class:`Local`, :class:`Offset`,
    and nested calls.
    """

    fn: torch._ops.OpOverload | str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Local names that it reads, in order: every pass asks for them."""
        return tuple(ref.name for ref in refs((self.args, self.kwargs)))

    def __str__(self) -> str:
        return show_call(f"runtime.{self.fn}" if isinstance(self.fn, str) else self.fn, self)


@dataclass(frozen=True, slots=True)
class Local:
    """A local length: of a global length ``size`` cut by ``axes`` (outer to inner). A literal where even."""

    size: int
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Offset:
    """Where this rank's chunk of a global length ``size`` cut by ``axes`` starts."""

    size: int
    axes: tuple[str, ...]


def spell(axes: Sequence[str]) -> str | tuple[str, ...]:
    """Mesh axes as generated code names them: one alone, several as a tuple."""
    return axes[0] if len(axes) == 1 else tuple(axes)


@dataclass(frozen=True, slots=True)
class Internal:
    """A collective inside a local form: no redistribution shows it."""

    kind: str
    axes: tuple[str, ...]
    bytes: float
    """what an all-reduce reduces on rank 0, the gathered whole, or what a halo or a permute brings; not ring bytes"""
    phase: str
    what: str
    beside: float = 0.0
    """the share of the operation's own compute in this phase that runs while it goes"""
    spared: int | None = None
    """the operand from which every rank knows the result by itself, if it had that operand whole before it was cut"""
    share: float = 1.0
    """of its latency; others pay the rest, which go in one call with it"""

    @property
    def kept(self) -> bool:
        """Whether an operation that is computed again has the result from the forward: a sum is small beside what it is of."""
        return self.kind == "all_reduce" and self.phase == "forward"


@dataclass(frozen=True)
class Statement:
    """``outputs = call`` on every rank."""

    outputs: tuple[str, ...]
    """local names, by slot of the call's result; "_" where it is not needed"""
    call: Call
    layouts: tuple[Layout | None, ...]
    """per output; None for "_" """
    node: Node | None = None
    """the operation it comes from; for a redistribution the reader it was made for"""
    block: str = ""
    """the numbered module whose class it is emitted in, such as ``layers.3``; "" for the root"""
    step: Step | None = None
    """the redistribution step it is, if it is one; where several are merged, that of the first"""
    value: str = ""
    """for a redistribution: the value"""
    parameter: bool = False
    """whether it brings a parameter from its stored layout into the layout of use"""
    internal: tuple[Internal, ...] = ()
    """collectives inside an op's local form"""
    again: int = 0
    """number of the part that runs again in the backward, to which it belongs; 0: it does not"""
    frees: tuple[str, ...] = ()
    """locals that are deleted after it"""
    members: tuple[Statement, ...] = ()
    """the statements that this one has been made of, one after another or side by side"""

    @property
    def parts(self) -> tuple[Statement, ...]:
        """The statements of one step each that do the same one after another: itself, where it has no members."""
        return tuple(part for m in self.members for part in m.parts) if self.members else (self,)

    @property
    def why(self) -> str:
        """What it is there for, as text: its redistribution step, or where the operation stands in the model."""
        if self.step is not None:
            return "" if self.members else str(self.step)
        return "" if self.node is None else f"{self.node.fqn}  {self.node.source}".strip()


@dataclass(frozen=True)
class Program:
    """What one rank runs. Names of ``graph.inputs`` stand for local parameters and inputs."""

    graph: Graph
    mesh: Mesh
    assignment: Assignment
    statements: tuple[Statement, ...]
    types: Mapping[str, TensorType]
    """global type of every local name"""
    layouts: Mapping[str, Layout]
    """layout of every local name"""
    outputs: tuple[Any, ...]
    """flat outputs: :class:`Ref` to local names, or constants"""
    mutations: Mapping[str, str]
    """fqn of a buffer or input that is written → local name of its new value"""
    in_place: frozenset[str] = frozenset()
    """those of them whose new value is the old one, written to"""

    @cached_property
    def returned(self) -> frozenset[str]:
        """Local names that it gives back."""
        return frozenset([*(ref.name for ref in refs(self.outputs)), *self.mutations.values()])

    @cached_property
    def values(self) -> dict[str, str]:
        """Local name → the value of the graph that it holds in some layout."""
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
    """Bytes as a person reads them."""
    if n < 1024:
        return f"{n:.6g} B"
    power = min(int(math.log(n, 1024)), 4)
    return f"{n / 1024**power:.4g} {('', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"

"""What was chosen for a graph: a strategy per operation and mesh axis, and the layouts that follow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal

from autoshard.layout import Grouped, I, Invariant, Layout, Owned, Partial, Placement, R, Shard, chunk
from autoshard.mesh import Mesh
from autoshard.passes.ir.graph import Graph, Node, Ref
from autoshard.passes.ir.sizes import Size
from autoshard.passes.search.network import Solution

Placements = tuple[Placement, ...]
"""one placement per mesh axis, nested in mesh order"""


def canonical(placement: Placement, grad: bool) -> Placement:
    """Where no gradient flows, Invariant and Replicate are one."""
    return R if isinstance(placement, Invariant) and not grad else placement


@lru_cache(maxsize=16384)
def laid_out(mesh: Mesh, placements: Placements) -> Layout:
    """``Layout(mesh, placements)``, one object for all that lie so: what is asked of it is found once."""
    return Layout(mesh, placements)


def is_whole(placements: Placements) -> bool:
    """Whether a rank has all of such a value."""
    return not any(isinstance(p, Shard | Partial) for p in placements)


def stated(name: str, graph: Graph, mesh: Mesh, given: Mapping[str, Layout]) -> Layout:
    """The layout in which an input comes, ``given`` or whole; whole axes as its gradient wants them."""
    whole = I if graph.types[name].grad else R
    layout = given.get(name, Layout(mesh))
    return Layout(mesh, [p if isinstance(p, Shard) else whole for p in layout.placements], layout.order)


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run an op along one mesh axis; strategies of several axes combine freely.

    ``inputs``: a placement per entry of ``node.inputs``; ``outputs``: one per entry of ``node.outputs``.
    """

    label: str
    """"I", "R", "P(…)" or the factor's name, with the number of its parts where each is cut; the lowering looks at it"""
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    size: int | None = None
    """the factor's length: the axes on it may not outnumber it. None for strategies that divide nothing"""
    even: bool = False
    """the axes on this factor must divide ``size`` (compound dims of a reshape)"""
    divides: bool = False
    """whether the op's work is divided by the axis"""
    least: int = 0
    """what every rank must hold of the factor at least: 1 where the op's kernel takes no empty part"""
    apart: frozenset[str] = frozenset()
    """labels of strategies that no other axis may have beside it"""

    joins: Literal["all", "results", "none"] = "all"
    """which of the dims that it cuts are one: those of operands and results; of results, where operands give no data; none,
    where operands travel between ranks"""

    alone: bool = False
    """whether no other axis may be on the factor"""

    innermost: bool = False
    """whether no axis inside of its own may cut results as it does, by another strategy"""

    work: tuple[str, int] | None = None
    """(factor, its length) whose chunks the work is divided by, where that is not its own: experts, to which rows travel.
    The axes on it may not outnumber it either"""

    ranks: int | None = None
    """how many ranks all axes on the factor must have together, where it is of as many"""

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Of operands, then of results."""
        return (*self.inputs, *self.outputs)

    @property
    def in_parts(self) -> bool:
        """Whether it cuts every part of a dim."""
        return any(isinstance(p, Grouped) for p in self.placements)

    @property
    def factor(self) -> str:
        """The label, without a number of parts."""
        return self.label.partition("/")[0]

    def allows(self, ranks: Sequence[int]) -> bool:
        """Whether axes of these sizes, outer to inner, may all be on the factor."""
        if self.size is None:
            return True
        count = math.prod(ranks)
        if int(self.size) < count or (self.even and self.size % count):
            return False
        if not self.least or (self.least == 1 and self.size % count == 0):
            return True
        return not isinstance(self.size, Size) and _least(self.size, tuple(ranks)) >= self.least


def together(choice: Sequence[Strategy]) -> bool:
    """Whether no axis excludes the strategy of another."""
    labels = {s.label for s in choice}
    inside = (t for i, s in enumerate(choice) if s.innermost for t in choice[i + 1 :] if t.label != s.label)
    if any(not labels.isdisjoint(s.apart) for s in choice) or any(t.outputs == (Shard(0),) for t in inside):
        return False
    return not any(s.in_parts for s in choice) or all(map(_one_cut, zip(*(s.placements for s in choice), strict=True)))


def _one_cut(placements: Placements) -> bool:
    """Whether axes that cut every part of a dim are the only ones that cut it."""
    grouped = {p for p in placements if isinstance(p, Grouped)}
    return all(p in grouped or p.dim not in {g.dim for g in grouped} for p in placements if isinstance(p, Shard))


def _least(size: int, ranks: tuple[int, ...]) -> int:
    """The shortest chunk of ``size`` cut by axes of these sizes, outer to inner."""
    if not ranks:
        return size
    return min(_least(chunk(size, ranks[0], r)[1], ranks[1:]) for r in (0, ranks[0] - 1))


def used(choice: Sequence[Strategy], operand: int, grad: bool) -> Placements:
    """How an operation reads an operand under ``choice``, one strategy per mesh axis. ``grad``: of the operand."""
    return tuple(canonical(s.inputs[operand], grad) for s in choice)


def made(choice: Sequence[Strategy], result: int, grad: bool) -> Placements:
    """How an operation makes a result under ``choice``, one strategy per mesh axis. ``grad``: of the result."""
    return tuple(canonical(s.outputs[result], grad) for s in choice)


@dataclass(frozen=True)
class Assignment:
    """A solved graph. Layouts of definitions, shared layouts, and every node's strategies (one per mesh axis)."""

    graph: Graph
    mesh: Mesh
    layouts: Mapping[str, Layout]
    """value → the layout it is defined in"""
    shared: Mapping[str, Layout]
    """value → the layout its readers convert from (only values with several readers)"""
    choices: Mapping[str, tuple[Strategy, ...]]
    """node → its strategy along every mesh axis"""
    outputs: tuple[Layout | None, ...]
    """per flat output: the layout it is returned in; None for outputs that are no tensors"""
    solution: Solution
    given: frozenset[str] = frozenset()
    """values whose layout was asked for, by a hint or by an earlier compilation"""
    again: Mapping[str, int] = field(default_factory=dict)
    """node → 1: the conversions of its operands are made again in the backward, and what it drew is drawn again; 2: it is
    computed again, from operands that are converted again; absent: what autograd keeps of it is kept"""
    shared_again: frozenset[str] = frozenset()
    """values whose conversion into the shared layout is made again in the backward"""
    zero: Mapping[str, int] = field(default_factory=dict)
    """parameter → ZeRO stage 1 or 2: gathered once a step, and kept until the backward has used it; absent: the backward
    gathers it again (stage 3). In a step of several micro-batches stage 1 reduces its gradient once, 2 in every one"""

    @cached_property
    def pinned(self) -> frozenset[str]:
        """Given values whose readers convert from the shared layout only, whatever else exists."""
        return self.given & self.shared.keys()

    def source(self, value: str) -> Layout:
        """The layout that readers of ``value`` convert from."""
        return self.shared.get(value) or self.layouts[value]

    @cached_property
    def _used(self) -> dict[tuple[int, int, bool], tuple[tuple[Strategy, ...], Placements, bool]]:
        """By a choice's id, an operand, and whether that has a gradient: the choice, how it reads, and whether one rank owns
        that. Equal layers have one choice."""
        return {}

    def use(self, node: Node, operand: int) -> Placements:
        """How ``node`` reads operand number ``operand``."""
        choice, grad = self.choices[node.name], self.graph.types[node.inputs[operand]].grad
        known, found, owned = self._used.get(key := (id(choice), operand, grad), ((), (), False))
        if known is not choice:
            found = used(choice, operand, grad)
            owned = any(isinstance(p, Owned) for p in found)
            self._used[key] = choice, found, owned
        if not owned:
            return found
        held = self.source(node.inputs[operand]).placements  # whichever rank it is that owns it
        return tuple(
            h if isinstance(p, Owned) and isinstance(h, Owned) else p for p, h in zip(found, held, strict=True)
        )

    def made(self, node: Node, result: int) -> Placements:
        """How ``node`` makes result number ``result``."""
        return made(self.choices[node.name], result, self.graph.types[node.outputs[result]].grad)

    def placed(self, node: Node) -> tuple[Placements, ...]:
        """How ``node`` reads every operand, then how it makes every result."""
        operands = (self.use(node, i) for i in range(len(node.inputs)))
        return *operands, *(self.made(node, i) for i in range(len(node.outputs)))

    def on(self, mesh: Mesh) -> Assignment:
        """The same choices on ``mesh``, whose axes have other names; its shape is the same."""

        def moved(layouts: Mapping[str, Layout]) -> dict[str, Layout]:
            return {name: x.on(mesh) for name, x in layouts.items()}

        outputs = tuple(None if x is None else x.on(mesh) for x in self.outputs)
        return replace(self, mesh=mesh, layouts=moved(self.layouts), shared=moved(self.shared), outputs=outputs)

    def written(self, fqn: str) -> Layout:
        """The layout of the new value of a buffer or input that the forward writes. What has another type is whole."""
        old = self.graph.states.get(fqn)
        return Layout(self.mesh) if old is None else self.layouts[old].without_gradient()

    def __str__(self) -> str:
        """A line per value or operation: the layout it lies in, what is cut along each axis, what is converted."""
        lines = [self._defined(i.name) for i in self.graph.inputs]
        for node in self.graph.nodes:
            made = ", ".join(map(self._defined, node.outputs)) or "_"
            labels = " ".join(f"{s.label}@{a}" for s, a in zip(self.choices[node.name], self.mesh.axes, strict=True))
            reads = (self._read(n, Layout(self.mesh, self.use(node, i))) for i, n in enumerate(node.inputs))
            lines.append(f"{made} = {node.op}({', '.join(reads)})    [{labels}]")
        pairs = zip(self.graph.outputs, self.outputs, strict=True)
        outs = (self._read(o.name, x) if isinstance(o, Ref) and x is not None else repr(o) for o, x in pairs)
        lines.append(f"return {', '.join(outs)}")
        return "\n".join(lines + [f"{n} ← {self._read(v, self.written(n))}" for n, v in self.graph.mutations.items()])

    def _defined(self, value: str) -> str:
        shared = self.shared.get(value, self.layouts[value])
        return f"{value}: {self.layouts[value]}" + (f", shared: {shared}" if shared != self.layouts[value] else "")

    def _read(self, value: str, layout: Layout) -> str:
        source = self.source(value)
        return value if source == layout else f"{value}: {source} → {layout}"

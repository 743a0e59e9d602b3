"""Assignment: a strategy per operation and mesh axis, and the layouts that follow from them."""

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


def normalize_placement(placement: Placement, grad: bool) -> Placement:
    """``placement``; Invariant becomes Replicate where no gradient flows: both are equal then."""
    return R if isinstance(placement, Invariant) and not grad else placement


@lru_cache(maxsize=16384)
def cached_layout(mesh: Mesh, placements: Placements) -> Layout:
    """``Layout(mesh, placements)``, interned, so that cached properties are computed once."""
    return Layout(mesh, placements)


def is_fully_replicated(placements: Placements) -> bool:
    """Whether every rank holds the full value: no axis shards it or leaves partial sums."""
    return not any(isinstance(p, Shard | Partial) for p in placements)


def input_layout(name: str, graph: Graph, mesh: Mesh, given: Mapping[str, Layout]) -> Layout:
    """Layout of an input, ``given`` or replicated; unsharded axes: I with a gradient, else R."""
    whole = I if graph.types[name].grad else R
    layout = given.get(name, Layout(mesh))
    return Layout(mesh, [p if isinstance(p, Shard) else whole for p in layout.placements], layout.order)


@dataclass(frozen=True, slots=True)
class Strategy:
    """One sharding strategy of an op along one mesh axis; strategies of several axes combine. A
    placement per entry of ``node.inputs`` and ``node.outputs``."""

    label: str
    """"I", "R", "P(…)" or the factor's name, and "/n" where each of n segments is sharded"""
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    size: int | None = None
    """the factor's length, which divides the compute; at least the number of ranks on it; None: the
    strategy shards nothing"""
    even: bool = False
    """whether the number of ranks on this factor must divide ``size``, as in a reshape"""
    divides: bool = False
    """whether the axis divides the op's compute"""
    nonempty: bool = False
    """whether the op's kernel takes no empty shard of the factor"""
    apart: frozenset[str] = frozenset()
    """labels of strategies that other axes may not take together with this one"""

    joins: Literal["all", "results", "none"] = "all"
    """which sharded dims are one dim: "all": of operands and results; "results": operands give no
    data; "none": operands move between ranks"""

    alone: bool = False
    """whether no other axis may shard the factor"""

    innermost: bool = False
    """whether no inner mesh axis may shard dim 0 of the result by another strategy"""

    most: int | None = None
    """the most ranks on the factor, where that is less than its length"""

    work: tuple[str, int] | None = None
    """(factor, length) that divides the compute, where it is another: experts in an all-to-all
    dispatch; the length is at least the number of ranks"""

    ranks: int | None = None
    """the required number of ranks of all axes on the factor together; None: any"""

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Placements of operands, then of results."""
        return (*self.inputs, *self.outputs)

    @property
    def in_parts(self) -> bool:
        """Whether it shards a dim segment by segment."""
        return any(isinstance(p, Grouped) for p in self.placements)

    @property
    def factor(self) -> str:
        """The label without the number of segments."""
        return self.label.partition("/")[0]

    def allows(self, ranks: Sequence[int]) -> bool:
        """Whether mesh axes of these sizes, outer to inner, may all shard the factor."""
        if self.size is None:
            return True
        count = math.prod(ranks)
        if count > int(self.size) or (self.most is not None and count > self.most) or (self.even and self.size % count):
            return False
        if not self.nonempty or self.size % count == 0:
            return True
        return not isinstance(self.size, Size) and _shortest_chunk(self.size, tuple(ranks)) > 0


def is_dividing_label(label: str) -> bool:
    """Whether a strategy with this label shards a factor: not I, R, P(…), – (of stages)."""
    return label not in ("I", "R", "–") and not label.startswith("P(")


def can_combine_axes(choice: Sequence[Strategy]) -> bool:
    """Whether these strategies, one per mesh axis, exclude none of each other."""
    labels = {s.label for s in choice}
    inside = (t for i, s in enumerate(choice) if s.innermost for t in choice[i + 1 :] if t.label != s.label)
    if any(not labels.isdisjoint(s.apart) for s in choice) or any(t.outputs == (Shard(0),) for t in inside):
        return False
    return not any(s.in_parts for s in choice) or all(
        map(_is_grouped_alone, zip(*(s.placements for s in choice), strict=True))
    )


def _is_grouped_alone(placements: Placements) -> bool:
    """Whether a dim that is sharded segment by segment is sharded in no other way."""
    grouped = {p for p in placements if isinstance(p, Grouped)}
    return all(p in grouped or p.dim not in {g.dim for g in grouped} for p in placements if isinstance(p, Shard))


def _shortest_chunk(size: int, ranks: tuple[int, ...]) -> int:
    """The shortest shard of ``size`` along mesh axes of these sizes, outer to inner."""
    if not ranks:
        return size
    return min(_shortest_chunk(chunk(size, ranks[0], r)[1], ranks[1:]) for r in (0, ranks[0] - 1))


def operand_placements(choice: Sequence[Strategy], operand: int, grad: bool) -> Placements:
    """Placements in which an operation reads an operand. ``grad``: whether that has a gradient."""
    return tuple(normalize_placement(s.inputs[operand], grad) for s in choice)


def result_placements(choice: Sequence[Strategy], result: int, grad: bool) -> Placements:
    """Placements in which an operation makes a result; see :func:`operand_placements`."""
    return tuple(normalize_placement(s.outputs[result], grad) for s in choice)


@dataclass(frozen=True)
class Assignment:
    """A solved graph: a strategy per node and mesh axis, and the layouts of all values."""

    graph: Graph
    mesh: Mesh
    layouts: Mapping[str, Layout]
    """value → the layout in which its producer makes it"""
    shared: Mapping[str, Layout]
    """value → the layout its readers redistribute from (only values with several readers)"""
    choices: Mapping[str, tuple[Strategy, ...]]
    """node → its strategy along every mesh axis"""
    outputs: tuple[Layout | None, ...]
    """per flat output: its layout; None for outputs that are no tensors"""
    solution: Solution
    given: frozenset[str] = frozenset()
    """values whose layout a hint or an earlier compilation fixed"""
    again: Mapping[str, int] = field(default_factory=dict)
    """recomputation (rematerialization), per node. 1: the backward repeats the redistributions of
    its operands and its random draws; 2: it is recomputed, too; absent: it is kept"""
    shared_again: frozenset[str] = frozenset()
    """values whose redistribution into the shared layout the backward repeats"""
    zero: Mapping[str, int] = field(default_factory=dict)
    """parameter → ZeRO stage 1 or 2: gathered once per step; absent: stage 3, the backward gathers
    it again. Stage 1 reduces its gradient once per step, stage 2 in every micro-batch"""
    offloaded: tuple[str, ...] = ()
    """blocks (``layers.3``) whose saved tensors are in host memory until the backward"""

    @cached_property
    def pinned(self) -> frozenset[str]:
        """Given values with a shared layout: their readers redistribute from that layout only."""
        return self.given & self.shared.keys()

    def source(self, value: str) -> Layout:
        """The layout that readers of ``value`` redistribute from."""
        return self.shared.get(value) or self.layouts[value]

    @cached_property
    def _used(self) -> dict[tuple[int, int, bool], tuple[tuple[Strategy, ...], Placements, bool]]:
        """Cache of :meth:`use`: (id of choice, operand, grad) → (choice, placements, has Owned)."""
        return {}

    def use(self, node: Node, operand: int) -> Placements:
        """Placements in which ``node`` reads operand number ``operand``."""
        choice, grad = self.choices[node.name], self.graph.types[node.inputs[operand]].grad
        known, found, owned = self._used.get(key := (id(choice), operand, grad), ((), (), False))
        if known is not choice:
            found = operand_placements(choice, operand, grad)
            owned = any(isinstance(p, Owned) for p in found)
            self._used[key] = choice, found, owned
        if not owned:
            return found
        held = self.source(node.inputs[operand]).placements  # the owner is that of the operand
        return tuple(
            h if isinstance(p, Owned) and isinstance(h, Owned) else p for p, h in zip(found, held, strict=True)
        )

    def made(self, node: Node, result: int) -> Placements:
        """Placements in which ``node`` makes result number ``result``."""
        return result_placements(self.choices[node.name], result, self.graph.types[node.outputs[result]].grad)

    def placed(self, node: Node) -> tuple[Placements, ...]:
        """Placements of all operands of ``node``, then of all results."""
        operands = (self.use(node, i) for i in range(len(node.inputs)))
        return *operands, *(self.made(node, i) for i in range(len(node.outputs)))

    def on(self, mesh: Mesh) -> Assignment:
        """The same choices on ``mesh``, which has the same shape and other axis names."""

        def moved(layouts: Mapping[str, Layout]) -> dict[str, Layout]:
            return {name: x.on(mesh) for name, x in layouts.items()}

        outputs = tuple(None if x is None else x.on(mesh) for x in self.outputs)
        return replace(self, mesh=mesh, layouts=moved(self.layouts), shared=moved(self.shared), outputs=outputs)

    def written(self, fqn: str) -> Layout:
        """The layout of the new value of a mutated buffer or input; replicated on a new type."""
        old = self.graph.states.get(fqn)
        return Layout(self.mesh) if old is None else self.layouts[old].without_gradient()

    def __str__(self) -> str:
        """A line per value or operation: layouts, strategies per axis, redistributions."""
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

"""What a compilation gives: every stage of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from autoshard.layout import Layout
from autoshard.passes.codegen import Source
from autoshard.passes.ir.graph import Graph, Symbols
from autoshard.passes.ir.program import Program
from autoshard.passes.microbatch import MicroBatches
from autoshard.passes.pipeline import Stages
from autoshard.plans.plan import Plan


@dataclass(frozen=True)
class Compiled:
    """All stages of one compilation; each prints itself."""

    graph: Graph
    program: Program
    plan: Plan
    write: Callable[[], Source]
    """makes :attr:`source`: who asks for a plan alone needs none"""
    micro_batches: MicroBatches | None = None
    """where the step runs in several: the other stages are those of one of them"""
    pipeline: Stages | None = None
    """where the graph is cut along an axis of the mesh; then ``program`` and ``source`` are those of the first stage"""
    parts: tuple[Compiled, ...] = ()
    """per stage of the pipeline; their ``source`` is one file"""

    @cached_property
    def source(self) -> Source:
        """The emitted file."""
        return self.write()

    @property
    def in_place(self) -> frozenset[str]:
        """Buffers and inputs that are written where they lie."""
        return frozenset().union(*(part.program.in_place for part in self.parts or (self,)))

    @property
    def symbols(self) -> Symbols:
        """The lengths it was not fixed to, and what must hold of them."""
        if not self.parts:
            return self.program.graph.symbols
        conditions = (c for part in self.parts for c in part.symbols.conditions)
        return replace(self.graph.symbols, conditions=tuple(dict.fromkeys(conditions)))

    @property
    def parameter_layouts(self) -> dict[str, Layout]:
        """Original name of a parameter or buffer → its layout on the mesh that programs run on."""
        layouts: dict[str, Layout] = {}
        for part in self.parts or (self,):
            layouts |= part.plan.layouts
        names = [i.fqn for i in self.graph.inputs if i.kind in ("parameter", "buffer")]
        whole = Layout((self.parts or (self,))[0].plan.mesh)
        return {name: layouts.get(name, whole) for name in names}

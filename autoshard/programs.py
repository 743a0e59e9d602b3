"""What a compilation gives: every stage of it."""

from __future__ import annotations

from dataclasses import dataclass

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
    source: Source
    micro_batches: MicroBatches | None = None
    """where the step runs in several: the other stages are those of one of them"""
    pipeline: Stages | None = None
    """where the graph is cut along an axis of the mesh; then ``program`` and ``source`` are those of the first stage"""
    parts: tuple[Compiled, ...] = ()
    """per stage of the pipeline; their ``source`` is one file"""

    @property
    def symbols(self) -> Symbols:
        """The lengths it was not fixed to, and what must hold of them."""
        return self.program.graph.symbols

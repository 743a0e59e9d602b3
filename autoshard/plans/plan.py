"""Results of a compilation: the plan as a user holds it, and all stages of the compilation."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from autoshard.exports import Exported, export
from autoshard.layout import Layout
from autoshard.passes.codegen import Source
from autoshard.passes.ir.graph import Graph, Symbols
from autoshard.passes.ir.program import Program
from autoshard.passes.microbatch import MicroBatches
from autoshard.passes.pipeline import Stages
from autoshard.report.explain import diff, explain
from autoshard.report.record import Record
from autoshard.report.text import plan_html, plan_text, short_text
from autoshard.report.tp_plan import TpPlan, tp_plan
from autoshard.viz import visualize


@dataclass(frozen=True, repr=False)
class Plan(Record):
    """All choices for a model on a mesh; ``str()`` gives a summary that fits on one screen."""

    def __str__(self) -> str:
        return plan_text(self, level="short")

    def report(self, level: str = "full") -> str:
        """The plan as text: "short", as :func:`print` shows it, or "full", with all tables and rows.

        Raises :class:`PlanError` for another level.
        """
        return plan_text(self, level=level)

    def __repr__(self) -> str:
        return f"<Plan: {short_text(self)}>"

    def _repr_html_(self) -> str:
        return plan_html(self)

    def explain(self, name: str) -> str:
        """Reasons and alternatives for a parameter, module (fnmatch pattern) or operation."""
        return explain(self, name)

    def diff(self, other: Record) -> str:
        """Differences to ``other``: cost, memory, layouts, operations and collectives."""
        return diff(self, other)

    def to_tp_plan(self, axis: str | None = None) -> TpPlan:
        """Module pattern → style, as in transformers' ``tp_plan``; ``.unsaid``: the rest.

        ``axis``: the mesh axis, by default the only one, or ``tp``.
        """
        return tp_plan(self, axis)

    def export(self, kind: str) -> Exported:
        """The plan as configuration of another engine; ``.unsaid``: what the engine cannot say.

        ``kind``: "torch", "transformers", "torchtitan", "megatron", "deepspeed", "vllm",
        "mindspore" or "jax". Raises :class:`PlanError` for another.
        """
        return export(self, kind)

    def visualize(self, path: str | os.PathLike[str], other: Record | None = None) -> None:
        """Draw into ``path`` (.html .dot .svg .json .txt .trace.json); ``other``: earlier plan."""
        visualize(self, path, before=other)


@dataclass(frozen=True)
class Compiled:
    """Graph, program, plan and source of one compilation; each prints itself."""

    graph: Graph
    program: Program
    plan: Plan
    write: Callable[[], Source]
    """makes :attr:`source`; not called if only the plan is wanted"""
    micro_batches: MicroBatches | None = None
    """if the step has several: the other fields are those of one micro-batch"""
    pipeline: Stages | None = None
    """pipeline stages, if any; ``program`` and ``source`` are then those of the first stage"""
    parts: tuple[Compiled, ...] = ()
    """per pipeline stage; their ``source`` is one file"""

    @cached_property
    def source(self) -> Source:
        return self.write()

    @property
    def in_place(self) -> frozenset[str]:
        """Buffers and inputs that the program writes in place."""
        return frozenset().union(*(part.program.in_place for part in self.parts or (self,)))

    @property
    def symbols(self) -> Symbols:
        """Open lengths (dynamic shapes) and the conditions on them."""
        if not self.parts:
            return self.program.graph.symbols
        conditions = (c for part in self.parts for c in part.symbols.conditions)
        return replace(self.graph.symbols, conditions=tuple(dict.fromkeys(conditions)))

    @property
    def parameter_layouts(self) -> dict[str, Layout]:
        """Original name of a parameter or buffer → layout on the mesh of one stage."""
        layouts: dict[str, Layout] = {}
        for part in self.parts or (self,):
            layouts |= part.plan.layouts
        names = [i.fqn for i in self.graph.of_kind("parameter", "buffer")]
        whole = Layout((self.parts or (self,))[0].plan.mesh)
        return {name: layouts.get(name, whole) for name in names}

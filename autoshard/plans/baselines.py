"""Named strategies beside a plan (``plan.compared``), planned quickly when asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from autoshard.errors import HintError, PlanError
from autoshard.mesh import Mesh
from autoshard.passes.ir.analyses import LazySequence
from autoshard.passes.ir.graph import Graph
from autoshard.passes.ir.memory import optimizer_bytes
from autoshard.passes.ir.text import show_bytes
from autoshard.passes.propagate.hints import DimLimit
from autoshard.passes.propagate.named_strategies import FREE, NamedStrategy, baseline_strategies
from autoshard.plans.options import NOTHING_KNOWN, CompileOptions, KnownLayouts
from autoshard.plans.plan import Compiled
from autoshard.plans.reuse import is_same_strategy
from autoshard.plans.stages import mesh_without_axis
from autoshard.report.record import ComparedRow
from autoshard.report.summary import strategy_name

Search = Callable[[Graph, Mesh, CompileOptions, KnownLayouts], Compiled]
"""plans a graph on a mesh, within options and known layouts"""


def baselines_of(
    search: Search, graph: Graph, mesh: Mesh, opts: CompileOptions, known: KnownLayouts = NOTHING_KNOWN
) -> LazySequence[ComparedRow]:
    """:attr:`Plan.baselines` of a plan with these options; ``search`` plans them when read."""
    return LazySequence(lambda: tuple(_planned_baselines(search, graph, mesh, opts, known)))


def _planned_baselines(
    search: Search, graph: Graph, mesh: Mesh, opts: CompileOptions, known: KnownLayouts
) -> Iterator[ComparedRow]:
    """The named strategies that ``graph`` can follow, with all other options; the free search beside
    a plan that was asked for by name."""
    own = mesh if opts.stages is None else mesh_without_axis(mesh, opts.stages)
    strategies = [s for s in baseline_strategies(graph, own, FREE) if own.size > 1 and s.like != "replicate"]
    budget = opts.budget(mesh.hardware)
    asked = opts.plan.like if opts.plan is not None else "" if opts.like is None else repr(opts.like)
    for strategy in [FREE, *strategies] if asked else strategies:
        if strategy is not FREE and asked and is_same_strategy(strategy.like, asked, own):
            continue
        name, state = strategy_name(strategy.like), least_state_bytes(graph, own, strategy, opts.optimizer)
        if state > budget and opts.stages is None and not opts.hints:  # stages divide it, hints may
            why = f"does not fit: {show_bytes(state)} of parameters, gradients and optimizer state alone"
            yield name, None, state, why
            continue
        try:
            plan = search(graph, mesh, replace(opts, like=strategy.like, plan=None, quick=True), known).plan
        except (HintError, PlanError) as error:
            peak = getattr(error, "peak", 0.0)
            why = f"does not fit: a peak of {show_bytes(peak)} is the least found" if peak else str(error)
            yield name, None, peak, why
        else:
            yield name, plan.cost.total_s, plan.memory.peak, ""


def least_state_bytes(graph: Graph, mesh: Mesh, strategy: NamedStrategy, optimizer: str) -> float:
    """Lower bound (bytes per rank) of weights, gradients and states under ``strategy``."""
    total = 0.0
    for name in graph.parameters:
        kept, limit = graph.types[name], strategy.limits.get(name)
        dims = limit.dims if isinstance(limit, DimLimit) else (None,) * mesh.ndim
        ranks = math.prod(n for n, along in zip(mesh.shape, dims, strict=True) if along is None or along)
        held = float(kept.nbytes)
        if graph.training and kept.grad:  # of a sparse table, only the rows that were read
            held += math.prod(map(int, kept.updates.shape)) * kept.kept.dtype.itemsize if kept.sparse else kept.nbytes
        held += optimizer_bytes(optimizer, tuple(map(int, kept.shape)), kept.dtype) if kept.grad else 0.0
        total += held / ranks
    return total

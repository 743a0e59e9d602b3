"""The compiler, top to bottom: model → graph → micro-batches → stages or one graph → plan."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoshard import dumps
from autoshard.errors import AutoshardError, CaptureError, PlanError
from autoshard.mesh import Mesh
from autoshard.passes.capture import capture
from autoshard.passes.capture.exported.symbolic_shapes import Dynamic
from autoshard.passes.ir.graph import Graph
from autoshard.passes.microbatch import micro_batch_counts, one_micro_batch
from autoshard.passes.propagate.hints import micro_batch_placements
from autoshard.passes.propagate.named_strategies import expand_tp_plan
from autoshard.passes.rules.restrictions import check_random, with_own_streams
from autoshard.passes.search.candidates import Candidates
from autoshard.plans.baselines import baselines_of
from autoshard.plans.options import NOTHING_KNOWN, CompileOptions, KnownLayouts
from autoshard.plans.plan import Compiled
from autoshard.plans.planning import is_limited, order_seconds, plan_cheaper_order, plan_loss_chunks
from autoshard.plans.stages import compile_stages
from autoshard.progress import infrequent_gc, shown_progress
from autoshard.runtime.transport.torch_state import without_autocast


def compile_model(
    model: nn.Module,
    mesh: Mesh,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    opts: CompileOptions,
    known: KnownLayouts = NOTHING_KNOWN,
    *,
    training: bool | None = None,
    dynamic: Dynamic = False,
) -> Compiled:
    """``model``, unchanged, compiled for these arguments. ``training``, ``dynamic``: see
    :func:`capture`. Raises subclasses of :class:`~autoshard.errors.AutoshardError`."""
    graph = capture_graph(model, args, kwargs, training=training, dynamic=dynamic, precision=opts.mixed_precision)
    return compile_graph(graph, mesh, replace(opts, like=expand_tp_plan(model, opts.like)), known)


@contextlib.contextmanager
def named_errors() -> Iterator[None]:
    """Inside, an error that autoshard did not mean becomes a :class:`CaptureError`."""
    try:
        yield
    except (AutoshardError, MemoryError, OSError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        said = CaptureError(
            f"the model cannot be compiled: {type(error).__name__}: {error} ({os.path.basename(last.filename)}:"
            f"{last.lineno}). Please report it as an error of autoshard"
        )
        said.is_internal = True
        raise said from error


@named_errors()
@infrequent_gc()
def capture_graph(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], **options: Any) -> Graph:
    """Capture alone. ``options``: see :func:`capture`."""
    with shown_progress("capture"):
        return capture(model, args, kwargs, **options)


def search_graph(graph: Graph, mesh: Mesh, opts: CompileOptions, known: KnownLayouts = NOTHING_KNOWN) -> Compiled:
    """The cheapest plan of ``graph``, and its program, over what is offloaded, and numbers of micro-batches."""
    if opts.offload != "auto" or not graph.training or opts.plan is not None:
        return _search_micro_batches(graph, mesh, opts, known)
    found = Candidates[Compiled](order_seconds)
    for what in (None, "optimizer", "activations", "all"):
        with found.attempt(f"offload of {what or 'nothing'}"):
            found.add(_search_micro_batches(graph, mesh, replace(opts, offload=what), known))
        if found.best is not None and not is_limited(found.best.plan):
            break
    return found.cheapest()


@infrequent_gc()
@without_autocast()  # the graph has its casts
def _search_micro_batches(graph: Graph, mesh: Mesh, opts: CompileOptions, known: KnownLayouts) -> Compiled:
    """The cheapest plan of ``graph`` over numbers of micro-batches."""
    if opts.stages is not None and opts.offload in ("activations", "all"):
        raise PlanError(
            f"offload={opts.offload!r}: activations of pipeline stages are not offloaded. Use offload='optimizer', "
            "or recompute= and more micro-batches"
        )
    check_random(graph)
    if not (opts.exact_dropout if opts.exact_dropout is not None else not mesh.hardware.is_accelerator):
        graph = with_own_streams(graph)
    always, cuts = opts.stages is not None, micro_batch_placements(opts.hints, graph, mesh, known=known.later)
    steps = Candidates[Compiled](lambda found: found.plan.cost.total_s)
    for count in micro_batch_counts(graph, opts.parts, always, cuts):

        def planned(whole: Graph, count: int = count) -> Compiled:
            part, micro = one_micro_batch(whole, count, always, cuts)
            if opts.stages is not None:
                return compile_stages(part, mesh, opts, known, micro)
            return replace(plan_cheaper_order(part, mesh, opts, known), micro_batches=micro)

        with steps.attempt(f"{count} micro-batches"):
            step = plan_loss_chunks(graph, count, mesh, opts, known, planned)
            if not steps.add(step):  # more of them take less memory, but more time
                break
    return steps.cheapest(told=-1)


@named_errors()
@infrequent_gc()
@without_autocast()
def compile_graph(
    graph: Graph,
    mesh: Mesh,
    opts: CompileOptions | None = None,
    known: KnownLayouts = NOTHING_KNOWN,
    dumped: bool = True,
) -> Compiled:
    """All steps after capture. ``dumped``: whether they are logged and written (AUTOSHARD_DUMP)."""
    opts = opts or CompileOptions()
    folder = dumps.dump_graph(graph) if dumped else None
    found = search_graph(graph, mesh, opts, known)
    asked = (*opts.words(), *["--dynamic"] * bool(graph.symbols.read))
    found = replace(found, plan=replace(found.plan, asked=asked))
    if not known.later:
        alike = replace(opts, loss_chunks=found.plan.loss_chunks)
        found = replace(
            found, plan=replace(found.plan, baselines=baselines_of(search_graph, graph, mesh, alike, known))
        )
    if dumped:
        dumps.dump_compilation(found.plan, found.program, lambda: found.source.text, folder)
    return found

"""Styles by module, ``{"model.layers.*.mlp.up_proj": "colwise"}``: parallelize_module, tp_plan."""

from __future__ import annotations

import difflib
import fnmatch
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoshard.errors import PlanError
from autoshard.layout import Placement, Replicate, Shard
from autoshard.passes.ir.graph import Graph
from autoshard.passes.propagate.hints import Constraint, module_output, modules_of
from autoshard.passes.propagate.named_strategies.families import Families, WeightProduct
from autoshard.passes.propagate.op_space import OpRequest

log = logging.getLogger("autoshard.plan")


@dataclass(frozen=True)
class Style:
    """What a style asks of a module's products and output."""

    cuts: str = ""
    """"makes": shard output features, "sums": input features, "": none, "free": the search
    decides"""
    output: Placement | None = None
    """placement of the module's output; None: free"""
    sequence: bool = False
    """whether the module works on a sharded sequence, dim 1 of its output"""


COLUMN_STYLE, ROW_STYLE, REPLICATED_STYLE, FREE_STYLE = Style("makes"), Style("sums"), Style(), Style("free")

MODULE_STYLES: dict[str, Style] = {
    **dict.fromkeys(("colwise", "local_colwise", "embedding_colwise"), COLUMN_STYLE),
    **dict.fromkeys(("colwise_rep", "colwise_gather_output"), Style("makes", Replicate())),
    **dict.fromkeys(("rowwise", "local_rowwise", "rowwise_split_input"), ROW_STYLE),
    **dict.fromkeys(("rowwise_rep", "embedding_rowwise"), Style("sums", Replicate())),
    "sequence_parallel": Style(sequence=True),
    **dict.fromkeys(("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj"), REPLICATED_STYLE),
    **dict.fromkeys(("gather", "all_reduce"), Style("free", Replicate())),
    # Interleaved fused weights, which no layout here has, and modules that run sharded values.
    **dict.fromkeys(("packed_colwise", "packed_rowwise", "local_packed_rowwise", "local", "local_params"), FREE_STYLE),
    **dict.fromkeys(("moe_tp_experts", "moe_identity_expert"), FREE_STYLE),
}
"""names of transformers' ``tp_plan``; older releases have ``…_rep`` and ``local…``"""

EXPERT_STYLES = ("grouped_gemm", "ep_router", "ep_dispatch_experts")
_OF_TORCH = {"ColwiseParallel": "colwise", "RowwiseParallel": "rowwise", "SequenceParallel": "sequence_parallel"}


@dataclass(frozen=True)
class StyleRequests:
    """Requests of patterns along one mesh axis."""

    asked: Mapping[str, OpRequest]
    dims: Mapping[str, frozenset[int]]
    outputs: Mapping[str, Constraint]


def style_requests(
    patterns: Mapping[str, Any], axis: str, families: Families, found: tuple[WeightProduct, ...], known: bool = False
) -> StyleRequests:
    """Requests of ``patterns`` (fnmatch, of module or parameter names or ends) along ``axis``.
    Raises :class:`PlanError` for an unknown style, or if no pattern matches, unless
    ``known``."""
    graph = families.graph
    asked: dict[str, OpRequest] = {}
    dims: dict[str, frozenset[int]] = {}
    outputs: dict[str, Constraint] = {}
    missed = []
    for pattern, given in patterns.items():
        style = style_of(pattern, given)
        modules = [m for m in modules_of(graph) if _matches_name(m, pattern)]
        owned = {
            i.name
            for i in graph.inputs
            if i.kind == "parameter"
            and any(_matches_name(n, pattern) or n.rpartition(".")[0] in modules for n in (i.fqn, *i.aliases))
        }
        if not modules and not owned:
            missed.append(pattern)
        if style.cuts != "free":
            dims.update(dict.fromkeys(owned, frozenset()))
            _shard_products(style, set(modules), owned, families, found, asked, dims)
        for module in modules:
            value = module_output(graph, module)
            if style.sequence:
                _shard_sequence(module, value, families, asked)
            if style.output is not None:
                outputs[value] = Constraint(pattern, module, axes=((axis, style.output),))
    if not known:
        _report_missed(missed, patterns, graph)
    return StyleRequests(asked, dims, outputs)


def style_of(pattern: str, given: Any) -> Style:
    """A style by name, or a ``ParallelStyle`` of torch. Raises :class:`PlanError` otherwise."""
    name = _OF_TORCH.get(type(given).__name__)
    if name is not None:
        placed = getattr(given, "output_layouts", None)
        placed = placed[0] if isinstance(placed, tuple) else placed
        if placed is None or name == "sequence_parallel" or (placed.is_shard() and name == "colwise"):
            return MODULE_STYLES[name]
        return Style(MODULE_STYLES[name].cuts, Shard(placed.dim) if placed.is_shard() else Replicate())
    if given in EXPERT_STYLES:
        raise PlanError(f"like: {pattern!r} is {given!r}, but expert parallelism by module is not supported yet")
    if not isinstance(given, str) or given not in MODULE_STYLES:
        near = difflib.get_close_matches(str(given), MODULE_STYLES, n=1)
        meant = f"; do you mean {near[0]!r}?" if near else "."
        raise PlanError(f"like: {pattern!r} is {given!r}, not a style{meant} Known: {', '.join(MODULE_STYLES)}")
    return MODULE_STYLES[given]


def _shard_products(
    style: Style,
    modules: set[str],
    owned: set[str],
    families: Families,
    found: tuple[WeightProduct, ...],
    asked: dict[str, OpRequest],
    dims: dict[str, frozenset[int]],
) -> None:
    """Request sharding of products in the modules, or that read a parameter matched itself."""
    graph = families.graph
    for p in found:
        parameters = families.origins(p.weight)
        if p.node.fqn not in modules and not (not modules and owned & parameters):
            continue
        family = {"makes": p.makes, "sums": p.sums, "": None}[style.cuts]
        asked[p.node.name] = families.asked(p.node, families.labels(p.node, () if family is None else {family}))
        for name in owned | parameters:
            every = range(len(graph.types[name].shape))
            dims[name] = dims.get(name, frozenset()) | {d for d in every if families.of(name, d) == family}


def _shard_sequence(module: str, output: str, families: Families, asked: dict[str, OpRequest]) -> None:
    if len(families.graph.types[output].shape) < 2:
        raise PlanError(f"like: the output of module {module!r} has no dim 1, so it cannot be 'sequence_parallel'")
    family = families.of(output, 1)
    for node in families.graph.nodes:
        if node.fqn == module or node.fqn.startswith(module + "."):
            asked[node.name] = families.asked(node, families.labels(node, {family}))


def _matches_name(name: str, pattern: str) -> bool:
    """Plans of base models omit the beginning of names."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")


def _report_missed(missed: list[str], patterns: Mapping[str, Any], graph: Graph) -> None:
    """Warn about patterns without match; raise :class:`PlanError` if no pattern matches."""
    if not missed:
        return
    known = [*modules_of(graph), *(i.fqn for i in graph.of_kind("parameter"))]
    near = difflib.get_close_matches(missed[0], known, n=3, cutoff=0.3)
    text = f"like: {missed[0]!r} matches no module and no parameter. Nearest: {', '.join(near or known[:3])}"
    if len(missed) == len(patterns):
        raise PlanError(text)
    log.warning("%s (%d of %d patterns match nothing)", text, len(missed), len(patterns))

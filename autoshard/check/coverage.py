"""``autoshard.coverage``: which ops of a model are sharded, decomposed, replicated or refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from autoshard.compiler import compile_model
from autoshard.errors import AutoshardError
from autoshard.hardware import PRESETS, Link
from autoshard.mesh import Mesh, MeshLike
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.program import Program
from autoshard.passes.ir.text import show_seconds
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.facts import is_view
from autoshard.plans.options import CompileOptions
from autoshard.plans.plan import Plan
from autoshard.report.text import layer_glob

STATUSES = ("refused", "replicated", "decomposed", "sharded")

SPLIT_ALL = replace(PRESETS["ideal_network"], memory_bandwidth=3352e9, node=Link(0.0, 1e21), network=Link(0.0, 1e21))
"""hardware with free communication: everything that can be sharded is, elementwise ops too"""


@dataclass(frozen=True)
class OpCoverage:
    """One op at one source line of one module, equal layers counted together."""

    op: str
    """name that the model calls; for a decomposed op not the names of its parts"""
    status: str
    """one of :data:`STATUSES`"""
    count: int
    fqn: str
    """module path, layer numbers as ``*``"""
    source: str
    seconds_lost: float
    """seconds per step beyond an even split over all ranks; 0 where the op is sharded"""
    reason: str = ""

    def __str__(self) -> str:
        lost = f"  loses {show_seconds(self.seconds_lost)} per step" if self.seconds_lost else ""
        reason = f"  ({self.reason})" if self.reason else ""
        return (
            f"{self.status:<10}  {self.count:>4} ×  {self.op:<44}  {self.fqn or '(root)'}  {self.source}{lost}{reason}"
        )


@dataclass(frozen=True)
class CoverageReport:
    """Coverage of a model by sharding rules. ``ops``: most expensive first."""

    mesh: Mesh
    ops: tuple[OpCoverage, ...]
    error: str = ""
    """why capture or planning failed; ``ops`` is empty then"""

    @property
    def counts(self) -> dict[str, int]:
        """Status → number of ops in the graph."""
        found = Counter[str]()
        for op in self.ops:
            found[op.status] += op.count
        return {status: found[status] for status in STATUSES}

    @property
    def seconds_lost(self) -> float:
        """Seconds per step that replication costs, over all ops."""
        return sum(op.seconds_lost for op in self.ops)

    @property
    def complete(self) -> bool:
        """Whether every op has a sharding rule, so that ``strict=True`` compiles."""
        return not self.error and not any(op.reason == NO_RULE for op in self.ops)

    def __str__(self) -> str:
        if self.error:
            return f"coverage on {self.mesh}: refused\n  {self.error}"
        counts = ", ".join(f"{n} {status}" for status, n in self.counts.items())
        lines = [f"coverage on {self.mesh}: {counts}; {show_seconds(self.seconds_lost)} per step lost to replication"]
        return "\n".join([*lines, *(f"  {op}" for op in self.ops)])


NO_RULE = "no rule"


def coverage(
    model: nn.Module,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    mesh: MeshLike | None = None,
    *,
    hints: Mapping[str, Any] | None = None,
    training: bool | None = None,
) -> CoverageReport:
    """Capture and plan ``model`` without weights or processes, and report on every op.

    ``mesh``: default two ranks with free communication, where everything that can be sharded is. On
    real hardware an op may also be replicated because sharding it does not pay. A model that cannot
    be captured gives a report with :attr:`CoverageReport.error`; no error is raised.
    """
    resolved = Mesh.of(mesh) if mesh is not None else Mesh({"x": 2}, hardware=SPLIT_ALL)
    try:
        example = tuple(example_args), dict(example_kwargs or {})
        opts = CompileOptions(type(model).__name__, hints)
        found = compile_model(model, resolved, *example, opts, training=training)
    except AutoshardError as error:
        return CoverageReport(resolved, (), f"{type(error).__name__}: {error}")
    return CoverageReport(resolved, _merged_coverage(_coverage_rows(found.graph, found.program, found.plan)))


def _coverage_rows(graph: Graph, program: Program, plan: Plan) -> Iterator[OpCoverage]:
    """One row per op of the model, the parts of a decomposed op together."""
    parts: dict[Any, list[Node]] = {}
    for number, node in enumerate(graph.nodes):
        key = (node.origin, node.fqn, node.source) if node.origin else number
        parts.setdefault(key, []).append(node)
    for nodes in parts.values():
        yield _coverage_row(nodes, program, plan)


def _coverage_row(nodes: Sequence[Node], program: Program, plan: Plan) -> OpCoverage:
    """The row of the op that was decomposed into ``nodes``."""
    first = nodes[0]
    working = [n for n in nodes if not is_view(n.op)] or list(nodes)
    replicated = [n for n in working if not any(s.divides for s in program.assignment.choices[n.name])]
    seconds = sum(plan.choices[n.name].seconds for n in replicated) * (1 - 1 / program.mesh.size)
    name, reason = first.origin or str(first.op), ""
    if len(replicated) < len(working):
        status = "decomposed" if first.origin else "sharded"
    else:
        status, reason = (
            "replicated",
            NO_RULE if any(rule_for(n.op) is None for n in replicated) else _replication_reason(replicated, program),
        )
    return OpCoverage(name, status, 1, layer_glob(first.fqn), first.source, seconds, reason)


def _replication_reason(nodes: Sequence[Node], program: Program) -> str:
    """Why ops with a rule run replicated: no dim is long enough, or sharding does not pay."""
    ranks, types = max(program.mesh.shape), program.graph.types
    found = [s for n in nodes if (rule := rule_for(n.op)) for s in rule.strategies(n, program.graph) if s.divides]
    if not found:
        return "its rule has nothing to shard here"
    if not any(s.size is None or s.size >= ranks for s in found):
        return f"no factor is as long as {ranks} ranks"
    small = all(types[name].numel <= ranks for n in nodes for name in n.outputs)
    return "its results are tiny" if small else "sharding it does not pay"


def _merged_coverage(rows: Iterator[OpCoverage]) -> tuple[OpCoverage, ...]:
    """Rows of equal layers merged, most expensive first."""
    groups: dict[Any, list[OpCoverage]] = {}
    for row in rows:
        groups.setdefault((row.op, row.status, row.fqn, row.source, row.reason), []).append(row)
    merged = [
        OpCoverage(r.op, r.status, len(same), r.fqn, r.source, sum(s.seconds_lost for s in same), r.reason)
        for same in groups.values()
        for r in same[:1]
    ]
    return tuple(sorted(merged, key=lambda r: (-r.seconds_lost, STATUSES.index(r.status))))

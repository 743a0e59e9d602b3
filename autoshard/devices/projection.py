"""Projection: what a step costs on more devices, from the plan of one number of them. The
data-parallel axis grows, and the batch with it. Nothing is searched again: collectives are
priced on the larger mesh, states sharded by the axis shrink, and more devices wait for the
slowest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard.errors import MeshError, PlanError
from autoshard.hardware import Hardware
from autoshard.hardware.link import is_amount
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.passes.ir.memory import Memory
from autoshard.passes.ir.text import show_bytes, show_seconds
from autoshard.plans.plan import Plan
from autoshard.report.pipeline import pipeline_cost, pipeline_memory
from autoshard.report.record import Collective, Cost, Kind, Record, local_bytes
from autoshard.report.schedule import step_end
from autoshard.report.summary import axis_role

ANCHOR_ROUNDS = 5
"""iterations (count) of compute against the measured step: slower compute also hides more"""

SHARDED_STATES = ("parameters", "gradients", "optimizer")
"""parts of the memory that shrink as more devices share parameters"""


@dataclass(frozen=True)
class Projected:
    """One number of devices. ``memory_bytes``: peak of a rank."""

    devices: int
    mesh: Mesh
    fits: bool
    cost: Cost
    memory_bytes: float
    dominates: str
    """the largest part of the step, and its share"""
    lever: str
    """what would save most, and at most how much of the step"""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.cost.total_s

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation."""
        return self.cost.mfu

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all devices; 0 if the model looks up no token ids."""
        return self.cost.tokens_per_s

    @property
    def tokens_per_s_per_device(self) -> float:
        """Tokens per second of one device."""
        return self.cost.tokens_per_s_per_device

    @property
    def device_hours_per_trillion_tokens(self) -> float:
        """Hours of one device for 1e12 tokens; nan without tokens."""
        return self.cost.device_hours_per_token * 1e12


@dataclass(frozen=True)
class Projection(Sequence[Projected]):
    """Rows by number of devices; ``str()`` gives a table. ``plan``: that of the first row."""

    plan: Plan
    rows: tuple[Projected, ...]
    compute_factor: float = 1.0
    """seconds of compute relative to the prediction, from the anchor"""

    def __getitem__(self, index: int) -> Projected:  # type: ignore[override]  # rows have no slices
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        heads = ("devices", "mesh", "fits", "memory", "step", "tokens/s", "per device", "MFU", "hours/1T tokens")
        lines = [heads, *map(_cells, self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(x.rjust(w) for x, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        notes = [f"{row.devices}: {row.dominates}; next lever: {row.lever}" for row in self.rows]
        anchored = f", compute × {self.compute_factor:.3f} as measured" if self.compute_factor != 1.0 else ""
        of = f"{self.plan.title} on {self.plan.mesh.hardware.name}, the batch grows with the devices{anchored}"
        return "\n".join((of, *table, *notes))


def _cells(row: Projected) -> tuple[str, ...]:
    rates = (row.tokens_per_s, row.tokens_per_s_per_device)
    hours = row.device_hours_per_trillion_tokens
    return (
        f"{row.devices}", f"{row.mesh}", "yes" if row.fits else "no", show_bytes(row.memory_bytes), show_seconds(row.step_s),
        *(f"{rate:,.0f}" if rate else "-" for rate in rates), f"{row.mfu:.1%}", "-" if math.isnan(hours) else f"{hours:,.0f}",
    )  # fmt: skip


def checked_anchor(anchor: Any, first: int) -> tuple[int, float]:
    """A measured step as (devices, seconds); seconds alone are those of the ``first`` number."""
    pair = anchor if isinstance(anchor, tuple) and len(anchor) == 2 else (first, anchor)
    if not (type(pair[0]) is int and pair[0] >= 1 and is_amount(pair[1]) and pair[1] > 0):
        raise PlanError(
            f"anchor={anchor!r}: give seconds of a measured step, (devices, seconds), or a file of autoshard.calibrate"
        )
    return pair[0], float(pair[1])


def on_cluster(node: Hardware, cluster: Hardware) -> Hardware:
    """``node`` as it was measured, with the levels of ``cluster`` above it."""
    first, *above = cluster.levels
    levels = (replace(first, link=node.node), *above)
    return replace(node, name=f"{node.name} in {cluster.name}", levels=levels, memory_bytes=cluster.memory_bytes)


def projected(plan: Plan, devices: Sequence[int], measured: tuple[int, float] | None = None) -> Projection:
    """The step of ``plan`` on each number of ``devices``, multiples of its mesh, else
    :class:`MeshError`. ``measured``: (devices, seconds) to scale compute to. :class:`PlanError`
    without a data-parallel axis."""
    sizes = sorted({*devices, *(measured or ())[:1]})
    for size in sizes:
        if size % plan.mesh.size:
            raise MeshError(
                f"devices={size} is not a multiple of the {plan.mesh.size} of the mesh ({plan.mesh}). "
                "Numbers of devices are multiples of the first, because the data-parallel axis grows"
            )
    axis = data_axis(plan) if sizes[-1] > plan.mesh.size else plan.mesh.axes[0]
    factor = 1.0
    if measured is not None:
        for _ in range(ANCHOR_ROUNDS):
            cost = _on_more(plan, axis, measured[0] // plan.mesh.size, factor).cost
            factor *= 1.0 + (measured[1] - cost.total_s) / cost.compute_s
            if factor <= 0:
                raise PlanError(
                    f"anchor={measured[1]:g} s is shorter than the predicted communication of "
                    f"{show_seconds(cost.total_s - cost.compute_s)} on {measured[0]} devices. "
                    "Give a step of this model and batch"
                )
    rows = (_row(_on_more(plan, axis, size // plan.mesh.size, factor)) for size in sorted({*devices}))
    return Projection(plan, tuple(rows), factor)


def data_axis(plan: Record) -> str:
    """The outermost data-parallel axis (DDP or ZeRO) without experts, else :class:`PlanError`."""
    of = plan if plan.staged is None else plan.staged.plans[0]
    for axis in of.mesh.axes:
        at = of.mesh.index(axis)
        experts = any(c.labels[at].startswith("exchange") for c in of.choices.values())
        if not experts and axis_role(of, axis).startswith(("data parallel", "ZeRO")):
            return axis
    raise PlanError(
        f"the plan has no data-parallel axis that could grow (mesh {plan.mesh}). Give a mesh with one, such as "
        'mesh={"dp": 8, "tp": 8}, and like={"dp": "fsdp"} if the search uses it otherwise'
    )


def _on_more(plan: Plan, axis: str, times: int, factor: float) -> Plan:
    """``plan`` with ``times`` the ranks along ``axis``, and compute that takes ``factor`` times as long."""
    if times == 1 and factor == 1.0:
        return plan
    mesh = _larger(plan.mesh, axis, times)
    if plan.staged is None:
        found = _scaled_stage(plan, mesh, factor)
        more = step_end(found) - step_end(plan)
        cost = replace(found.cost, total_s=plan.cost.total_s + more)
        cost = replace(cost, exposed_s=max(0.0, cost.total_s - cost.compute_s))
        memory = found.memory
    else:
        parts = tuple(_scaled_stage(p, _larger(p.mesh, axis, times), factor) for p in plan.staged.plans)
        staged = replace(plan.staged, plans=parts)
        found, cost = replace(plan, mesh=mesh, staged=staged), pipeline_cost(staged, mesh)
        memory = pipeline_memory(staged, mesh.size_of(staged.axis))
    slower = plan.cost.total_s / cost.total_s if cost.total_s else 0.0
    cost = replace(
        cost, memory_bytes=memory.peak, mfu=plan.cost.mfu * slower, hfu=plan.cost.hfu * slower, tokens=plan.cost.tokens * times,
        devices=mesh.size, flops=plan.cost.flops * times, lower_bound=0.0,
    )  # fmt: skip
    return replace(found, cost=cost, memory=memory)


def _larger(mesh: Mesh, axis: str, times: int) -> Mesh:
    sizes = mesh.sizes.items()
    return Mesh({name: n * times if name == axis else n for name, n in sizes}, mesh.hardware)


def _scaled_stage(plan: Kind, mesh: Mesh, factor: float) -> Kind:
    """A plan without stages on a larger mesh: layouts, collectives, compute and memory."""
    layouts = {name: Layout(mesh, x.placements, x.order) for name, x in plan.layouts.items()}
    found = replace(plan, mesh=mesh, layouts=layouts, collectives=tuple(_repriced(plan.collectives, plan.mesh, mesh)))
    shares = _state_shares(plan, found)
    excess = [1 + m.hardware.slowest_excess(m.size) for m in (plan.mesh, mesh)]
    slower = factor * excess[1] / excess[0]
    cost = plan.cost
    update = cost.optimizer_s * shares["optimizer"] * slower
    compute = (cost.compute_s - cost.optimizer_s) * slower + update
    sent = math.fsum(c.seconds for c in found.collectives) - math.fsum(c.seconds for c in plan.collectives)
    cost = replace(cost, compute_s=compute, optimizer_s=update, comm_s=cost.comm_s + sent)
    choices = {
        name: replace(c, seconds=c.seconds * slower, backward_s=c.backward_s * slower)
        for name, c in plan.choices.items()
    }
    return replace(found, cost=cost, choices=choices, memory=_shrunk(plan.memory, shares))


def _repriced(collectives: Sequence[Collective], before: Mesh, after: Mesh) -> Iterator[Collective]:
    """``collectives`` on the larger mesh; those of one bucket share its latency as before."""
    together: dict[object, float] = {}
    for i, c in enumerate(collectives):
        key = (c.bucket, c.kind, c.axes, c.phase) if c.bucket else i
        together[key] = together.get(key, 0.0) + c.bytes / c.times
    for i, c in enumerate(collectives):
        size = together[(c.bucket, c.kind, c.axes, c.phase) if c.bucket else i]
        (n, then), (m, now) = ((mesh.size_of(c.axes), mesh.link(c.axes)) for mesh in (before, after))
        more = 1.0 if c.kind == "permute" or n == 1 else ((m - 1) / m) / ((n - 1) / n)
        taken = then.seconds(size, c.kind)
        longer = now.seconds(size * more, c.kind) / taken if taken else 1.0
        yield replace(c, bytes=c.bytes * more, seconds=c.seconds * longer, hidden_s=c.hidden_s * min(longer, 1.0))


def _state_shares(before: Record, after: Record) -> dict[str, float]:
    """Part of the memory → its bytes on the larger mesh, relative to those before."""
    names = [name for name, kind in before.kinds.items() if kind == "parameter"]
    summed = [name for name in names if before.zero.get(name) != 1]  # ZeRO-1 keeps whole gradients

    def ratio(of: Sequence[str]) -> float:
        whole = sum(local_bytes(before, name) for name in of)
        return sum(local_bytes(after, name) for name in of) / whole if whole else 1.0

    return {part: ratio(summed if part == "gradients" else names) for part in SHARDED_STATES}


def _shrunk(memory: Memory, shares: dict[str, float]) -> Memory:
    at_peak = {part: size * shares.get(part, 1.0) for part, size in memory.at_peak.items()}
    states = {part: getattr(memory, part) * share for part, share in shares.items()}
    return replace(memory, at_peak=at_peak, peak=sum(at_peak.values()), curve=(), **states)


def _row(plan: Plan) -> Projected:
    peak, budget = plan.memory.peak, plan.memory_budget or plan.mesh.hardware.memory_bytes
    cost, fits = plan.cost, peak <= budget
    products = cost.compute_s - cost.optimizer_s
    parts = {
        "compute": products, "optimizer": cost.optimizer_s, "exposed communication": cost.exposed_s,
        "pipeline bubble": cost.bubble_s,
    }  # fmt: skip
    most = max(parts, key=lambda name: parts[name])
    lever = _lever(plan) if fits else f"shard more states or recompute more: {show_bytes(peak - budget)} too much"
    share = parts[most] / cost.total_s if cost.total_s else 0.0
    return Projected(plan.mesh.size, plan.mesh, fits, cost, peak, f"{most} {share:.0%} of the step", lever)


def _lever(plan: Plan) -> str:
    """What would save most of the step, and at most how much."""
    cost = plan.cost
    again = max(0.0, 1 - cost.mfu / cost.hfu) if cost.hfu else 0.0
    sent: dict[str, float] = {}
    plans: Sequence[Record] = (plan,) if plan.staged is None else plan.staged.plans
    for c in (c for p in plans for c in p.collectives):
        sent[",".join(c.axes)] = sent.get(",".join(c.axes), 0.0) + c.seconds - c.hidden_s
    axes = max(sent, key=lambda name: sent[name], default="")
    savings = {
        "less recomputation": again * (cost.compute_s - cost.optimizer_s),
        f"communication over {axes}: more work per device, or fewer ranks along it": cost.exposed_s,
        "more micro-batches or stages per rank against the bubble": cost.bubble_s,
        "an optimizer whose state more ranks share": cost.optimizer_s,
    }
    best = max(savings, key=lambda name: savings[name])
    return f"{best} (saves at most {savings[best] / cost.total_s:.0%})" if cost.total_s else best

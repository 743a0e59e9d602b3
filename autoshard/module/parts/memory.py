"""Memory of a step in parts: what others hold while a part runs, the peak of the sum, and limits within which all fit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from autoshard.errors import BudgetError
from autoshard.layout import Layout
from autoshard.passes.ir.memory import Memory, optimizer_bytes
from autoshard.passes.ir.text import show_bytes
from autoshard.plans.options import CompileOptions
from autoshard.plans.plan import Plan

MAX_ROUNDS = 8
"""times that all parts are planned before a memory budget is given up: a round takes seconds"""


class HeldMemory:
    """Bytes per rank that tensors of the model take, by name of the memory's part.

    ``assumed``: tensors without a layout are counted as sharded over all ranks, which is the least.
    """

    def __init__(self, sharded: Any, training: bool, assumed: bool = False) -> None:
        of, mesh, plain = sharded._original_model, sharded._program_mesh, sharded._between.plain
        self._each, self._by_path = dict[int, Any](), dict[str, Any]()
        known = plain.laid_out | plain.read
        slots = {name: holder.get(leaf) for name, (holder, leaf) in of.slots.items()}
        self._tensors = {name: x for name, x in slots.items() if x is not None}
        for name in sorted(self._tensors, key=lambda name: name not in plain.laid_out):
            x, is_parameter = self._tensors[name], name in of.parameters
            if id(x) in self._each:
                continue
            share = 1 / mesh.size if assumed and name not in known else 1.0
            shape = sharded._layout_of.get(name, Layout(mesh)).max_local_shape(x.shape)
            size = share * math.prod(shape) * x.dtype.itemsize
            own = self._each[id(x)] = {"parameters" if is_parameter else "buffers": size}
            if training and is_parameter and x.requires_grad:
                state = optimizer_bytes(sharded._settings.opts.optimizer, shape, x.dtype)
                own |= {"gradients": size, "optimizer": share * state}
        self.total = self.of("")

    def of(self, path: str) -> Any:
        """Bytes of the tensors of the module at ``path``."""
        if path not in self._by_path:
            self._by_path[path] = sum((Counter(self._each[i]) for i in self._ids_in(path)), Counter())
        return self._by_path[path]

    def _ids_in(self, path: str) -> set[int]:
        below = f"{path}." if path else ""
        return {id(x) for name, x in self._tensors.items() if name.startswith(below)}

    def by_others(self, path: str, earlier: Iterable[str]) -> Any:
        """Bytes while the part at ``path`` runs. Parts called ``earlier`` and not later have no gradients then."""
        found = self.total - self.of(path)
        early = set[int]().union(*map(self._ids_in, {*earlier} - {path})) - self._ids_in(path)  # tied ones once
        found["gradients"] -= sum(self._each[i].get("gradients", 0.0) for i in early)
        return +found


def saved_by_call(part: Any) -> float:
    """Bytes per rank that a call of ``part`` keeps for its backward: what autograd saves, and the full inputs."""
    program = part._latest_executable()
    if not program.compiled.plan.training:
        return 0.0
    types = program.graph.types
    inputs = [types[i.name] for i in program.graph.of_kind("input")]
    full = sum(math.prod(map(int, t.example.shape)) * t.dtype.itemsize for t in inputs)
    return float(program.compiled.plan.memory.activations + full)


def memory_of_parts(sharded: Any, plans: Mapping[str, Plan]) -> Memory:
    """Memory of the last call of all parts, at the highest peak among their calls.

    Meanwhile parts called earlier keep what their backward reads, and parts called later have gradients.
    What plain code keeps is not known.
    """
    total, saved, peaks = _peaks(sharded, plans)
    path = max(peaks, key=lambda p: sum(peaks[p].values()))
    named = {name: total[name] for name in ("parameters", "gradients", "optimizer", "buffers")}
    named |= {name: max(getattr(plan.memory, name) for plan in plans.values()) for name in ("temporaries", "gathered")}
    return Memory(
        **named,
        activations=saved,
        peak=sum(peaks[path].values()),
        at_peak=dict(peaks[path]),
        moment=f"{plans[path].memory.moment} of part {path}",
        limited=any(plan.memory.limited for plan in plans.values()),
    )


def _peaks(sharded: Any, plans: Mapping[str, Plan]) -> tuple[Any, float, dict[str, Any]]:
    """(bytes of the tensors, bytes that calls keep for the backward, part → bytes at its highest peak)."""
    between, found = sharded._between, dict[str, Any]()
    held = HeldMemory(sharded, any(plan.training for plan in plans.values()))
    saved = {path: saved_by_call(part) for path, part in between.used.items()}
    last = {path: number for number, path in enumerate(between.calls)}
    total = 0.0
    for number, path in enumerate(between.calls):
        own = plans[path].memory
        peak = Counter(dict(own.at_peak)) + held.by_others(path, [p for p in last if last[p] < number])
        peak["activations"] += total
        if last[path] > number:
            peak["gradients"] += max(0.0, own.gradients - own.at_peak.get("gradients", 0.0))
        found[path] = max(found.get(path, Counter()), peak, key=lambda each: sum(each.values()))
        total += saved[path]
    return held.total, total, found


class PartLimits:
    """What parts may take at their peaks so that the sum is within ``budget``, in bytes per rank."""

    def __init__(self, between: Any, budget: float) -> None:
        self.between, self.budget = between, budget
        self.most: dict[str, float] = {}
        """part → most that it may take; others may take what is left"""
        self.least: dict[str, float] = {}
        """part → least peak found, where its limit was lower"""
        self.failed = ""
        """the part that did not fit in the last call"""
        self.excess = 0.0
        """bytes per rank that it lacks, or by which the sum exceeds the budget"""

    def applied(self, opts: CompileOptions, path: str, training: bool) -> CompileOptions:
        """``opts`` for the part at ``path``, which is about to be planned. Further rounds search less."""
        held = max(self._held_by_others(path, training), self.budget - self.most.get(path, self.budget))
        return replace(opts, held=held, quick=opts.quick or path in self.most)

    def _held_by_others(self, path: str, training: bool) -> float:
        between, saved = self.between, 0.0
        if training:
            saved = sum(saved_by_call(between.used[p]) for p in between.calls)
        states = HeldMemory(between.sharded, training, assumed=True).by_others(path, between.calls)
        return saved + sum(states.values())

    def fails(self, path: str, error: BudgetError, training: bool) -> BudgetError:
        """``error`` of the part at ``path``, as an error of the model."""
        held = self._held_by_others(path, training)
        self.failed, self.excess = path, held + error.peak - self.budget
        self.least[path] = error.peak
        self.most[path] = 1.02 * error.peak  # the search may not find the least again
        return self._error(
            path, f"other parts hold {show_bytes(held, 4)} while it runs. Alone: {error}", held + error.peak
        )

    def _error(self, path: str, why: str, peak: float) -> BudgetError:
        kind, title = type(self.between.modules[path]).__name__, self.between.sharded._title
        text = (
            f"{title} does not fit into {show_bytes(self.budget, 4)} per rank: part {path!r} ({kind}) prevents it, as "
        )
        return BudgetError(text + why, peak)

    def is_exceeded(self, plans: Mapping[str, Plan], rounds: int) -> bool:
        """Whether the parts of the last call need new plans. :class:`BudgetError` if no limits help."""
        _, _, peaks = _peaks(self.between.sharded, plans)
        path = max(peaks, key=lambda p: sum(peaks[p].values()))
        peak = sum(peaks[path].values())
        self.excess = peak - self.budget
        if self.excess > 0 and not (rounds < MAX_ROUNDS and self.makes_room(plans)):
            alone = show_bytes(plans[path].memory.peak, 4)
            raise self._error(path, f"its peak is {alone}, and {show_bytes(peak, 4)} with what other parts hold", peak)
        return self.excess > 0

    def makes_room(self, plans: Mapping[str, Plan]) -> bool:
        """Lower the limits of the parts of the last call by the excess in all; False: none can be lower.

        Each gives room in proportion to what it holds while others run, but for the one that failed.
        """
        between = self.between
        if self.failed and self.excess <= 0:
            return True  # others leave enough, but for its own limit
        states = HeldMemory(between.sharded, any(plan.training for plan in plans.values()))
        holds = {path: sum(states.of(path).values()) + between.times[path] * saved_by_call(part)
                 for path, part in between.used.items()}  # fmt: skip
        peaks = {path: plan.memory.peak for path, plan in plans.items() if path != self.failed and holds[path]}
        free = [path for path, peak in peaks.items() if peak > 1.03 * self.least.get(path, 0.0)]
        for path in free:
            lower = peaks[path] - 1.05 * self.excess * holds[path] / sum(holds[p] for p in free)
            self.most[path] = max(lower, self.least.get(path, 0.0), peaks[path] / 4)
        return bool(free)

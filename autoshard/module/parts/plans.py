"""The plans of a model in parts: one per part, their sum, what runs eagerly, and its FLOPs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.utils.flop_counter import flop_registry

from autoshard.errors import PlanError
from autoshard.module.parts.memory import memory_of_parts
from autoshard.plans.plan import Plan
from autoshard.torch_private.autograd import current_backward
from autoshard.torch_private.dispatch import TorchDispatchMode


def plans_of(sharded: Any) -> dict[str, Plan]:
    """Part (module path; "" for the model itself) → plan, of the last call."""
    if not sharded._runs_in_parts:
        return {"": sharded._latest_executable().compiled.plan}
    return {path: part._latest_executable().compiled.plan for path, part in sharded._between.used.items()}


def whole_plan(sharded: Any) -> Plan:
    """The plan of all parts: layouts and collectives by the model's names, costs added up."""
    plans = plans_of(sharded)
    if not plans:
        raise PlanError(f"no part of {sharded._title} can be compiled: {next(iter(sharded._between.refused.values()))}")
    if [*plans] == [""]:
        return plans[""]
    each = list(plans.values())

    def named(path: str, name: str) -> str:
        return f"{path}.{name}" if name else path

    def merged(field: str) -> dict[str, Any]:
        return {named(path, name): x for path, plan in plans.items() for name, x in getattr(plan, field).items()}

    def listed(field: str) -> tuple[str, ...]:
        return tuple(named(path, name) for path, plan in plans.items() for name in getattr(plan, field))

    times, own = sharded._between.times, _flops_as_written(sharded)
    added = "compute_s comm_s total_s flops flops_per_rank local_s merged_s exposed_s".split()
    sums = {name: sum(times[path] * getattr(plan.cost, name) for path, plan in plans.items()) for name in added}
    sums |= {name: sums[name] + own for name in ("flops", "flops_per_rank")}
    memory = memory_of_parts(sharded, plans)
    sums |= {"optimizer_s": sum(plan.cost.optimizer_s for plan in each), "memory_bytes": memory.peak}
    cost = replace(each[0].cost, **sums, lower_bound=0.0)  # each part has a bound, their choice has none
    chosen = {
        named(path, name): replace(
            choice,
            fqn=named(path, choice.fqn),
            inputs=tuple(named(path, n) for n in choice.inputs),
            outputs=tuple(named(path, n) for n in choice.outputs),
        )
        for path, plan in plans.items()
        for name, choice in plan.choices.items()
    }
    collectives = tuple(
        replace(c, fqn=named(path, c.fqn), value=c.value and named(path, c.value), op=c.op and named(path, c.op))
        for path, plan in plans.items()
        for c in plan.collectives
    )
    fields: dict[str, Any] = {
        name: merged(name) for name in ("layouts", "shared", "shapes", "kinds", "ties", "modules", "dtypes", "zero")
    }
    fields |= {name: listed(name) for name in ("given", "differentiable", "shared_again")}
    return replace(
        each[0],
        **fields,
        choices=chosen,
        collectives=collectives,
        cost=cost,
        memory=memory,
        memory_budget=sharded._between.limits.budget,
        outputs=(),
        recomputed=(),
        baselines=(),
        notes=(summary(sharded), *dict.fromkeys(note for plan in each for note in plan.notes)),
        training=any(plan.training for plan in each),
        title=sharded._title,
    )


def _flops_as_written(sharded: Any) -> float:
    """FLOPs of products in plain code; the backward of a product takes two."""
    passes = 3 if any(plan.training for plan in plans_of(sharded).values()) else 1
    return passes * float(sharded._between.flops or 0)


def share_of_flops(sharded: Any, flops: float) -> float:
    """Share of the last call's FLOPs; ``flops``: of products in a forward of plain code."""
    plans, times = plans_of(sharded), sharded._between.times
    own = _flops_as_written(sharded)
    whole = own + sum(times[path] * plan.cost.flops for path, plan in plans.items())
    return own * flops / (sharded._between.flops * whole) if own else 0.0


def summary(sharded: Any) -> str:
    """One line: what runs eagerly and why, how many parts are sharded, and their share of the FLOPs."""
    between, plans = sharded._between, plans_of(sharded)
    reason = str(next(e for (path, _), e in reversed(between.refused.items()) if not path)).split(". ")[0]
    ours = dict.fromkeys(str(e) for (path, _), e in between.refused.items() if path and e.is_internal)
    names = dict.fromkeys(path for path, mode in between.refused if path in between.own)
    also = f" ({', '.join(names)}, too)" if names else ""
    inside = sum(between.times[path] * plan.cost.flops for path, plan in plans.items())
    share = inside / (inside + _flops_as_written(sharded)) if inside else 0.0
    count = f"{len(plans)} part{'s are' if len(plans) != 1 else ' is'} sharded"
    return f"the code between parts runs eagerly{also}: {reason}; {count}, {share:.1%} of the FLOPs{'; '.join(['', *ours])}"


@functools.cache
def _formulas() -> dict[Any, Callable[..., int]]:
    """Overload of an operation → its formula."""
    return {getattr(op, n): f for op, f in flop_registry.items() if hasattr(op, "overloads") for n in op.overloads()}


class FlopCount(TorchDispatchMode):
    """FLOPs of products in plain code, by torch's formulas. Counts while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, and count it."""
        found = func(*args, **(kwargs or {}))
        if current_backward() == -1 and (formula := _formulas().get(func)):  # a backward also runs that of parts
            with contextlib.suppress(Exception):  # a formula may not know this call
                self.flops += formula(*args, **(kwargs or {}), out_val=found)
        return found

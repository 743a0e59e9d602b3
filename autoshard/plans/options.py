"""Compile options of the user, and layouts that earlier programs and the call's arguments fix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard.errors import PlanError
from autoshard.hardware import Hardware
from autoshard.layout import Layout, Shard
from autoshard.passes.ir.memory import ON_HOST
from autoshard.passes.microbatch import AUTO
from autoshard.passes.propagate.named_strategies.strategies import STRATEGY_NAMES
from autoshard.passes.propagate.recompute import Recompute
from autoshard.plans.plan import Plan
from autoshard.precision import Precision

CallArguments = tuple[Sequence[Any], Mapping[str, Any]]
"""arguments and keyword arguments of a call"""


DEFAULT_BUDGET_SHARE = 0.9
"""default memory budget, as a share of the hardware's memory"""
OFFLOADS = ("auto", "optimizer", "activations", "all")


@dataclass(frozen=True)
class CompileOptions:
    """Compile options besides model and mesh; see :func:`autoshard.compile`."""

    title: str = "model"
    """name of the model in plans and source"""
    hints: Mapping[str, Any] | None = None
    memory_budget: float | None = None
    optimizer: str = "adamw"
    recompute: Recompute = "auto"
    strict: bool = False
    plan: Plan | None = None
    """choices to follow instead of a search"""
    like: Any = None
    """named strategy: a name, a name per mesh axis, or styles by module"""
    mixed_precision: Precision | None = None
    micro_batches: int = 1
    """micro-batches of a step with a backward; AUTO: the cheapest number"""
    stages: str | None = None
    """the mesh axis of pipeline stages"""
    schedule: str = "1f1b"
    """pipeline schedule: gpipe, 1f1b, interleaved or zero_bubble"""
    stages_per_rank: int | None = None
    """virtual stages per rank, if the schedule interleaves; None: as the shortest step needs"""
    objective: str = "step"
    """"step": this call; "latency": the next token of a request; "throughput": all tokens"""
    profile: Mapping[str, Any] | None = None
    """kinds of calls and their frequencies: see :mod:`autoshard.serving`"""
    loss_chunks: int = AUTO
    """chunks of a rank's rows in which a linear layer and its cross entropy run; 1: keep all logits;
    AUTO: the cheapest number"""
    exact_dropout: bool | None = None
    """whether dropout drops what one device drops; None: not on accelerators, where fused kernels drop"""
    held: float = 0.0
    """bytes per rank that other parts of the model hold meanwhile"""
    offload: str | None = None
    """what may be in host memory: one of :data:`OFFLOADS`; None: nothing"""
    quick: bool = False
    """few searches, and no lower bound: for plans that are only compared"""

    def __post_init__(self) -> None:
        budget = self.memory_budget
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int | float) or not budget > 0):
            raise PlanError(f"memory_budget is bytes per rank, such as 40e9, got {budget!r}")
        if self.offload not in (None, *OFFLOADS):
            raise PlanError(f"offload={self.offload!r} is not one of None, {', '.join(map(repr, OFFLOADS))}")
        if self.offload in ("optimizer", "all") and not self.optimizer.endswith(ON_HOST):
            object.__setattr__(self, "optimizer", f"{self.optimizer}{ON_HOST}")

    def as_planned(self) -> CompileOptions:
        """With the followed plan's optimizer, micro-batches, stages and schedule in place of
        defaults. Another optimizer may be set; raises :class:`PlanError` if other values of the rest are.
        """
        plan = self.plan
        if plan is None:
            return self
        found = replace(self, optimizer=plan.optimizer) if self.optimizer == CompileOptions.optimizer else self
        made: dict[str, Any] = {"loss_chunks": plan.loss_chunks}
        if plan.staged is not None or plan.training:  # a call without a backward runs as one
            made["micro_batches"] = self.parts_of_plan
        if plan.staged is not None:
            made |= {"stages": plan.staged.axis, "schedule": plan.staged.schedule}
            made |= {"stages_per_rank": len(plan.staged.plans) // plan.mesh.size_of(plan.staged.axis)}
        left = {name: value for name, value in made.items() if getattr(self, name) == getattr(CompileOptions, name)}
        for name, value in made.items():
            asked, is_count = getattr(self, name), name == "micro_batches"
            if name in left or asked == value or (is_count and (asked == AUTO or not plan.training)):
                continue
            raise PlanError(
                f"{name}={asked!r}: the given plan was made for {name}={value!r}. Leave {name} "
                "out to use the plan's, or plan again"
            )
        return replace(found, **left)

    def words(self) -> Iterator[str]:
        """Options other than the defaults, as the command line takes them: ``--like=fsdp``; ``#
        without …`` names an option that it cannot express."""
        if self.plan is not None:
            yield from self.plan.asked
            return
        for pattern, hint in (self.hints or {}).items():
            yield f"--hint={pattern}={hint}" if isinstance(hint, str | Shard) else "# without hints by axis"
        names: dict[str, Any] = {name: getattr(self, name) for name in _OPTION_NAMES}
        names["optimizer"] = self.optimizer.removesuffix(ON_HOST)
        if isinstance(self.like, Mapping):
            by_axis = all(isinstance(v, str) and v in STRATEGY_NAMES for v in self.like.values())
            names["like"] = ",".join(f"{k}={v}" for k, v in self.like.items()) if by_axis else self.like
        if self.mixed_precision is not None and self.mixed_precision.param is not None:
            names["mixed_precision"] = str(self.mixed_precision.param).removeprefix("torch.")
        if self.profile and all(isinstance(n, int | float) for n in self.profile.values()):
            names["profile"] = ",".join(f"{name}={n:g}" for name, n in self.profile.items())
        if self.micro_batches == AUTO:
            names["micro_batches"] = "auto"
        for name, value in names.items():
            if value == getattr(CompileOptions, name):
                continue
            if not isinstance(value, str | int | float):
                yield f"# without {name} by module" if name != "profile" else "# without the calls of the profile"
            else:
                yield f"--{name.replace('_', '-')}" + (
                    "" if value is True else f"={value:.12g}" if isinstance(value, float) else f"={value}"
                )

    @property
    def parts_of_plan(self) -> int:
        """Micro-batches of the followed plan."""
        assert self.plan is not None
        return self.plan.micro_batches if self.plan.staged is None else self.plan.staged.micro_batches

    def budget(self, hardware: Hardware) -> float:
        """Memory budget of a rank in bytes, without what is held."""
        whole = DEFAULT_BUDGET_SHARE * hardware.memory_bytes if self.memory_budget is None else self.memory_budget
        return max(1.0, whole - self.held)

    @property
    def parts(self) -> int:
        """``micro_batches``; AUTO means the followed plan's number, if there is a plan."""
        return self.parts_of_plan if self.micro_batches == AUTO and self.plan is not None else self.micro_batches


@dataclass(frozen=True)
class KnownLayouts:
    """Layouts that a program takes as they are, from earlier programs and from its call."""

    parameters: Mapping[str, Layout] | None = None
    """layouts of parameters and buffers; None: there is no earlier program"""
    states: Mapping[str, Layout] | None = None
    """layouts of caches (KV cache), by argument name; outputs of these names keep them"""
    inputs: tuple[Layout | None, ...] = ()
    """layout per leaf of the arguments; None or missing: replicated"""
    homes: Mapping[str, tuple[int, ...]] | None = None
    """parameter or buffer → its pipeline stages"""
    boundaries: tuple[int, ...] | None = None
    """operations of a micro-batch at which stages begin"""

    @property
    def later(self) -> bool:
        """Whether an earlier program has matched module names: this may run a part of them."""
        return self.parameters is not None


NOTHING_KNOWN = KnownLayouts()

_OPTION_NAMES = (
    *("like", "memory_budget", "optimizer", "recompute", "mixed_precision", "micro_batches", "stages", "schedule"),
    *("stages_per_rank", "objective", "profile", "strict", "loss_chunks", "offload"),
)
"""options that the command line has, too"""

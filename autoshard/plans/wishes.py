"""What is asked of a plan beside the model and the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autoshard.errors import PlanError
from autoshard.layout import Layout
from autoshard.passes.microbatch import AUTO
from autoshard.passes.propagate.recompute import Recompute
from autoshard.passes.search.network import FULL, Effort
from autoshard.plans.plan import Plan
from autoshard.precision import Precision


@dataclass(frozen=True)
class Wishes:
    """What is asked of a plan beside the model and the mesh; see :func:`autoshard.compile`."""

    hints: Mapping[str, Any] | None = None
    memory_budget: float | None = None
    optimizer: str = "adamw"
    recompute: Recompute = "auto"
    strict: bool = False
    plan: Plan | None = None
    """choices to follow instead of a search"""
    like: Any = None
    """an expert's plan: a name, a name per mesh axis, or styles by module"""
    parameters: Mapping[str, Layout] | None = None
    """layouts that an earlier compilation gave the parameters"""
    states: Mapping[str, Layout] | None = None
    """layouts of caches, by the names of the arguments that take them: outputs of such names are given back so"""
    mixed_precision: Precision | None = None
    micro_batches: int = 1
    """parts of the batch that a step with a backward runs one after another; AUTO: as many as make it cheapest"""
    inputs: tuple[Layout | None, ...] = ()
    """per leaf of the arguments the layout it comes in; None, or nothing: whole"""
    stages: str | None = None
    """the mesh axis along which the graph is cut into stages, instead of the tensors"""
    schedule: str = "1f1b"
    """the order in which stages run micro-batches: gpipe, 1f1b, interleaved or zero_bubble"""
    stages_per_rank: int | None = None
    """of schedules that interleave; None: as many as make the step shortest"""
    flying: int = 0
    """of one stage: the micro-batches that it keeps something for at once"""
    stays: bool = True
    """whether the search may leave parameters gathered, as stages 1 and 2 of ZeRO do"""
    boundaries: tuple[int, ...] | None = None
    """positions among the operations of a micro-batch before which stages are cut; None: searched"""
    effort: Effort = FULL
    """of the search"""
    homes: Mapping[str, tuple[int, ...]] | None = None
    """the stages that an earlier compilation put the parameters and buffers into"""
    objective: str = "step"
    """what is made small: the call that is given, a request's next token (latency), or all tokens (throughput)"""
    profile: Mapping[str, Any] | None = None
    """which calls there are, and how often each comes: see :mod:`autoshard.serving`"""

    def __post_init__(self) -> None:
        budget = self.memory_budget
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int | float) or not budget > 0):
            raise PlanError(f"memory_budget is bytes per rank, such as 40e9, got {budget!r}")

    def as_planned(self) -> Wishes:
        """With micro-batches, stages, their number and schedule of the plan to follow, where they are left to their defaults.

        Raises :class:`PlanError` where others are asked for.
        """
        plan = self.plan
        if plan is None or (plan.staged is None and not plan.training):  # a call without a backward runs as one
            return self
        made: dict[str, Any] = {"micro_batches": self.parts_of_plan}
        if plan.staged is not None:
            made |= {"stages": plan.staged.axis, "schedule": plan.staged.schedule}
            made |= {"stages_per_rank": len(plan.staged.plans) // plan.mesh.size_of(plan.staged.axis)}
        left = {name: value for name, value in made.items() if getattr(self, name) == getattr(Wishes, name)}
        for name, value in made.items():
            asked, is_count = getattr(self, name), name == "micro_batches"
            if name in left or asked == value or (is_count and (asked == AUTO or not plan.training)):
                continue
            raise PlanError(
                f"{name}={asked!r}: the plan that is given was made for {name}={value!r}. Leave {name} out, and it is the "
                "plan's, or plan again"
            )
        return replace(self, **left)

    @property
    def parts_of_plan(self) -> int:
        """Micro-batches that the plan to follow was made for."""
        assert self.plan is not None
        return self.plan.micro_batches if self.plan.staged is None else self.plan.staged.micro_batches

    @property
    def known(self) -> bool:
        """Whether an earlier program has met what names modules: this one may run a part of the model."""
        return self.parameters is not None

    @property
    def parts(self) -> int:
        """``micro_batches``; instead of AUTO as many as the plan to follow was made for."""
        return self.parts_of_plan if self.micro_batches == AUTO and self.plan is not None else self.micro_batches

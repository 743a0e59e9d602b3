"""Named strategies: requests of a name (``"fsdp"``) to operations and parameters of a graph."""

from autoshard.passes.propagate.named_strategies.strategies import (
    FREE,
    STRATEGY_NAMES,
    InfeasibleStrategyError,
    NamedStrategy,
    baseline_strategies,
    expand_tp_plan,
    given_up,
    resolve_like,
    without_hinted,
)

__all__ = [
    "FREE",
    "STRATEGY_NAMES",
    "InfeasibleStrategyError",
    "NamedStrategy",
    "baseline_strategies",
    "expand_tp_plan",
    "given_up",
    "resolve_like",
    "without_hinted",
]

"""Named strategies: requests of a name (``"fsdp"``) to operations and parameters of a graph."""

from autoshard.passes.propagate.named_strategies.strategies import (
    STRATEGY_NAMES,
    InfeasibleStrategyError,
    NamedStrategy,
    baseline_strategies,
    expand_tp_plan,
    resolve_like,
    search_with_fallback,
    without_hinted,
)

__all__ = [
    "STRATEGY_NAMES",
    "InfeasibleStrategyError",
    "NamedStrategy",
    "baseline_strategies",
    "expand_tp_plan",
    "resolve_like",
    "search_with_fallback",
    "without_hinted",
]

"""Serving plans: one layout of the weights for all calls, weighted by how often they come."""

from autoshard.serving.calls import ServedCall, check_asked
from autoshard.serving.search import (
    JointPlan,
    is_serving_asked,
    profile_calls,
    search_jointly,
    serving_plan,
    with_serving_layouts,
)

__all__ = [
    "JointPlan",
    "ServedCall",
    "check_asked",
    "is_serving_asked",
    "profile_calls",
    "search_jointly",
    "serving_plan",
    "with_serving_layouts",
]

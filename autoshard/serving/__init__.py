"""Serving plans: one layout of the weights for all calls, weighted by how often they come."""

from autoshard.serving.calls import Call, check_asked
from autoshard.serving.search import Found, calls_for, is_asked, laid_out, served, together

__all__ = ["Call", "Found", "calls_for", "check_asked", "is_asked", "laid_out", "served", "together"]

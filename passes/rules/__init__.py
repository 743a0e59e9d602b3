"""The rule registry. Every module here that defines ``RULES: tuple[Rule, ...]`` takes part."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

import torch

from autoshard.passes.rules.base import Rule


def rule_for(op: torch._ops.OpOverload) -> Rule | None:
    """The rule of ``op``, or None: the op then runs on whole tensors."""
    return _registry().get(op)


def register(rule: Rule) -> None:
    """Add ``rule``; it replaces an earlier one of the same op."""
    _registry()[rule.op] = rule


def all_rules() -> tuple[Rule, ...]:
    """Every registered rule, by the op's name."""
    return tuple(sorted(_registry().values(), key=lambda rule: str(rule.op)))


@cache
def _registry() -> dict[torch._ops.OpOverload, Rule]:
    """Built on first use: the rule modules import the notation, which imports this package."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    return {rule.op: rule for module in modules for rule in getattr(module, "RULES", ())}

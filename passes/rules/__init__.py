"""The registry of sharding rules: each ``RULES: tuple[Rule, ...]`` in a module of :mod:`.families`,
and each ``BY_NAME``, ``{str(op): op → Rule}``, of ops that exist only once another library is
imported."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from types import ModuleType

from autoshard.aten import MissingOp
from autoshard.passes.rules.base import Rule
from autoshard.torch_private.ops import OpOverload


def rule_for(op: OpOverload) -> Rule | None:
    """The sharding rule of ``op``, or None: the op then runs on full tensors."""
    rules = _registry()
    found = rules.get(op)
    if found is None and (make := _by_name().get(str(op))):
        found = rules[op] = make(op)
    return found


def add_rule(rule: Rule) -> None:
    """Add ``rule``; it replaces an earlier one of the same op."""
    _registry()[rule.op] = rule


def all_rules() -> tuple[Rule, ...]:
    """Every registered rule, sorted by the op's name."""
    return tuple(sorted(_registry().values(), key=lambda rule: str(rule.op)))


@cache
def _registry() -> dict[OpOverload, Rule]:
    """Rules by op, built on first use: rule modules import this package."""
    rules = (rule for module in _modules() for rule in getattr(module, "RULES", ()))
    return {rule.op: rule for rule in rules if not isinstance(rule.op, MissingOp)}


@cache
def _by_name() -> dict[str, Callable[[OpOverload], Rule]]:
    return {name: make for module in _modules() for name, make in getattr(module, "BY_NAME", {}).items()}


def _modules() -> list[ModuleType]:
    families = importlib.import_module(f"{__name__}.families")
    return [importlib.import_module(f"{families.__name__}.{m.name}") for m in pkgutil.iter_modules(families.__path__)]

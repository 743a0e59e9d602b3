"""The references in calls, nested ones included."""

from __future__ import annotations

from autoshard.passes.ir.graph import Ref
from autoshard.passes.ir.program import Statement


def reads(statement: Statement) -> tuple[str, ...]:
    """Local names a statement reads, in order."""
    return tuple(ref.name for ref in call_refs(statement.call))


def call_refs(call: object) -> list[Ref]:
    """All references in a call, nested calls included."""
    found: list[Ref] = []
    args, kwargs = getattr(call, "args", ()), getattr(call, "kwargs", {})
    stack: list[object] = [*args, *kwargs.values()]
    for item in stack:
        if isinstance(item, Ref):
            found.append(item)
        elif isinstance(item, tuple | list):
            found += [r for part in item for r in _any_refs(part)]
        elif isinstance(item, dict):
            found += [r for part in item.values() for r in _any_refs(part)]
        elif hasattr(item, "args"):
            found += call_refs(item)
    return found


def _any_refs(item: object) -> list[Ref]:
    if isinstance(item, Ref):
        return [item]
    if hasattr(item, "args"):
        return call_refs(item)
    if isinstance(item, tuple | list):
        return [r for part in item for r in _any_refs(part)]
    return []

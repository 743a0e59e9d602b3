"""Names of statements and of moments of a step, as reports print them."""

from __future__ import annotations

from autoshard.passes.ir.program import Statement


def name_of(part: Statement) -> str:
    """The redistributed value, or the name of the operation."""
    return part.value if part.step is not None else part.node.name if part.node is not None else ""


def moment(s: Statement | None, phase: str) -> str:
    """``phase`` of statement ``s`` in words."""
    if s is None:
        return "the optimizer's step" if phase == "step" else phase
    where = s.node.fqn if s.node is not None else ""
    name = str(s.call.fn).removeprefix("aten.").removesuffix(".default")
    return f"the {phase} of {name} in {where or '(root)'}"

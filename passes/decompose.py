"""Ops without a sharding rule, written as several ops that have one: PyTorch's own decompositions, for the tail.

What has a rule stays whole: a linear layer or an attention is worth more than its parts.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import fx

from autoshard.passes.rules import rule_for

ORIGIN = "autoshard_origin"
"""key in a node's custom meta: the op that the node is a part of"""

ROUNDS = 3
"""a decomposition may lead to ops that have to be decomposed themselves"""

_KEPT = """
    aten.as_strided.default
"""


def decompose(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """``program`` without the ops that have no rule and can be written as others. Parts keep their module and line."""
    for _ in range(ROUNDS):
        tail = {op: how for op in _without_rule(program) if (how := _table().get(op)) is not None}
        if not tail:
            break
        for node in program.graph.nodes:
            if node.target in tail:
                node.meta["custom"] = {ORIGIN: str(node.target), **node.meta.get("custom", {})}
        program = program.run_decompositions(tail)
    return program


def origin(node: fx.Node) -> str:
    """The op that ``node`` was made from by a decomposition; "" where it is the user's own."""
    return str((node.meta.get("custom") or {}).get(ORIGIN, ""))


def _without_rule(program: torch.export.ExportedProgram) -> list[torch._ops.OpOverload]:
    found = dict.fromkeys(n.target for n in program.graph.nodes if isinstance(n.target, torch._ops.OpOverload))
    return [op for op in found if rule_for(op) is None]


@cache
def _table() -> dict[Any, Any]:
    from torch._decomp import core_aten_decompositions, decomposition_table

    core = core_aten_decompositions()
    return {op: how for op, how in {**decomposition_table, **dict(core.items())}.items() if op.namespace == "aten"}

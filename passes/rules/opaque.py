"""Ops of the runtime that run on whole tensors only."""

from __future__ import annotations

from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.rules.base import Rule
from autoshard.passes.rules.factors import whole
from autoshard.runtime.ctc import ctc_loss
from autoshard.runtime.exactly import exactly
from autoshard.runtime.functions import function


def _whole(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    return whole(len(node.inputs), len(node.outputs))


RULES: tuple[Rule, ...] = tuple(Rule(op._opoverload, _whole, notation="whole") for op in (ctc_loss, exactly, function))

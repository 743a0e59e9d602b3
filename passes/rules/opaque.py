"""Ops of the runtime that run on whole tensors only."""

from __future__ import annotations

from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.rules.base import Facts, Rule
from autoshard.passes.rules.factors import whole
from autoshard.runtime.ctc import ctc_loss
from autoshard.runtime.exactly import exactly
from autoshard.runtime.functions import function


def _whole(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    return whole(len(node.inputs), len(node.outputs))


RULES: tuple[Rule, ...] = (
    Rule(ctc_loss._opoverload, _whole, notation="whole", facts=Facts("log_probs targets input_lengths target_lengths")),
    Rule(exactly._opoverload, _whole, notation="whole", facts=Facts(saves="", effect=True)),
    Rule(function._opoverload, _whole, notation="whole"),
)

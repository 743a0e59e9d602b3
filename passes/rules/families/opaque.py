"""Runtime ops without a detailed rule: CTC loss by samples, others on full tensors."""

from __future__ import annotations

from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.rules.base import Facts, Rule
from autoshard.passes.rules.factors import Factors, Space, undivided
from autoshard.runtime.operations.ctc import ctc_loss
from autoshard.runtime.operations.exactly import exactly
from autoshard.runtime.operations.functions import function


def _ctc_samples(node: Node, graph: Graph) -> Space:
    """Samples, if the targets are rows of one tensor."""
    log_probs, targets, inputs, lengths = graph.shapes(node.inputs)
    if (len(log_probs), len(targets), len(inputs), len(lengths)) != (3, 2, 1, 1):
        return undivided(node, graph)
    return Factors(((None, "n", None), ("n", None), ("n",), ("n",)), (("n",),), {"n": log_probs[1]})


RULES: tuple[Rule, ...] = (
    Rule(
        ctc_loss._opoverload,
        _ctc_samples,
        notation="_ n _, n _, n, n -> n",
        facts=Facts("log_probs targets input_lengths target_lengths"),
    ),
    Rule(exactly._opoverload, undivided, notation="whole", facts=Facts(saves="", effect=True)),
    Rule(function._opoverload, undivided, notation="whole"),
)

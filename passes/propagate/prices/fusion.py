"""Kernel fusion: memory traffic where chains of elementwise operations run as one kernel.

As in torch.compile, elementwise operations, norms, softmax, reductions and losses fuse with
producers and readers of the kind. Values inside a chain are neither written nor read; only an
operation that writes launches a kernel. Redistributions do not end a chain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.rules.facts import facts_of, is_view, saved


@dataclass(frozen=True, slots=True)
class Traffic:
    """Which operands are read from memory, and which results are written."""

    reads: tuple[bool, ...]
    writes: tuple[bool, ...]

    @property
    def launches(self) -> bool:
        """Whether it is a kernel of its own, or the end of a chain."""
        return any(self.writes)


def is_chained(node: Node) -> bool:
    """Whether ``node`` fuses with neighbours of the kind."""
    return _chains(node.op)


@cache
def _chains(op: torch._ops.OpOverload) -> bool:
    return torch.Tag.pointwise in op.tags or torch.Tag.reduction in op.tags or facts_of(op).chains


def traffic(graph: Graph) -> Mapping[str, Traffic]:
    """Node name → its traffic. Views are neither read nor written."""
    kernel, base = _kernels(graph), _bases(graph)
    made_in = {name: kernel[of] for name, of in base.items()}
    views = {node.name for node in graph.nodes if is_view(node.op)}
    written = set(graph.returned)
    for node in graph.nodes:
        if node.name not in views:
            own, kept = kernel[node.name], saved(node, graph.types).operands if facts_of(node.op).chains else ()
            written.update([n for i, n in enumerate(node.inputs) if made_in[n] != own or i in kept])
    written = {base[name] for name in written}
    found = {}
    for node in graph.nodes:
        if node.name in views:
            found[node.name] = Traffic((False,) * len(node.inputs), (False,) * len(node.outputs))
        else:
            own = kernel[node.name]
            reads = tuple([made_in[n] != own for n in node.inputs])
            writes = tuple([own[1] != "" or o in written or not graph.uses[o] for o in node.outputs])
            found[node.name] = Traffic(reads, writes)
    return found


def _kernels(graph: Graph) -> dict[str, tuple[int, str]]:
    """Node or input → its kernel: (unfusible operations before it, own name if unfusible). A value
    that is read again after such an operation has gone to memory."""
    found = {i.name: (0, i.name) for i in graph.inputs}
    for node in graph.nodes:
        ends = not is_chained(node) and not is_view(node.op)
        deepest = max([found[name][0] for name in node.inputs], default=0) + ends
        kernel = found[node.name] = deepest, node.name if ends else ""
        for name in node.outputs:
            found[name] = kernel
    return found


def _bases(graph: Graph) -> dict[str, str]:
    """Value → the base of the view, or itself."""
    base = {name: name for name in graph.types}
    for node in graph.nodes:
        if is_view(node.op) and node.inputs:
            base.update(dict.fromkeys(node.outputs, base[node.inputs[0]]))
    return base

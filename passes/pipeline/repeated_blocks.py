"""A graph without its repeated blocks: quick to plan for many meshes.
The smaller graph computes something else, but its ops cost as much as in the blocks left out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard.passes.ir.graph import Graph, Node, map_refs
from autoshard.passes.ir.text import block_path

KEPT_BLOCKS = 2
"""equal consecutive blocks that stay: the first may have other neighbours"""


@dataclass(frozen=True)
class DeduplicatedBlocks:
    """``graph`` lacks blocks. ``blocks``: for each numbered module in order, its representative."""

    graph: Graph
    blocks: tuple[str, ...]

    def sequence(self, graph: Graph) -> tuple[tuple[tuple[Node, ...], ...], tuple[int, ...]]:
        """Rows of nodes, of a block or between two; the order of rows that makes the full graph.
        ``graph``: this one, or that of one of its micro-batches."""
        rows = _consecutive_blocks(graph.nodes)
        where: dict[str, list[int]] = {}
        for number, (path, _) in enumerate(rows):
            where.setdefault(path, []).append(number)
        found, done, seen = list[int](), 0, set[str]()
        for path in self.blocks:
            if path in seen:
                found += where[path]
            elif path in where:
                seen.add(path)
                end = max(done, where[path][-1] + 1)
                found += range(done, end)
                done = end
        return tuple(nodes for _, nodes in rows), (*found, *range(done, len(rows)))


def without_repeated_blocks(graph: Graph) -> DeduplicatedBlocks:
    """``graph`` with :data:`KEPT_BLOCKS` of equal consecutive blocks (numbered modules)."""
    parts = _consecutive_blocks(node for node in graph.nodes if block_path(node.fqn))
    forms = [_block_signature(graph, nodes) for _, nodes in parts]
    stand: list[str] = []
    dropped: set[str] = set()
    renamed: dict[str, str] = {}
    row = 0
    for i, (path, nodes) in enumerate(parts):
        alike = i > 0 and forms[i][0] == forms[i - 1][0]
        row = row + 1 if alike else 0
        if row < KEPT_BLOCKS:
            stand.append(path)
            continue
        stand.append(stand[-1])
        dropped.update(n.name for n in nodes)
        renamed.update(zip(forms[i][1], (renamed.get(n, n) for n in forms[i - 1][1]), strict=True))
    return DeduplicatedBlocks(_without_nodes(graph, dropped, renamed), tuple(stand))


def _consecutive_blocks(nodes: Iterable[Node]) -> list[tuple[str, tuple[Node, ...]]]:
    """Consecutive nodes of one block; "" is none."""
    return [(path, tuple(row)) for path, row in itertools.groupby(nodes, lambda node: block_path(node.fqn))]


def _block_signature(graph: Graph, nodes: Sequence[Node]) -> tuple[Any, tuple[str, ...]]:
    """Signature that equal blocks share, and the values that others read of the block."""
    own = {n.name for n in nodes}
    numbers: dict[str, int] = {}

    def number(name: str) -> tuple[int, Any]:
        return numbers.setdefault(name, len(numbers)), graph.types[name]

    lines = []
    for node in nodes:
        arguments = map_refs((node.args, dict(node.kwargs)), lambda ref: number(ref.name))
        lines.append((node.op, repr(arguments), tuple(number(name) for name in node.outputs)))
    sent = tuple(
        name
        for node in nodes
        for name in node.outputs
        if name in graph.returned or any(reader.name not in own for reader in graph.uses[name])
    )
    return (tuple(lines), tuple(numbers[name] for name in sent)), sent


def _without_nodes(graph: Graph, dropped: set[str], renamed: Mapping[str, str]) -> Graph:
    """``graph`` without ``dropped`` nodes; their values are read under other names."""
    graph = replace(graph, nodes=tuple(n for n in graph.nodes if n.name not in dropped)).renamed(renamed)
    read = {name for node in graph.nodes for name in node.inputs}
    inputs = tuple(i for i in graph.inputs if i.kind == "input" or i.name in read)
    names = [*(i.name for i in inputs), *(o for n in graph.nodes for o in n.outputs)]
    return replace(
        graph,
        inputs=inputs,
        types={name: graph.types[name] for name in names},
        mutations={
            fqn: name
            for fqn, name in graph.mutations.items()
            if any(i.fqn == fqn for i in inputs) and name in set(names)
        },
        constants={name: x for name, x in graph.constants.items() if name in read},
    )

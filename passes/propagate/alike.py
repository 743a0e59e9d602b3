"""Labels of variables in the same place of repeated modules: the search may tie their choices."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable
from functools import lru_cache

from autoshard.passes.ir.graph import Graph
from autoshard.passes.ir.paths import block_path


@lru_cache(maxsize=4096)
def _kind(block: str) -> str:
    """A block's path without its number."""
    return re.sub(r"\d+$", "", block)


def alike(graph: Graph, variables: Iterable[str]) -> tuple[Hashable | None, ...]:
    """Per variable its place in its block, without the block's number; None: outside all blocks.

    Place of an operation: how many precede it in its block; of a parameter: its name there. Blocks
    of equal labels may differ; the search compares their tables.
    """
    places: dict[str, Hashable] = {}
    counts: Counter[str] = Counter()
    for node in graph.nodes:
        block = block_path(node.fqn)
        if block:
            kind, number = _kind(block), counts[block]
            counts[block] += 1
            places[f"node:{node.name}"] = kind, number
            places.update((f"shared:{name}", (kind, number, slot)) for slot, name in enumerate(node.outputs))
    for value in graph.inputs:
        if value.kind == "parameter" and (block := block_path(value.fqn)):
            place = _kind(block), value.fqn.removeprefix(block)
            places[value.name], places[f"shared:{value.name}"] = place, ("shared", *place)
    return tuple(places.get(name) for name in variables)

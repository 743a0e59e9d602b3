"""Op spaces of operations whose looked-up operands share one message (:mod:`.prices.joined`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np

from autoshard.passes.ir.graph import Node
from autoshard.passes.propagate.op_space import OpSpace, OpSpaces
from autoshard.passes.propagate.prices.joined import Ways, joins, latencies, ways


class SpacesWithWays(OpSpaces):
    """Adds a copy of a strategy per layout from which looked-up operands can share a message."""

    def __getitem__(self, node: Node) -> OpSpace:
        space = super().__getitem__(node)
        if space.ways is None and node.name in self._values:
            space = self._of[node.name] = self._with_ways(node, space, self._values[node.name])
        return space

    @cached_property
    def _values(self) -> Mapping[str, tuple[str, ...]]:
        return {node.name: values for node, values in joins(self.graph, self.mesh)}

    def _with_ways(self, node: Node, space: OpSpace, values: tuple[str, ...]) -> OpSpace:
        type_, mesh = self.graph.types[values[0]], self.mesh
        sources = tuple(ways(type_, mesh))
        uses = [space.inputs[i] for i, name in enumerate(node.inputs) if name in values]
        pays = np.max([latencies(type_, mesh, sources, placed, self.waits.message) for placed in uses], axis=0)
        pairs: list[tuple[int, int | None]] = [(i, None) for i in range(len(space.choices))]
        pairs += [(int(i), s) for s, row in enumerate(pays) for i in np.flatnonzero(row)]
        at = [i for i, _ in pairs]
        inside = space.inside[:, at]
        inside[0] += [0.0 if s is None else pays[s, i] for i, s in pairs]
        return replace(
            space,
            choices=tuple(space.choices[i] for i in at),
            compute=space.compute[:, at],
            launches=space.launches[:, at],
            inside=inside,
            inside_again=space.inside_again[at],
            spared={i: x[at] for i, x in space.spared.items()},
            inputs=tuple(tuple(x[i] for i in at) for x in space.inputs),
            outputs=tuple(tuple(x[i] for i in at) for x in space.outputs),
            ways=Ways(values, sources, np.array([0 if s is None else s + 1 for _, s in pairs])),
        )

"""What every operation could have done instead, and what one such change alone would cost: for reports and pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from autoshard.layout import Layout
from autoshard.passes.ir.assignment import Placements
from autoshard.passes.ir.graph import Node, Ref
from autoshard.passes.ir.program import Program
from autoshard.passes.propagate.op_space import OpSpace, op_space, signature
from autoshard.passes.redistribute import cost_matrix

Alternative = tuple[tuple[str, ...], float]
"""(a label per mesh axis, seconds more per step)"""


def alternatives(program: Program, limit: int = 3) -> dict[str, tuple[Alternative, ...]]:
    """Node name → its ``limit`` cheapest other strategies, and the cheapest one that divides each unused mesh axis.

    Seconds are those of changing this one operation and the redistributions around it, all else as it is: an upper
    bound of what the change costs, because a search might adapt the neighbours too. Never negative in a plan that
    is optimal.
    """
    return _Alternatives(program, limit).run()


class _Alternatives:
    def __init__(self, program: Program, limit: int) -> None:
        self.program, self.limit = program, limit
        self.graph, self.mesh, self.assignment = program.graph, program.mesh, program.assignment
        self.spaces: dict[Any, OpSpace] = {}
        self.found: dict[Any, tuple[Alternative, ...]] = {}
        self.parameters = {i.name for i in self.graph.inputs if i.kind == "parameter"}
        self.targets = self._targets()

    def run(self) -> dict[str, tuple[Alternative, ...]]:
        return {node.name: self._of(node) for node in self.graph.nodes}

    def _targets(self) -> dict[str, list[Placements]]:
        """Value → the layouts its definition is converted into."""
        targets: dict[str, list[Placements]] = {}
        for node in self.graph.nodes:
            for i, name in enumerate(node.inputs):
                targets.setdefault(name, []).append(self._use(node, i))
        for out, layout in zip(self.graph.outputs, self.assignment.outputs, strict=True):
            if isinstance(out, Ref) and layout is not None:
                targets.setdefault(out.name, []).append(layout.placements)
        shared = {name: [layout.placements] for name, layout in self.assignment.shared.items()}
        return {name: list(dict.fromkeys(found)) for name, found in targets.items()} | shared

    def _space(self, node: Node) -> OpSpace:
        key = signature(node, self.graph)
        if key not in self.spaces:
            self.spaces[key] = op_space(node, self.graph, self.mesh)
        return self.spaces[key]

    def _current(self, node: Node) -> int | None:
        labels = tuple(s.label for s in self.assignment.choices[node.name])
        choices = self._space(node).choices
        return next((i for i, c in enumerate(choices) if tuple(s.label for s in c) == labels), None)

    def _use(self, node: Node, operand: int) -> Placements:
        current = self._current(node)
        return self._space(node).inputs[operand][current] if current is not None else ()

    def _of(self, node: Node) -> tuple[Alternative, ...]:
        current, space = self._current(node), self._space(node)
        if current is None or len(space.choices) < 2:
            return ()
        sources = tuple(self._source(name) for name in node.inputs)
        targets = tuple(tuple(self.targets.get(name, ())) for name in node.outputs)
        owned = tuple(name in self.parameters for name in node.inputs)
        key = (id(space), current, sources, targets, owned)
        if key not in self.found:
            seconds = space.seconds.copy()
            for name, source, placed in zip(node.inputs, sources, space.inputs, strict=True):
                seconds += self._seconds(name, [source], placed)[0]
            for name, wanted, placed in zip(node.outputs, targets, space.outputs, strict=True):
                if wanted:
                    seconds += self._seconds(name, placed, wanted).sum(axis=1)
            self.found[key] = self._best(space, seconds - seconds[current], current)
        return self.found[key]

    def _source(self, name: str) -> Placements:
        shared = self.assignment.shared.get(name)
        return (shared or self.assignment.layouts[name]).placements

    def _seconds(self, name: str, sources: Any, targets: Any) -> np.ndarray:
        type_ = self.graph.types[name]
        a, b = ([Layout(self.mesh, p) for p in side] for side in (sources, targets))
        seconds = cost_matrix(a, b, type_.shape, type_.dtype, type_.grad, type_.unknown)
        if name in self.parameters and type_.grad:  # gathered once more in the backward
            a, b = ([layout.without_gradient() for layout in side] for side in (a, b))
            seconds = seconds + cost_matrix(a, b, type_.shape, type_.dtype, False)
        return seconds

    def _best(self, space: OpSpace, extra: np.ndarray, current: int) -> tuple[Alternative, ...]:
        order = [int(i) for i in np.argsort(extra, kind="stable") if i != current and math.isfinite(extra[i])]
        kept = order[: self.limit]
        for axis, size in enumerate(self.mesh.shape):
            if size > 1 and not space.choices[current][axis].divides:
                kept += [i for i in order if space.choices[i][axis].divides][:1]
        return tuple(
            (tuple(s.label for s in space.choices[i]), float(extra[i])) for i in sorted(set(kept), key=order.index)
        )


def cheapest_use(found: Mapping[str, tuple[Alternative, ...]], axis: int) -> tuple[str, float] | None:
    """The node that could be divided along mesh axis number ``axis`` for the least, and the seconds more it costs."""
    candidates = (
        (seconds, name) for name, others in found.items() for labels, seconds in others if divides(labels[axis])
    )
    best = min(candidates, default=None)
    return None if best is None else (best[1], best[0])


def divides(label: str) -> bool:
    """Whether a strategy with this label cuts a factor: it is not I, R or P(…)."""
    return label not in ("I", "R") and not label.startswith("P(")

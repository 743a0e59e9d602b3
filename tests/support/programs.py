"""Small graphs with chosen layouts, written by hand: what the passes of lowering start from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from autoshard.layout import I, Layout, P, Placement, R, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Assignment, Strategy, normalize_placement
from autoshard.passes.ir.graph import Graph, Input, Node, Ref, TensorType
from autoshard.passes.ir.program import Program
from autoshard.passes.lower.lowering import lower_graph
from autoshard.passes.propagate.op_space import axis_strategies
from autoshard.passes.redistribute import link_matrices
from autoshard.passes.search.network import Solution

LETTERS: dict[str, Placement] = {"I": I, "R": R, "P": P, "0": Shard(0), "1": Shard(1)}


def layouts_on(mesh: Mesh, placed: Iterable[Sequence[Placement]]) -> list[Layout]:
    return [Layout(mesh, p) for p in placed]


def cost_matrix(*between: Any) -> Any:
    """Seconds of redistributions between two lists of layouts."""
    return sum(link_matrices(*between))


class Draft:
    """A graph that grows line by line, on a network where only bytes count.

    Placements are a word per mesh axis, such as ``"0 I"`` for S(0) and I; so are labels of strategies.
    """

    def __init__(self, **axes: int) -> None:
        self.mesh = Mesh(axes, hardware="ideal_network")
        self.types: dict[str, TensorType] = {}
        self.inputs: list[Input] = []
        self.nodes: list[Node] = []
        self.layouts: dict[str, Layout] = {}
        self.shared: dict[str, Layout] = {}
        self.choices: dict[str, tuple[Strategy, ...]] = {}

    def layout(self, words: str) -> Layout:
        return Layout(self.mesh, [LETTERS[w] for w in words.split()])

    def parameter(self, fqn: str, shape: Sequence[int], placements: str) -> None:
        self._input(Input(fqn.replace(".", "_"), "parameter", fqn), shape, placements, True)

    def input(self, name: str, shape: Sequence[int], placements: str, grad: bool = False) -> None:
        self._input(Input(name, "input", name), shape, placements, grad)

    def _input(self, value: Input, shape: Sequence[int], placements: str, grad: bool) -> None:
        self.inputs.append(value)
        self.types[value.name] = TensorType(tuple(shape), torch.float32, grad)
        self.layouts[value.name] = self.layout(placements)

    def op(self, name: str, op: torch._ops.OpOverload, args: Sequence[Any], labels: str, fqn: str = "") -> None:
        """``name = op(*args)``; strings among ``args`` are values, ``labels`` its strategies."""
        given = tuple(Ref(a) if isinstance(a, str) else a for a in args)
        node = Node(name, op, given, {}, (name,), (0,), fqn, frames=(("model.py", 1),))
        made = op(*(torch.empty(self.types[a.name].shape) if isinstance(a, Ref) else a for a in given))
        grad = any(self.types[n].grad for n in node.inputs)
        self.nodes.append(node)
        self.types[name] = TensorType(tuple(made.shape), made.dtype, grad)
        by_label = {s.label: s for s in axis_strategies(node, self.graph())}
        self.choices[name] = choice = tuple(by_label[label] for label in labels.split())
        self.layouts[name] = Layout(self.mesh, [normalize_placement(s.outputs[0], grad) for s in choice])

    def layers(self, count: int, stored: str, labels: str) -> str:
        """``count`` blocks of two products with parameters in the placements ``stored``; returns the last value."""
        value = "x"
        for i in range(count):
            for name, shape in (("up", (16, 32)), ("out", (32, 16))):
                self.parameter(f"l.{i}.{name}", shape, stored)
                self.op(f"{name}{i}", torch.ops.aten.mm.default, (value, f"l_{i}_{name}"), labels, f"l.{i}")
                value = f"{name}{i}"
        return value

    def graph(self, outputs: Sequence[str] = ()) -> Graph:
        return Graph(tuple(self.inputs), tuple(self.nodes), self.types, tuple(map(Ref, outputs)), None, None)

    def assignment(self, **outputs: str) -> Assignment:
        """``outputs``: the values that are returned, each in these placements."""
        returned, solution = tuple(map(self.layout, outputs.values())), Solution((), 0.0, 0.0, True, {})
        graph = self.graph(list(outputs))
        return Assignment(graph, self.mesh, self.layouts, self.shared, self.choices, returned, solution)

    def program(self, **outputs: str) -> Program:
        """Lowered; ``outputs`` as of :meth:`assignment`."""
        return lower_graph(self.graph(list(outputs)), self.assignment(**outputs))


def text(program: Program) -> str:
    """The printed program, without the line of inputs, types, and remarks on statements."""
    lines = (re.sub(r"    # .*", "", line) for line in str(program).splitlines()[1:])
    return "\n" + "\n".join(re.sub(r": \w+\[[^]]*\] ", ": ", line) for line in lines) + "\n"

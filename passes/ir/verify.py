"""What a valid graph and a valid program are. Every pass takes valid data and gives valid data; build() checks it."""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.errors import PlanError
from autoshard.layout import Placement
from autoshard.passes.ir.graph import Graph, Ref, refs
from autoshard.passes.ir.program import Program, Statement
from autoshard.passes.ir.walk import reads


def check_graph(graph: Graph) -> None:
    """Every value has one definition and a type, and is defined before it is read. Raises :class:`PlanError`."""
    defined: set[str] = set()
    for value in graph.inputs:
        _define(value.name, defined, graph, "an input")
    for node in graph.nodes:
        for name in node.inputs:
            if name not in defined:
                raise PlanError(f"invalid graph: {node.name} reads {name} before it is defined")
        for name in node.outputs:
            _define(name, defined, graph, node.name)
    for name in (*(r.name for r in refs(graph.outputs)), *graph.mutations.values()):
        if name not in defined:
            raise PlanError(f"invalid graph: it returns {name}, which nothing defines")


def _define(name: str, defined: set[str], graph: Graph, where: str) -> None:
    if name in defined:
        raise PlanError(f"invalid graph: {name} is defined twice, the second time by {where}")
    if name not in graph.types:
        raise PlanError(f"invalid graph: {name}, defined by {where}, has no type")
    defined.add(name)


def check_program(program: Program) -> None:
    """Every read is of a local value in exactly the layout the reader was planned for. Raises :class:`PlanError`."""
    made = {value.name for value in program.graph.inputs}
    value_of = {name: name for name in program.graph.types}
    for statement in program.statements:
        for name in reads(statement):
            if name not in made:
                raise PlanError(f"invalid program: {_what(statement)} reads {name} before it is made")
        for part in statement.members or (statement,):
            if part.step is None:
                _check_operation(part, program, value_of)
                continue
            source = program.layouts[reads(part)[0]]
            if source != part.step.src:
                raise PlanError(f"invalid program: {part.step} starts from a value that lies in {source}")
            value_of[part.outputs[0]] = part.value
        made.update(name for name in statement.outputs if name != "_")
    promised = zip(program.outputs, program.assignment.outputs, strict=True)
    for out, layout in promised:
        if isinstance(out, Ref) and program.layouts[out.name] != layout:
            raise PlanError(f"invalid program: output {out.name} lies in {program.layouts[out.name]}, not {layout}")


def _check_operation(statement: Statement, program: Program, value_of: Mapping[str, str]) -> None:
    node = statement.node
    if node is None:
        return
    wanted: dict[str, set[tuple[Placement, ...]]] = {}
    for i, value in enumerate(node.inputs):
        wanted.setdefault(value, set()).add(program.assignment.use(node, i))
    for name in reads(statement):
        value = value_of[name]
        if program.layouts[name].placements not in wanted[value]:
            raise PlanError(
                f"invalid program: {_what(statement)} reads {value} as {program.layouts[name]}, its strategy differs"
            )
    for slot, value in enumerate(node.outputs):
        if program.layouts[value].placements != program.assignment.made(node, slot):
            raise PlanError(f"invalid program: {_what(statement)} does not make {value} as {program.layouts[value]}")


def _what(statement: Statement) -> str:
    return str(statement.step if statement.step is not None else statement.node)

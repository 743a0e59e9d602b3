"""Verifier of graphs and programs; every pass preserves validity."""

from __future__ import annotations

from collections.abc import Set

from autoshard.errors import PlanError
from autoshard.layout import Placement
from autoshard.passes.ir.assignment import is_fully_replicated
from autoshard.passes.ir.graph import Graph, Ref
from autoshard.passes.ir.program import Program, Statement, fuse_replica_gather, merge_statements, reads


def check_graph(graph: Graph) -> None:
    """Check that each value has a type and one definition before reads, else :class:`PlanError`."""
    defined: set[str] = set()
    for value in graph.inputs:
        _check_definition(value.name, defined, graph, "an input")
    for node in graph.nodes:
        for name in node.inputs:
            if name not in defined:
                raise PlanError(f"invalid graph: {node.name} reads {name} before it is defined")
        for name in node.outputs:
            _check_definition(name, defined, graph, node.name)
    for name in sorted(graph.returned):
        if name not in defined:
            raise PlanError(f"invalid graph: it returns {name}, which nothing defines")


def _check_definition(name: str, defined: set[str], graph: Graph, where: str) -> None:
    if name in defined:
        raise PlanError(f"invalid graph: {name} is defined twice, the second time by {where}")
    if name not in graph.types:
        raise PlanError(f"invalid graph: {name}, defined by {where}, has no type")
    defined.add(name)


def check_program(program: Program) -> None:
    """Raise :class:`PlanError` for reads in other layouts, and merged calls unlike their
    members."""
    made = {value.name for value in program.graph.inputs}
    for statement in program.statements:
        _check_reads(statement, made)
        if statement.members:
            _check_merged(statement, program)
        inside: set[str] = set()
        for part in statement.parts:
            _check_reads(part, made, inside)
            if part.step is None:
                _check_operation(part, program)
            else:
                _check_redistribution(part, program)
            inside.update(part.outputs)
        made.update(name for name in statement.outputs if name != "_")
    for out, layout in zip(program.outputs, program.assignment.outputs, strict=True):
        if isinstance(out, Ref) and program.layouts[out.name] != layout:
            raise PlanError(f"invalid program: output {out.name} has layout {program.layouts[out.name]}, not {layout}")
    for name in sorted(program.returned):
        if name not in made:
            raise PlanError(f"invalid program: it returns {name}, which nothing makes")
    for fqn, name in program.mutations.items():
        if program.layouts[name] != program.assignment.written(fqn):
            raise PlanError(f"invalid program: {fqn} is written in {program.layouts[name]}, and kept in another layout")


def _check_reads(statement: Statement, *made: Set[str]) -> None:
    for name in reads(statement):
        if not any(name in names for names in made):
            raise PlanError(f"invalid program: {_describe_statement(statement)} reads {name} before it is made")


def _check_merged(statement: Statement, program: Program) -> None:
    """Check that call, outputs and layouts are those of the merged members."""
    chains = [(m, fuse_replica_gather(*m.members)) for m in statement.members if m.members]
    whole = merge_statements(str(statement.call.fn), statement.members, program.assignment.zero)
    for s, made_of in [(statement, whole), *chains]:
        if (s.outputs, s.layouts, s.call) != (made_of.outputs, made_of.layouts, made_of.call):
            raise PlanError(
                f"invalid program: {', '.join(s.outputs)} = {s.call} is not what its members are together: "
                f"{', '.join(made_of.outputs)} = {made_of.call}"
            )


def _check_redistribution(statement: Statement, program: Program) -> None:
    """Check that a step's source and target are the layouts of its operand and result."""
    step, operands = statement.step, reads(statement)
    if step is None or len(operands) != 1 or len(statement.outputs) != 1:
        raise PlanError(f"invalid program: {statement.call} is not one step, and has no members")
    source, made = program.layouts[operands[0]], program.layouts[statement.outputs[0]]
    if source != step.src:
        raise PlanError(f"invalid program: {step} starts from a value of layout {source}")
    if (step.dst,) != statement.layouts or step.dst != made:
        raise PlanError(f"invalid program: {step} makes {statement.outputs[0]}, whose layout is {made}")


def _check_operation(statement: Statement, program: Program) -> None:
    """Check that an operation's operands and results have the placements of its strategy."""
    node = statement.node
    if node is None:
        return
    wanted: dict[str, set[tuple[Placement, ...]]] = {}
    for i, value in enumerate(node.inputs):
        wanted.setdefault(value, set()).add(program.assignment.use(node, i))
    if isinstance(counted := statement.call.kwargs.get("counted"), Ref):
        whole, value = program.layouts[counted.name], program.values.get(counted.name, counted.name)
        if value not in wanted or not is_fully_replicated(whole.placements):
            raise PlanError(
                f"invalid program: {_describe_statement(statement)} counts {value} as "
                f"{whole}, not as the full tensor of its labels"
            )
        wanted[value].add(whole.placements)
    for name in reads(statement):
        value = program.values.get(name, name)
        if program.layouts[name].placements not in wanted.get(value, ()):
            raise PlanError(
                f"invalid program: {_describe_statement(statement)} reads {value} as {program.layouts[name]}, its "
                "strategy differs"
            )
    for slot, value in enumerate(node.outputs):
        if program.layouts[value].placements != program.assignment.made(node, slot):
            raise PlanError(
                f"invalid program: {_describe_statement(statement)} does not make {value} as {program.layouts[value]}"
            )


def _describe_statement(statement: Statement) -> str:
    return str(statement.step or statement.node)

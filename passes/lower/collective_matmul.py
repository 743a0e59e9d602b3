"""Collective matmul (asynchronous tensor parallelism): ring steps overlap with products."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache

from autoshard.passes.ir.program import (
    COLLECTIVE_MATMULS,
    GATHER_PRODUCTS,
    SCATTER_PRODUCT,
    Program,
    RedistributionStep,
    Statement,
    merge_statements,
    reads,
)
from autoshard.passes.lower.bucket import order_units
from autoshard.passes.propagate.edges import is_collective_matmul
from autoshard.passes.propagate.prices.collective_matmul import LINEAR_OPS, overlapping_products


def fuse_collective_matmuls(program: Program) -> Program:
    """``program`` with gathers fused with products, and products with reduce-scatters."""
    graph = program.assignment.graph
    if not (near := overlapping_products(graph, program.mesh)):
        return program
    readers: dict[str, list[Statement]] = defaultdict(list)
    for s in program.statements:
        for name in dict.fromkeys(reads(s)):
            readers[name].append(s)
    makers = {o: s for s in program.statements for o in s.outputs}

    @cache
    def pays(value: str, src: object, dst: object) -> bool:
        return is_collective_matmul(graph, value, near[value], src, dst)  # type: ignore[arg-type]

    groups: dict[int, tuple[str, list[Statement]]] = {}
    gone, taken = set[int](), set[int]()
    for s in program.statements:
        if s.step is None or s.value not in near or not _is_full_conversion(s.step, s.value, program):
            continue
        source, out, group = makers.get(reads(s)[0]), s.outputs[0], list[Statement]()
        if s.step.kind == "all_gather" and all(_is_product_of(x, out, s) for x in readers[out]):
            function, group = GATHER_PRODUCTS, [s, *readers[out]]
        elif s.step.kind == "reduce_scatter" and source is not None and _is_plain_product(source):
            function, group = SCATTER_PRODUCT, [source, s] if len(readers[source.outputs[0]]) == 1 else []
        kept = out in program.returned if group and group[0] is s else reads(s)[0] in program.returned
        free = len(group) > 1 and not kept and taken.isdisjoint(map(id, group))
        if free and pays(s.value, s.step.src, s.step.dst):
            groups[id(group[0])] = function, group
            taken.update(map(id, group))
            gone.update(map(id, group[1:]))
    if not groups:
        return program
    units = [groups.get(id(s), ("", [s])) for s in program.statements if id(s) not in gone]
    functions = {id(unit[0]): function for function, unit in units}
    found = (
        merge_statements(functions[id(u[0])], u) if len(u) > 1 else u[0]
        for u in order_units([unit for _, unit in units])
    )
    return replace(program, statements=tuple(found))


def _is_full_conversion(step: RedistributionStep, value: str, program: Program) -> bool:
    """Whether a step is the full conversion from the definition to the shared layout, if any."""
    assignment = program.assignment
    return assignment.layouts[value] == step.src and assignment.shared.get(value, step.dst) == step.dst


def _is_plain_product(s: Statement) -> bool:
    return s.step is None and s.call.fn in LINEAR_OPS and not s.call.kwargs


def _is_product_of(s: Statement, name: str, gather: Statement) -> bool:
    return _is_plain_product(s) and reads(s)[0] == name and name not in reads(s)[1:] and s.block == gather.block


def settle_recomputed(program: Program, recomputed_ids: Collection[int]) -> Program:
    """``program`` with collective matmuls recomputed entirely, in the gather alone, or, else, split
    into statements. ``recomputed_ids``: ids of recomputed parts."""
    numbers = iter(range(-1, -len(program.statements) - 1, -1))
    statements = (x for s in program.statements for x in _settle_statement(s, recomputed_ids, numbers))
    return replace(program, statements=tuple(statements))


def _settle_statement(s: Statement, recomputed_ids: Collection[int], numbers: Iterator[int]) -> Sequence[Statement]:
    again = [id(part) in recomputed_ids for part in s.parts]
    if s.call.fn not in COLLECTIVE_MATMULS or all(again) or not any(again):
        return (s,)
    if s.call.fn == GATHER_PRODUCTS and again[0] and not any(again[1:]):
        return (merge_statements(GATHER_PRODUCTS, (replace(s.members[0], again=next(numbers)), *s.members[1:])),)
    return s.members

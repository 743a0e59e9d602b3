"""Gradient buckets (flat parameters): one collective redistributes a bucket of a block's
parameters. The backward reduces a bucket as soon as its last gradient is ready, so that both
overlap."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoshard.passes.ir.graph import refs
from autoshard.passes.ir.program import Program, Statement, fuse_replica_gather, merge_statements, reads
from autoshard.passes.lower.blocks import block_runs
from autoshard.passes.propagate.prices.coalescing import BUCKET_BYTES, bucket_bytes, is_bucketed
from autoshard.passes.rules.facts import is_view, saves_operand

_BUCKET_CALLS = {"enter": "enter_parameters", "all_gather": "gather_parameters"}


def bucket_parameters(program: Program) -> Program:
    """``program`` with parameters in buckets per block, each where its first member stood."""
    uses = Counter(name for s in program.statements for name in reads(s))
    uses.update([*(r.name for r in refs(program.outputs)), *program.mutations.values()])
    blocks = [_fuse_hybrid_gathers(run, uses, program) for _, run in block_runs(program)]
    program = replace(program, assignment=replace(program.assignment, zero=_zero_stages(blocks, program)))
    return replace(program, statements=tuple(s for block in blocks for s in _merge_buckets(block, program)))


def regathered_parameters(program: Program) -> set[str]:
    """Local names of parameters that the backward gathers again (ZeRO-3), bucket by bucket."""
    readers: dict[str, list[Statement]] = {}
    for part in (part for s in program.statements for part in s.parts):
        for name in reads(part):
            readers.setdefault(name, []).append(part)
    gathers = (
        s.outputs for s in program.statements if s.call.fn == "gather_parameters" and not s.call.kwargs.get("zero")
    )
    return {o for outputs in gathers if any(_is_saved(o, readers, program) for o in outputs) for o in outputs}


def prefetch_depth(program: Program) -> int:
    """Prefetch depth: buckets gathered ahead of the one in use, those of one block, as in FSDP2.
    With fewer, the link idles where a block reads few parameters, and compute where it reads
    many."""
    gathers = Counter(s.block for s in program.statements if s.call.fn == "gather_parameters")
    if gathers.total() < 2:
        return 0
    return min(program.mesh.hardware.ahead, max((count for block, count in gathers.items() if block), default=1))


def _is_saved(name: str, readers: Mapping[str, list[Statement]], program: Program) -> bool:
    """Whether autograd saves ``name``, or a redistributed copy or view of it."""
    for s in readers.get(name, ()):
        same = s.step is not None or (s.node is not None and is_view(s.node.op))
        if same and any(_is_saved(o, readers, program) for o in s.outputs):
            return True
        if s.step is None and s.node is not None and saves_operand(s.node, program.types, reads(s).index(name)):
            return True
    return False


def _fuse_hybrid_gathers(statements: Sequence[Statement], uses: Mapping[str, int], program: Program) -> list[Statement]:
    """Hybrid sharding (HSDP): I → R over replicas and the all-gather become one step."""
    enters = {s.outputs[0]: s for s in statements if s.parameter and s.step and s.step.kind == "enter"}
    gone: set[str] = set()
    result: list[Statement] = []
    for s in statements:
        enter = enters.get(reads(s)[0]) if s.parameter and s.step and s.step.kind == "all_gather" else None
        if enter is None or uses[enter.outputs[0]] != 1 or _bucket_call(s, program) is None:
            result.append(s)
        else:
            gone.update(enter.outputs)
            result.append(fuse_replica_gather(enter, s))
    return [s for s in result if gone.isdisjoint(s.outputs)]


def _merge_buckets(statements: Iterable[Statement], program: Program) -> Iterator[Statement]:
    """One block's statements, with redistributions of parameters merged."""
    for unit in order_units(_bucket_units(statements, program)):
        function = _bucket_call(unit[0], program)
        yield merge_statements(function, unit, program.assignment.zero) if function else unit[0]


def _zero_stages(blocks: Iterable[Sequence[Statement]], program: Program) -> dict[str, int]:
    """ZeRO stages by bucket, see :attr:`~autoshard.passes.ir.assignment.Assignment.zero`. A vector
    takes that of its block's largest matrix gathered along the same axes, whose messages its own
    would delay."""
    zero = dict(program.assignment.zero)
    for block in blocks:
        gathered = sorted(
            (s for s in block if _bucket_call(s, program) == "gather_parameters"),
            key=lambda s: _statement_bytes(s, program),
        )
        leads = {s.call.args[-1]: s.value for s in gathered if not _is_vector(s, program)}
        for s in gathered:
            lead = leads.get(s.call.args[-1]) if _is_vector(s, program) else None
            if lead in zero:
                zero[s.value] = zero[lead]
            elif lead is not None:
                zero.pop(s.value, None)
    return zero


def _is_vector(s: Statement, program: Program) -> bool:
    return len(program.types[s.value].shape) < 2


def _bucket_units(statements: Iterable[Statement], program: Program) -> list[list[Statement]]:
    """Buckets and unbucketed statements, in the order of their first members. Members share call,
    axes, target letter, dtypes, ZeRO stage and the number of earlier buckets (two axes are
    gathered in turn)."""
    units: list[list[Statement]] = []
    open_: dict[Any, list[Statement]] = {}
    depths: dict[str, int] = {}
    for s in statements:
        function = _bucket_call(s, program)
        if s.parameter:
            depth = depths.get(reads(s)[0], 0)
            depths[s.outputs[0]] = depth + (function is not None)
        if function is None:
            units.append([s])
            continue
        kwargs = s.call.kwargs
        alike = [kwargs.get(name) for name in ("to", "replicas", "dtype", "reduce_dtype")]
        stage = program.assignment.zero.get(s.value) if function == "gather_parameters" else None
        axes = s.call.args[-1]
        key = function, axes, *alike, program.types[s.value].dtype, depth, stage
        full = bucket_bytes(program.mesh, axes)
        full = full if function == "gather_parameters" else max(full, BUCKET_BYTES)
        if key not in open_ or sum(_statement_bytes(member, program) for member in open_[key]) >= full:
            open_[key] = []
            units.append(open_[key])
        open_[key].append(s)
    return units


def _bucket_call(s: Statement, program: Program) -> str | None:
    """The bucket version of the call; None for a statement that stays alone."""
    type_ = program.types.get(s.value)
    if s.step is None or not s.parameter or type_ is None or not is_bucketed(type_):
        return None
    return _BUCKET_CALLS.get(s.step.kind)


def order_units(units: Sequence[list[Statement]]) -> Iterator[list[Statement]]:
    """Stable topological order: each unit where its first member stood, after its operands."""
    maker = {name: i for i, unit in enumerate(units) for s in unit for name in s.outputs}
    needs = [dict.fromkeys(maker[name] for s in unit for name in reads(s) if name in maker) for unit in units]
    begun: set[int] = set()
    for root in range(len(units)):
        path = [] if root in begun else [(root, iter(needs[root]))]
        begun.add(root)
        while path:
            unit, rest = path[-1]
            before = next((i for i in rest if i not in begun), None)
            if before is None:
                yield units[unit]
                path.pop()
            else:
                begun.add(before)
                path.append((before, iter(needs[before])))


def _statement_bytes(s: Statement, program: Program) -> float:
    type_ = program.types[s.outputs[0]]
    layout = s.layouts[0]
    return math.prod(layout.max_local_shape(type_.shape)) * type_.dtype.itemsize if layout is not None else 0.0

"""Bring the parameters of a block into their layout of use together: one collective per bucket instead of one each.

Forward: one all-gather per bucket of sharded parameters. Backward: one all-reduce or reduce-scatter per bucket of
gradients, started as soon as the bucket's last gradient is there, so that it overlaps with the rest of the backward.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard.layout import Layout
from autoshard.passes.ir.graph import Ref
from autoshard.passes.ir.program import Call, Local, Program, Statement
from autoshard.passes.ir.walk import reads
from autoshard.passes.lower.blocks import Segment, segments
from autoshard.passes.rules.facts import is_view, saves_operand

BUCKET_BYTES = 25 * 2**20
"""a bucket is closed when it holds this many bytes per rank (the default of DistributedDataParallel)"""

_KINDS = {"enter": "enter_parameters", "all_gather": "gather_parameters"}


@dataclass(frozen=True)
class _Key:
    """What the members of one bucket have in common: the call, its axes, the target letter, dtype."""

    kind: str
    axes: tuple[str, ...]
    to: str
    replicas: tuple[str, ...]
    dtype: Any
    depth: int
    """buckets that the members came through: hybrid sharding gathers along one axis after another"""


def bucketed(segment: Segment, program: Program) -> Segment:
    """``segment`` with its parameters' conversions in buckets, each where its first member stood."""
    statements = _fused(segment)
    bucket_of: dict[str, list[Statement]] = {}
    open_: dict[_Key, list[Statement]] = {}
    depths: dict[str, int] = {}
    for s in statements:
        step = s.step
        if s.parameter:
            depths[s.outputs[0]] = depth = depths.get(reads(s)[0], 0)
        if not s.parameter or step is None or step.kind not in _KINDS or not program.types[s.value].grad:
            continue
        to, replicas = str(s.call.kwargs.get("to", "")), s.call.kwargs.get("replicas", ())
        dtype = program.types[s.value].dtype
        key = _Key(step.kind, step.axes, to, replicas, dtype, depth)
        bucket = open_.get(key)
        if bucket is None or sum(_bytes(member, program) for member in bucket) >= BUCKET_BYTES:
            bucket = open_[key] = []
        bucket.append(s)
        bucket_of[s.outputs[0]] = bucket
        depths[s.outputs[0]] = depth + 1
    return replace(segment, statements=tuple(_placed(statements, bucket_of)))


def regathered(program: Program) -> set[str]:
    """Local names of gathered parameters that the backward gathers again: all of a bucket if it needs one of them."""
    readers: dict[str, list[Statement]] = {}
    for s in program.statements:
        for name in reads(s):
            readers.setdefault(name, []).append(s)
    found: set[str] = set()
    for segment in segments(program):
        for s in bucketed(segment, program).statements:
            if s.call.fn == "gather_parameters" and any(_kept(o, readers, program) for o in s.outputs):
                found.update(s.outputs)
    return found


def _kept(name: str, readers: Mapping[str, list[Statement]], program: Program) -> bool:
    """Whether an op saves the value of ``name``, or of a conversion or view of it, for its backward."""
    for s in readers.get(name, ()):
        same = s.step is not None or (s.node is not None and is_view(s.node.op))
        if same and any(_kept(o, readers, program) for o in s.outputs):
            return True
        if s.step is None and s.node is not None and saves_operand(s.node, program.types, reads(s).index(name)):
            return True
    return False


def _fused(segment: Segment) -> tuple[Statement, ...]:
    """Hybrid sharding: I → R over the replicas and the gather of a shard as one call, which reduces the reduced shard."""
    uses = Counter(name for s in segment.statements for name in reads(s)) + Counter(segment.outputs)
    enters = {s.outputs[0]: s for s in segment.statements if s.parameter and s.step and s.step.kind == "enter"}
    fused: dict[str, Statement] = {}
    result: list[Statement] = []
    for s in segment.statements:
        first = enters.get(reads(s)[0]) if s.parameter and s.step and s.step.kind == "all_gather" else None
        if first is None or first.step is None or uses[first.outputs[0]] != 1:
            result.append(s)
            continue
        fused[first.outputs[0]] = first
        args = (first.call.args[0], *s.call.args[1:])
        result.append(replace(s, call=Call(s.call.fn, args, {**s.call.kwargs, "replicas": first.step.axes})))
    return tuple(s for s in result if not (s.outputs and s.outputs[0] in fused))


def _placed(statements: Sequence[Statement], bucket_of: Mapping[str, list[Statement]]) -> list[Statement]:
    """Every bucket where its first member stood, after all that its members are made from."""
    maker = {name: s for s in statements for name in s.outputs}
    placed: list[Statement] = []
    done: set[int] = set()

    def place(s: Statement) -> None:
        bucket = bucket_of.get(s.outputs[0]) if s.outputs else None
        members = bucket or [s]
        if id(members[0]) in done:
            return
        done.add(id(members[0]))
        for name in (name for member in members for name in reads(member) if name in maker):
            place(maker[name])
        placed.append(_merged(bucket) if bucket else s)

    for s in statements:
        place(s)
    return placed


def _merged(bucket: Sequence[Statement]) -> Statement:
    first = bucket[0]
    if first.step is None:
        return first
    outputs = tuple(s.outputs[0] for s in bucket)
    layouts: tuple[Layout | None, ...] = tuple(s.layouts[0] for s in bucket)
    call = merged_call(_KINDS[first.step.kind], bucket)
    return replace(first, outputs=outputs, call=call, layouts=layouts, members=tuple(bucket))


def merged_call(function: str, members: Sequence[Statement]) -> Call:
    """One call for redistribution steps of one kind over the same axes: every argument but the axes for each of them."""
    first = members[0].call
    *dims, axes = zip(*(s.call.args[1:] for s in members), strict=True)
    kwargs = {k: v for k, v in first.kwargs.items() if k != "size"}
    if any("size" in s.call.kwargs for s in members):
        kwargs["sizes"] = tuple(s.call.kwargs.get("size") or _length(s) for s in members)
    return Call(function, (tuple(Ref(reads(s)[0]) for s in members), *dims, axes[0]), kwargs)


def _length(s: Statement) -> Any:
    """The length of the gathered dim after the gather."""
    step = s.step
    if step is None:
        return None
    left = step.dst.axes_of(step.dims[0])
    return Local(step.shape[step.dims[0]], left) if left else step.shape[step.dims[0]]


def _bytes(s: Statement, program: Program) -> float:
    type_ = program.types[s.value]
    layout = s.layouts[0]
    return math.prod(layout.max_local_shape(type_.shape)) * type_.dtype.itemsize if layout is not None else 0.0

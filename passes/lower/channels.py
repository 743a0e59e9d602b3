"""Channels-last convolutions, as in Inductor (``decide_layout_opt``): oneDNN on CPU reads them
without a reorder. Results inherit the order, so mostly the input alone is copied; returned
values are contiguous. Elsewhere the copies are no-ops. A mean over pixels becomes a sum and a
division, since its gradient is contiguous and would mix two orders."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from autoshard.aten import aten
from autoshard.passes.ir.graph import Ref, map_refs
from autoshard.passes.ir.program import LocalCall, Program, Statement, reads
from autoshard.passes.rules.facts import is_view

ONEDNN_DTYPES = {torch.float32, torch.bfloat16}
"""dtypes in which oneDNN computes on every CPU that torch runs on"""

_CONVOLUTIONS = (aten.conv2d.default, aten.conv2d.padding)

_CONTIGUOUS_OPS = frozenset("linear addmm mm bmm baddbmm matmul scaled_dot_product_attention embedding".split())
"""ops with contiguous results, whatever the memory order of their operands"""

_LAYOUT_PRESERVING_OPS = frozenset(
    "batch_norm max_pool2d avg_pool2d adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d dropout".split()
)
"""ops besides pointwise ones whose results keep the memory order of the operand"""


def channels_last(program: Program) -> Program:
    """``program`` with image convolutions that read channels-last operands."""
    if not any(_is_convolution(s, program) for s in program.statements):
        return program
    statements: list[Statement] = []
    last, touched = set[str](), set[str]()
    """local names that are channels-last for certain, and those that may be"""
    for s in program.statements:
        if _is_convolution(s, program):
            x, *rest = s.call.args
            if not (isinstance(x, Ref) and x.name in last):
                s = replace(s, call=replace(s.call, args=(LocalCall("channels_last", (x,), {}), *rest)))
            last.update(s.outputs)
            touched.update(s.outputs)
        elif _is_pixel_mean(s, program) and s.call.args[0].name in touched:
            s = replace(s, call=_divided_sum(s.call, program))
        elif not touched.isdisjoint(reads(s)) and _operation_name(s) not in _CONTIGUOUS_OPS:
            touched.update(o for o in s.outputs if o != "_" and len(program.types[o].shape) > 2)
            if _preserves_layout(s) and last.issuperset(n for n in reads(s) if len(program.types[n].shape) > 3):
                last.update(s.outputs)
        statements.append(s)
    return _contiguous_outputs(replace(program, statements=tuple(statements)), program.returned & touched)


def _is_convolution(s: Statement, program: Program) -> bool:
    if s.call.fn not in _CONVOLUTIONS:
        return False
    made = program.types[s.outputs[0]]
    return made.dtype in ONEDNN_DTYPES and len(made.shape) == 4


def _is_pixel_mean(s: Statement, program: Program) -> bool:
    """Whether it is the mean over all pixels in float32 training, where both forms round alike."""
    if s.call.fn not in (aten.mean.dim, aten.adaptive_avg_pool2d.default) or not isinstance(s.call.args[0], Ref):
        return False
    x, made = program.types[s.call.args[0].name], program.types[s.outputs[0]]
    if len(x.shape) != 4 or x.unknown or not all(isinstance(n, int) for n in x.shape[2:]):
        return False
    all_ = {d % 4 for d in s.call.args[1] or ()} == {2, 3} if s.call.fn is aten.mean.dim else made.shape[2:] == (1, 1)
    return made.grad and all_ and x.dtype == made.dtype == torch.float32


def _divided_sum(call: LocalCall, program: Program) -> LocalCall:
    x, keeps = call.args[0], call.fn is not aten.mean.dim or call.args[2:3] == (True,)
    total = LocalCall(aten.sum.dim_IntList, (x, [2, 3], keeps), {})
    return LocalCall(aten.div.Scalar, (total, math.prod(program.types[x.name].shape[2:])), {})


def _operation_name(s: Statement) -> str:
    return s.call.fn if isinstance(s.call.fn, str) else s.call.fn._schema.name.partition("::")[2]


def _preserves_layout(s: Statement) -> bool:
    """Whether the result has the memory order of its 4-d operands, if these agree."""
    fn = s.call.fn
    if isinstance(fn, str) or is_view(fn):
        return False
    return torch.Tag.pointwise in fn.tags or _operation_name(s) in _LAYOUT_PRESERVING_OPS


def _contiguous_outputs(program: Program, names: frozenset[str]) -> Program:
    """``program`` whose returned values of these ``names`` are contiguous."""
    if not names:
        return program
    own = {name: f"{name}__numbered" for s in program.statements for name in s.outputs if name in names}
    made = (
        Statement(
            (new,), LocalCall("channels_first", (Ref(old),), {}), (program.layouts[old],), value=program.values[old]
        )
        for old, new in own.items()
    )
    return replace(
        program,
        statements=(*program.statements, *made),
        types={**program.types, **{new: program.types[old] for old, new in own.items()}},
        layouts={**program.layouts, **{new: program.layouts[old] for old, new in own.items()}},
        outputs=map_refs(program.outputs, lambda ref: Ref(own.get(ref.name, ref.name))),
        mutations={fqn: own.get(name, name) for fqn, name in program.mutations.items()},
    )

"""Ops without a sharding rule, written as several ops that have one: PyTorch's own decompositions, for the tail.

What has a rule stays whole: a linear layer or an attention is worth more than its parts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind

from autoshard.passes.exact import SINGLE
from autoshard.passes.rules import rule_for

ORIGIN = "autoshard_origin"
"""key in a node's custom meta: the op that the node is a part of"""

ROUNDS = 3
"""a decomposition may lead to ops that have to be decomposed themselves"""

_TABLE = """
    _chunk_cat _softmax_backward_data _log_softmax_backward_data _unsafe_masked_index
    _unsafe_masked_index_put_accumulate block_diag diag_embed dist linspace logspace native_dropout_backward
    native_group_norm native_layer_norm max_pool2d_with_indices_backward upsample_bicubic2d upsample_linear1d
    upsample_trilinear3d pixel_unshuffle nan_to_num rrelu_with_noise
""".split()
"""taken from PyTorch's tables; beside these, every op that PyTorch itself writes as others (composite implicit)"""


_WHOLE = frozenset({torch.ops.aten.where.default})
"""their results are as long as the data says, so their parts would run on full tensors as well"""


def decompose(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """``program`` without the ops that have no rule and can be written as others. Parts keep their module and line."""
    tried: set[torch._ops.OpOverload] = set()
    for _ in range(ROUNDS):
        tail = {op: how for op in _without_rule(program) if op not in tried and (how := _how(op)) is not None}
        if not tail:
            break
        tried.update(tail)
        for node in program.graph.nodes:
            if node.target in tail:
                node.meta["custom"] = {ORIGIN: str(node.target), **(node.meta.get("custom") or {})}
        written = program.run_decompositions(tail)
        if not _is_plain(written):
            break
        program = written
    return program


def _is_plain(program: torch.export.ExportedProgram) -> bool:
    """Whether it consists of ops that autograd knows, without tokens that order effects."""
    if any(spec.kind is InputKind.TOKEN for spec in program.graph_signature.input_specs):
        return False
    return not any(getattr(n.target, "namespace", "") == "prims" for n in program.graph.nodes)


def origin(node: fx.Node) -> str:
    """The op that ``node`` was made from by a decomposition; "" where it is the user's own."""
    return str((node.meta.get("custom") or {}).get(ORIGIN, ""))


def _without_rule(program: torch.export.ExportedProgram) -> list[torch._ops.OpOverload]:
    """Those of a float32 island in a float64 model stay: their parts would round otherwise."""
    found = dict.fromkeys(n.target for n in program.graph.nodes if isinstance(n.target, torch._ops.OpOverload))
    double = any(p.dtype == torch.float64 for p in program.parameters())
    islands = {n.target for n in program.graph.nodes if double and _is_single(n.meta.get("val"))}
    return [op for op in found if rule_for(op) is None and op not in islands | _WHOLE]


def _is_single(value: Any) -> bool:
    return any(getattr(x, "dtype", None) in SINGLE for x in (value if isinstance(value, tuple | list) else (value,)))


def _how(op: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """PyTorch's decomposition of ``op``, or None where it has none or it is not among those known to be good."""
    if op.namespace != "aten" or not any("Tensor" in str(r.type) for r in op._schema.returns):
        return None  # a length is asked for as it is
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    listed = op._schema.name.removeprefix("aten::") in _TABLE
    return _decompositions().get(op) if composite or listed else None


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    from torch._decomp import core_aten_decompositions, decomposition_table

    return {**decomposition_table, **dict(core_aten_decompositions().items())}

"""Ops without a sharding rule, written as several ops that have one: PyTorch's own decompositions, for the tail.

What has a rule stays whole: a linear layer or an attention is worth more than its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._decomp import core_aten_decompositions, decomposition_table
from torch._export.utils import _collect_all_valid_cia_ops, _is_preservable_cia_op, _special_op_to_preserve_cia
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.export.exported_program import _decompose_exported_program
from torch.export.graph_signature import InputKind

from autoshard.passes.rules import rule_for
from autoshard.passes.rules.exact import SINGLE

ORIGIN = "autoshard_origin"
"""key in a node's custom meta: the op that the node is a part of"""

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
    """The functional form of ``program``, its ops without a rule written as others where PyTorch knows how.

    Parts keep their module and line. All in one run, parts of parts too: each run traces the whole program again.
    """
    nodes = [n for m in program.graph_module.modules() if isinstance(m, fx.GraphModule) for n in m.graph.nodes]
    for node in nodes:
        if node.target is torch.ops.aten.copy_.default:
            _convert(node)
    kept = _islands(program, nodes) | _WHOLE
    tail = {op: how for op, how in _functional().items() if rule_for(op) is None and op not in kept}
    for node in nodes:
        if node.target in tail:
            node.meta["custom"] = {ORIGIN: str(node.target), **(node.meta.get("custom") or {})}
    there = {n.target for n in nodes if isinstance(n.target, OpOverload)}
    written = _written(program, there, tail)
    return written if _is_plain(written) else _written(program, there, {})


def _convert(copy: fx.Node) -> None:
    """Write out that a copy converts: the functional form of one over all of an input or buffer loses it (torch 2.13)."""
    target, source = (x.meta["val"] for x in copy.args[:2] if isinstance(x, fx.Node))
    if source.dtype == target.dtype:
        return
    with copy.graph.inserting_before(copy):
        converted = copy.graph.call_function(torch.ops.aten._to_copy.default, (copy.args[1],), {"dtype": target.dtype})
    converted.meta = {**copy.meta, "val": source.to(target.dtype)}
    copy.update_arg(1, converted)


def _written(
    program: torch.export.ExportedProgram, there: set[OpOverload], tail: Mapping[OpOverload, Callable[..., Any]]
) -> torch.export.ExportedProgram:
    """``program.run_decompositions(tail)``, of a program with the ops ``there``, but faster.

    That prepares each of PyTorch's 500 composite ops, a quarter of a small model's compile; here it is those that are
    there, and those that stay whole as parts of others. PyTorch writes out the rest by itself where it meets them.
    """
    composite = {op for op in _composite() if rule_for(op) is not None or op in decomposition_table or op in there}
    composite |= {op for op in there if op.namespace != "aten" and _is_preservable_cia_op(op)}
    with unset_fake_temporarily():
        written: torch.export.ExportedProgram = _decompose_exported_program(
            program,
            cia_to_decomp={op: tail.get(op, _special_op_to_preserve_cia) for op in composite},
            python_decomp_table={op: how for op, how in tail.items() if op not in _composite()},
            joint_loss_index=None,
            decompose_custom_triton_ops=False,
        )
    return written


@cache
def _composite() -> frozenset[OpOverload]:
    return frozenset(op for op in _collect_all_valid_cia_ops() if isinstance(op, OpOverload) and op.namespace == "aten")


def _is_plain(program: torch.export.ExportedProgram) -> bool:
    """Whether it consists of ops that autograd knows, without tokens that order effects."""
    if any(spec.kind is InputKind.TOKEN for spec in program.graph_signature.input_specs):
        return False
    return not any(getattr(n.target, "namespace", "") == "prims" for n in program.graph.nodes)


def origin(node: fx.Node) -> str:
    """The op that ``node`` was made from by a decomposition; "" where it is the user's own."""
    return str((node.meta.get("custom") or {}).get(ORIGIN, ""))


def _islands(program: torch.export.ExportedProgram, nodes: Sequence[fx.Node]) -> set[Any]:
    """The ops of a float32 island in a float64 model. They stay: their parts would round otherwise."""
    double = any(p.dtype == torch.float64 for p in program.parameters())
    return {n.target for n in nodes if double and _is_single(n.meta.get("val"))}


def _is_single(value: Any) -> bool:
    return any(getattr(x, "dtype", None) in SINGLE for x in (value if isinstance(value, tuple | list) else (value,)))


@cache
def _functional() -> dict[OpOverload, Callable[..., Any]]:
    """Ops that can be in a functional program, with PyTorch's decompositions where these are known to be good."""
    known = {**decomposition_table, **dict(core_aten_decompositions().items())}
    return {op: how for op, how in known.items() if isinstance(op, OpOverload) and _is_listed(op)}


def _is_listed(op: OpOverload) -> bool:
    """Whether it computes new tensors, and PyTorch itself writes it as others or :data:`_TABLE` names it."""
    schema = op._schema
    if op.namespace != "aten" or not any("Tensor" in str(r.type) for r in schema.returns):
        return False  # a length is asked for as it is
    if any(a.alias_info is not None for a in schema.arguments):
        return False
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    return composite or schema.name.removeprefix("aten::") in _TABLE

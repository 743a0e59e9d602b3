"""Decompositions: ops without a sharding rule become ops that have one, as PyTorch defines them.

Ops with a rule stay: a linear layer or an attention shards better than its parts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial, partialmethod
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._decomp import core_aten_decompositions, decomposition_table
from torch._export.utils import _collect_all_valid_cia_ops, _is_preservable_cia_op, _special_op_to_preserve_cia
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.export import exported_program
from torch.export.exported_program import _decompose_exported_program
from torch.export.graph_signature import InputKind, OutputKind

from autoshard.aten import aten
from autoshard.passes.capture.observer import Patch, patched
from autoshard.passes.capture.repeats.markers import CALLED, CALLED_AGAIN
from autoshard.passes.capture.translate.canonical import DROPPED
from autoshard.passes.capture.translate.spliced import REGION, functional, spliced
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.exact import SINGLE
from autoshard.passes.rules.facts import has_effect, is_random
from autoshard.runtime.autocast import autocast_state

ORIGIN = "autoshard_origin"
"""key in a node's custom meta: the op that it was decomposed from"""

_TABLE = """
    _chunk_cat _softmax_backward_data _log_softmax_backward_data _unsafe_masked_index
    _unsafe_masked_index_put_accumulate block_diag diag_embed dist linspace logspace native_dropout_backward
    native_group_norm native_layer_norm max_pool2d_with_indices_backward upsample_bicubic2d upsample_linear1d
    upsample_trilinear3d pixel_unshuffle nan_to_num rrelu_with_noise
""".split()
"""ops decomposed by PyTorch's tables, in addition to all CompositeImplicitAutograd ops"""


_WHOLE = frozenset({aten.where.default})
"""ops with data-dependent lengths: their parts would run on full tensors as well"""
_OURS = ("aten", "autoshard")
"""namespaces of ops without effects; other ops may have effects that are ordered by tokens"""
_LIFTED = frozenset({aten.lift.default, aten.lift_fresh.default})
"""ops that lift constants into a trace"""


def decompose(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The functional form of ``program``, with ops without a rule decomposed where PyTorch can.

    Parts keep their module and source line. One run decomposes all, as each run traces the program
    again. None is needed where nothing changes, or ops expand in place, except under autocast.
    """
    nodes = [n for m in program.graph_module.modules() if isinstance(m, fx.GraphModule) for n in m.graph.nodes]
    for node in nodes:
        if node.target is aten.copy_.default:
            _convert(node)
    kept = _islands(program, nodes) | _WHOLE
    tail = {op: how for op, how in _functional().items() if rule_for(op) is None and op not in kept}
    if any(_is_complex(node.meta.get("val")) for node in nodes):
        tail |= _WRITES
    for node in nodes:
        if node.target in tail:
            node.meta["custom"] = {ORIGIN: str(node.target), **(node.meta.get("custom") or {})}
    if not autocast_state():
        if all(_stays(node, tail) for node in nodes):
            return program
        if all(_stays(node, tail) or _is_written_alone(node, tail) for node in nodes) and spliced(
            program, lambda node: _stays(node, tail), lambda op: _op_stays(op, tail)
        ):
            return program
    there = {n.target for n in nodes if isinstance(n.target, OpOverload)}
    _rename(program, lambda fqn: f"{_APART}{fqn}" if hasattr(fx.GraphModule, fqn.split(".")[0]) else fqn)
    written = _written(program, there, tail)
    written = written if _is_plain(written) else _written(program, there, {})
    _rename(written, lambda fqn: fqn.removeprefix(_APART))
    return written


_APART = "autoshard_apart."
"""prefix of tensors named like an attribute of fx.GraphModule, such as code: export fails (2.13)"""


def _rename(program: torch.export.ExportedProgram, renamed: Callable[[str], str]) -> None:
    """Rename the parameters, buffers and constants of ``program``."""
    for spec in (*program.graph_signature.input_specs, *program.graph_signature.output_specs):
        if spec.kind not in (InputKind.USER_INPUT, OutputKind.USER_INPUT_MUTATION) and spec.target is not None:
            spec.target = renamed(spec.target)
    for tensors in (program.state_dict, program.constants):
        for fqn in [fqn for fqn in tensors if renamed(fqn) != fqn]:
            tensors[renamed(fqn)] = tensors.pop(fqn)


def _is_complex(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_complex()


def _in_pairs(scatter: Any, x: torch.Tensor, part: torch.Tensor, dim: int = 0, *where: Any, **named: Any) -> Any:
    """A complex ``scatter`` on (real, imaginary) pairs: the complex one has no derivative."""
    if not x.is_complex():
        return NotImplemented
    pairs = torch.view_as_real(x), torch.view_as_real(part.to(x.dtype))
    return torch.view_as_complex(scatter(*pairs, dim % x.dim(), *where, **named))


_WRITES = {
    aten.slice_scatter.default: partial(_in_pairs, torch.slice_scatter),
    aten.select_scatter.default: partial(_in_pairs, torch.select_scatter),
}
"""writes without a derivative for complex numbers → their decomposition"""


def _stays(node: fx.Node, tail: Collection[OpOverload]) -> bool:
    """Whether the functional form keeps ``node``; it keeps markers of equal modules, too."""
    if node.op in ("placeholder", "output") or node.target in (operator.getitem, CALLED, CALLED_AGAIN):
        return True
    return _op_stays(node.target, tail) and not _acts(node)


def _op_stays(op: Any, tail: Collection[OpOverload]) -> bool:
    return _is_functional(op, tail) and op not in _LIFTED and (op in _composite() or not _is_composite(op))


def _is_written_alone(node: fx.Node, tail: Collection[OpOverload]) -> bool:
    """Whether ``node`` decomposes independently of the nodes around it, as ``flatten`` does."""
    if node.target is REGION or node.op == "get_attr" or functional(node.target):  # get_attr: the body of a region
        return True
    return _is_functional(node.target, tail) and _is_composite(node.target) and not _acts(node)


def _acts(node: fx.Node) -> bool:
    """Whether it has an effect other than a random draw or a dropped assertion."""
    return has_effect(node) and not is_random(node) and node.target not in DROPPED


def _is_functional(op: Any, tail: Collection[OpOverload]) -> bool:
    return isinstance(op, OpOverload) and op.namespace in _OURS and not op._schema.is_mutable and op not in tail


def _convert(copy: fx.Node) -> None:
    """Make the cast of a copy explicit: functionalization loses it for inputs, buffers (2.13)."""
    target, source = (x.meta["val"] for x in copy.args[:2] if isinstance(x, fx.Node))
    # A copy into another dtype than its target's is export's own, of a reassigned buffer.
    if source.dtype == target.dtype or copy.meta["val"].dtype != target.dtype:
        return
    with copy.graph.inserting_before(copy):
        converted = copy.graph.call_function(aten._to_copy.default, (copy.args[1],), {"dtype": target.dtype})
    converted.meta = {**copy.meta, "val": source.to(target.dtype)}
    copy.update_arg(1, converted)


def _written(
    program: torch.export.ExportedProgram, there: set[OpOverload], tail: Mapping[OpOverload, Callable[..., Any]]
) -> torch.export.ExportedProgram:
    """A faster ``program.run_decompositions(tail)`` for a program with the ops ``there``.

    PyTorch overrides 500 composite ops for 12 kinds of devices, a quarter of a small compile. This
    overrides the ops of ``program`` and those with a rule, for its devices; PyTorch decomposes the
    rest anyway. Input guards are not generated: nothing runs them, and they are invalid Python
    where one attribute's name begins with another's.
    """
    composite = {op for op in _composite() if rule_for(op) is not None or op in decomposition_table or op in there}
    composite |= {op for op in there if op.namespace != "aten" and _is_preservable_cia_op(op)}
    with unset_fake_temporarily(), patched([*_keys_of(program), _UNGUARDED, _UNASKED]):
        written: torch.export.ExportedProgram = _decompose_exported_program(
            program,
            cia_to_decomp={op: tail.get(op, _special_op_to_preserve_cia) for op in composite},
            python_decomp_table={op: how for op, how in tail.items() if op not in _composite()},
            joint_loss_index=None,
            decompose_custom_triton_ops=False,
        )
    return written


_UNGUARDED: Patch = (
    torch.export.ExportedProgram,
    "module",
    partialmethod(torch.export.ExportedProgram.module, check_guards=False),
)


_UNASKED: Patch = (
    torch._decomp,
    "decomposition_table",
    {op: how for op, how in decomposition_table.items() if op is not aten.nll_loss.default},
)
"""table of fake tensors without nll_loss, whose entry branches on numel == 0, unlike its kernel"""


def _keys_of(program: torch.export.ExportedProgram) -> list[Patch]:
    """Patches that limit PyTorch's dispatch keys to devices of ``program``, CPU and meta."""
    tensors = pytree.tree_leaves([n.meta.get("val") for n in program.graph.nodes])
    devices = {"cpu", "meta", *(x.device.type for x in tensors if isinstance(x, torch.Tensor))}
    names = {torch._C._dispatch_key_for_device(device) for device in devices}
    lists = ("_AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE", "_BACKEND_KEYS_TO_OVERRIDE")
    of_devices = (
        [k for k in getattr(exported_program, name) if k.name.removeprefix("Autograd") in names] for name in lists
    )
    return [(exported_program, name, keys) for name, keys in zip(lists, of_devices, strict=True)]


@cache
def _composite() -> frozenset[OpOverload]:
    return frozenset(op for op in _collect_all_valid_cia_ops() if isinstance(op, OpOverload) and op.namespace == "aten")


def _is_plain(program: torch.export.ExportedProgram) -> bool:
    """Whether all ops have autograd formulas (no prims), and no tokens order effects."""
    if any(spec.kind is InputKind.TOKEN for spec in program.graph_signature.input_specs):
        return False
    return not any(getattr(n.target, "namespace", "") == "prims" for n in program.graph.nodes)


def origin(node: fx.Node) -> str:
    """The op that ``node`` was decomposed from; "" if the user called it."""
    return str((node.meta.get("custom") or {}).get(ORIGIN, ""))


def _islands(program: torch.export.ExportedProgram, nodes: Sequence[fx.Node]) -> set[Any]:
    """The ops of float32 islands in a float64 model; decomposed they would round differently."""
    double = any(p.dtype == torch.float64 for p in program.parameters())
    return {n.target for n in nodes if double and _is_single(n.meta.get("val"))}


def _is_single(value: Any) -> bool:
    return any(getattr(x, "dtype", None) in SINGLE for x in (value if isinstance(value, tuple | list) else (value,)))


@cache
def _functional() -> dict[OpOverload, Callable[..., Any]]:
    """Functional ops → PyTorch's decompositions, of those that are trusted."""
    known = {**decomposition_table, **dict(core_aten_decompositions().items())}
    return {op: how for op, how in known.items() if isinstance(op, OpOverload) and _is_listed(op)}


def _is_listed(op: OpOverload) -> bool:
    """Whether it is functional, and composite implicit or listed in :data:`_TABLE`."""
    schema = op._schema
    if op.namespace != "aten" or not any("Tensor" in str(r.type) for r in schema.returns):
        return False  # returns a number, such as a length
    if any(a.alias_info is not None for a in schema.arguments):
        return False
    return _is_composite(op) or schema.name.removeprefix("aten::") in _TABLE


@cache
def _is_composite(op: OpOverload) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"))

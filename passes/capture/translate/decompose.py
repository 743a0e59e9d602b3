"""Decompositions: ops without a sharding rule become ops that have one, as PyTorch defines them. An
op with a rule shards better than its parts. Composite ops and ``no_grad`` regions alone are
expanded in place, without tracing again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache, partial, partialmethod
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.export import exported_program
from torch.export.graph_signature import InputKind, OutputKind

from autoshard.aten import aten
from autoshard.passes.capture.observer import Patch, patched
from autoshard.passes.capture.shared_regions.recording import REPEATED_REGION, TRACED_REGION
from autoshard.passes.capture.translate.canonicalize import DROPPED_CHECKS
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.facts import has_effect, is_random
from autoshard.runtime.transport.torch_state import autocast_state
from autoshard.torch_private.capture import (
    composite_ops,
    core_aten_decompositions,
    decompose_program,
    decomposition_table,
    decompositions,
    detect_fake_mode,
    enable_python_dispatcher,
    is_preservable,
    preserved_op,
)
from autoshard.torch_private.dispatch import TorchDispatchMode, dispatch_key_of_device, has_kernel, storage_id
from autoshard.torch_private.fake import unset_fake_temporarily
from autoshard.torch_private.ops import OpOverload

GRAD_MODE_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled
"""calls a subgraph under ``no_grad`` or ``enable_grad``"""
RecordedCalls = list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]]
"""recorded calls in order: (op, args, kwargs, result)"""


class _OpRecorder(TorchDispatchMode):
    """Records ops as the backend sees them, after PyTorch decomposed composite ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: RecordedCalls = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, torch.device):  # a query of a fake tensor's device
            self.calls.append((func, args, kwargs or {}, result))
        return result


def expand_composites(
    program: torch.export.ExportedProgram, is_kept: Callable[[fx.Node], bool], is_allowed: Callable[[Any], bool]
) -> bool:
    """Expand in place all nodes of ``program`` that do not stay; whether that was possible.
    ``is_allowed``: whether an op may result. On False ``program`` is unchanged: another op resulted, a
    length is symbolic, or a subgraph is no :data:`GRAD_MODE_REGION`. Nodes get the names of a new trace, but for
    their numbers and the names of outputs, which ``inline_regions`` writes."""
    module = program.graph_module
    same: dict[fx.Node, Any] = {}
    nodes = list(_inlined_nodes(module, same))
    values = [leaf for node in nodes for leaf in pytree.tree_leaves(node.meta.get("val"))]
    if any(node.op == "get_attr" for node in nodes) or any(map(_has_symbolic_length, values)):
        return False
    written: dict[fx.Node, tuple[RecordedCalls, Any]] = {}
    for node in nodes:
        if not is_kept(node) and node not in same:
            recorded = _record_calls(node, functional_variant(node.target) or node.target)
            if not all(is_allowed(func) and isinstance(out, Tensor | list | tuple) for func, _, _, out in recorded[0]):
                return False
            written[node] = recorded
    graph, new, named = fx.Graph(module), dict[fx.Node, Any](), _AliasTracker()
    for node in nodes:
        names = named.before(node)
        if functional_variant(node.target) is not None and not _writes_sole_alias(names, node, written[node][1]):
            return False
        if node in same:
            new[node] = fx.map_arg(same[node], lambda n: new[n])
        elif node in written:
            new[node] = _emit_recorded(graph, node, *written[node], new)
            if new[node] is None:
                return False
        else:
            name = _trace_name(graph, node.target) if node.op == "call_function" else node.name
            args, kwargs = fx.map_arg((node.args, node.kwargs), new.__getitem__)
            new[node] = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
            new[node].meta = node.meta
            if node.op == "placeholder":
                new[node].name = node.name  # a new graph would rename ``input``, which shadows a builtin
        if functional_variant(node.target) is not None:
            new.update(dict.fromkeys(names, new[node]))
    module.graph = graph
    module.delete_all_unused_submodules()
    module.recompile()
    return True


def _inlined_nodes(module: fx.GraphModule, same: dict[fx.Node, Any]) -> Iterator[fx.Node]:
    """The nodes of ``module``, regions inlined; adds aliases across borders to ``same``."""
    regions = [node for node in module.graph.nodes if node.target is GRAD_MODE_REGION]
    bodies = {region.args[1] for region in regions}
    for node in module.graph.nodes:
        if node.target is GRAD_MODE_REGION:
            body: Any = getattr(module, node.args[1].target)
            *inner, output = _inlined_nodes(body, same)
            same.update(zip(body.graph.find_nodes(op="placeholder"), node.args[2:], strict=True))
            results: Any = output.args[0]
            same.update((get, results[get.args[1]]) for get in node.users)
            yield from inner
        elif node not in bodies:
            yield node


def functional_variant(op: Any) -> OpOverload | None:
    """The functional variant of in-place ``op``; None for any other op, and for random ones."""
    if not isinstance(op, OpOverload) or op.namespace != "aten" or not op._schema.is_mutable:
        return None
    first, *others = op._schema.arguments
    packet = getattr(torch.ops.aten, op.overloadpacket.__name__.removesuffix("_"), None)
    if any(a.is_write for a in others) or not first.is_write or op.overloadpacket is packet:
        return None
    return getattr(packet, op._overloadname, None) if torch.Tag.nondeterministic_seeded not in op.tags else None


class _AliasTracker:
    """Memory → nodes that alias it; none for memory of inputs, or with views."""

    def __init__(self) -> None:
        self.of: dict[int, list[fx.Node]] = {}

    def before(self, node: fx.Node) -> list[fx.Node]:
        """The aliases of the memory of ``node`` so far; adds ``node``."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor):  # of several results each has a node
            return []
        memory = storage_id(value)
        names = self.of.get(memory, [])
        if memory not in self.of and node.op == "call_function":
            self.of[memory] = [node]
        else:
            self.of[memory] = [*names, node] if names and functional_variant(node.target) else []
        return names


def _writes_sole_alias(names: list[fx.Node], node: fx.Node, result: Any) -> bool:
    """Whether ``node`` writes a ``result`` of its own type into one of ``names``."""
    target = node.args[0]
    return target in names and (result.shape, result.dtype) == (node.meta["val"].shape, node.meta["val"].dtype)


def _has_symbolic_length(value: Any) -> bool:
    if isinstance(value, Tensor):
        return any(isinstance(n, torch.SymInt) for n in value.shape)
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def _record_calls(node: fx.Node, op: Any) -> tuple[RecordedCalls, Any]:
    """(recorded calls, result) of ``op`` on the fake arguments of ``node``."""
    args, kwargs = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], (node.args, node.kwargs))
    mode = detect_fake_mode(pytree.tree_leaves((args, kwargs)))
    assert mode is not None
    # As in a trace, the Python dispatcher keeps dropout one op.
    with mode, enable_python_dispatcher(), _OpRecorder() as recorder:
        result = op(*args, **kwargs)
    return recorder.calls, result


def _emit_recorded(
    graph: fx.Graph, node: fx.Node, calls: RecordedCalls, result: Any, new: dict[fx.Node, Any]
) -> fx.Node | None:
    """Write ``calls`` in place of ``node``; the node with its result, or None if there is none."""
    known = {id(arg.meta["val"]): new[arg] for arg in node.all_input_nodes}
    read = {id(x) for x in pytree.tree_leaves([result, *((args, kwargs) for _, args, kwargs, _ in calls)])}
    for func, args, kwargs, out in calls:
        if any(id(x) not in known for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)):
            return None
        operands, options = pytree.tree_map_only(Tensor, lambda x: known[id(x)], (args, kwargs))
        made = graph.create_node("call_function", func, operands, options, _trace_name(graph, func))
        made.meta = {**node.meta, "val": out}
        known[id(out)] = made
        if isinstance(out, list):  # lists are equal if they hold the same tensors
            known[id(result)] = made if _is_same_list(out, result) else known.get(id(result))
        for slot, value in enumerate(out) if isinstance(out, tuple) else ():
            if id(value) in read:
                known[id(value)] = graph.create_node("call_function", operator.getitem, (made, slot))
                known[id(value)].meta = {**node.meta, "val": value}
    return known.get(id(result))


def _is_same_list(these: list[Any], those: Any) -> bool:
    return isinstance(those, list | tuple) and len(these) == len(those) and all(map(operator.is_, these, those))


def _trace_name(graph: fx.Graph, target: Any) -> str | None:
    """The name that a trace gives, without a number."""
    return graph._target_to_str(target.overloadpacket.__name__) if isinstance(target, OpOverload) else None


ORIGIN = "autoshard_origin"
"""key in a node's custom meta: the op that it was decomposed from"""

_DECOMPOSED_OPS = """
    _chunk_cat _softmax_backward_data _log_softmax_backward_data _unsafe_masked_index
    _unsafe_masked_index_put_accumulate block_diag diag_embed dist linspace logspace native_dropout_backward
    native_group_norm native_layer_norm max_pool2d_with_indices_backward upsample_bicubic2d upsample_linear1d
    upsample_trilinear3d pixel_unshuffle nan_to_num rrelu_with_noise
""".split()
"""ops decomposed by PyTorch's tables, in addition to all CompositeImplicitAutograd ops"""


_NEVER_DECOMPOSED = frozenset({aten.where.default})
"""ops with data-dependent lengths: their parts would run on full tensors as well"""
_PLAIN_NAMESPACES = ("aten", "autoshard")
"""namespaces of ops without effects; other ops may have effects that are ordered by tokens"""
_LIFT_OPS = frozenset({aten.lift.default, aten.lift_fresh.default})
"""ops that lift constants into a trace"""


def decompose(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The functional form of ``program``, with ops without a rule decomposed where PyTorch can. One
    run decomposes all, since each traces the program again; none where nothing changes or ops
    expand in place, except under autocast."""
    nodes = [n for m in program.graph_module.modules() if isinstance(m, fx.GraphModule) for n in m.graph.nodes]
    for node in nodes:
        if node.target is aten.copy_.default:
            _make_cast_explicit(node)
    known = _trusted_decompositions().items()
    tail = {op: how for op, how in known if rule_for(op) is None and op not in _NEVER_DECOMPOSED}
    if any(_is_complex(node.meta.get("val")) for node in nodes):
        tail |= _COMPLEX_SCATTERS
    for node in nodes:
        if node.target in tail:
            node.meta["custom"] = {ORIGIN: str(node.target), **(node.meta.get("custom") or {})}
    if not autocast_state():
        if all(_is_kept_node(node, tail) for node in nodes):
            return program
        if all(_is_kept_node(node, tail) or _is_locally_expandable(node, tail) for node in nodes) and expand_composites(
            program, lambda node: _is_kept_node(node, tail), lambda op: _is_kept_op(op, tail)
        ):
            return program
    there = {n.target for n in nodes if isinstance(n.target, OpOverload)}
    _rename_tensors(
        program, lambda fqn: f"{_RENAMED_PREFIX}{fqn}" if hasattr(fx.GraphModule, fqn.split(".")[0]) else fqn
    )
    written = _decompose_functional(program, there, tail)
    written = written if _is_autograd_program(written) else _decompose_functional(program, there, {})
    _rename_tensors(written, lambda fqn: fqn.removeprefix(_RENAMED_PREFIX))
    return written


_RENAMED_PREFIX = "autoshard_apart."
"""prefix of tensors named like an attribute of fx.GraphModule, such as code: export fails (2.13)"""


def _rename_tensors(program: torch.export.ExportedProgram, renamed: Callable[[str], str]) -> None:
    """Rename the parameters, buffers and constants of ``program``."""
    for spec in (*program.graph_signature.input_specs, *program.graph_signature.output_specs):
        if spec.kind not in (InputKind.USER_INPUT, OutputKind.USER_INPUT_MUTATION) and spec.target is not None:
            spec.target = renamed(spec.target)
    for tensors in (program.state_dict, program.constants):
        for fqn in [fqn for fqn in tensors if renamed(fqn) != fqn]:
            tensors[renamed(fqn)] = tensors.pop(fqn)


def _is_complex(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_complex()


def _scatter_as_real_pairs(scatter: Any, x: Tensor, part: Tensor, dim: int = 0, *where: Any, **named: Any) -> Any:
    """A complex ``scatter`` on (real, imaginary) pairs: the complex one has no derivative."""
    if not x.is_complex():
        return NotImplemented
    pairs = torch.view_as_real(x), torch.view_as_real(part.to(x.dtype))
    return torch.view_as_complex(scatter(*pairs, dim % x.dim(), *where, **named))


_COMPLEX_SCATTERS = {
    aten.slice_scatter.default: partial(_scatter_as_real_pairs, torch.slice_scatter),
    aten.select_scatter.default: partial(_scatter_as_real_pairs, torch.select_scatter),
}
"""writes without a derivative for complex numbers → their decomposition"""


def _is_kept_node(node: fx.Node, tail: Collection[OpOverload]) -> bool:
    """Whether the functional form keeps ``node``; it keeps markers of equal modules, too."""
    if node.op in ("placeholder", "output") or node.target in (operator.getitem, TRACED_REGION, REPEATED_REGION):
        return True
    return _is_kept_op(node.target, tail) and not _has_ordered_effect(node)


def _is_kept_op(op: Any, tail: Collection[OpOverload]) -> bool:
    return _is_functional_op(op, tail) and op not in _LIFT_OPS and (op in _composite_ops() or not _is_composite(op))


def _is_locally_expandable(node: fx.Node, tail: Collection[OpOverload]) -> bool:
    """Whether ``node`` decomposes independently of the nodes around it, as ``flatten`` does."""
    # get_attr: the body of a region
    if node.target is GRAD_MODE_REGION or node.op == "get_attr" or functional_variant(node.target):
        return True
    return _is_functional_op(node.target, tail) and _is_composite(node.target) and not _has_ordered_effect(node)


def _has_ordered_effect(node: fx.Node) -> bool:
    """Whether it has an effect other than a random draw or a dropped assertion."""
    return has_effect(node) and not is_random(node) and node.target not in DROPPED_CHECKS


def _is_functional_op(op: Any, tail: Collection[OpOverload]) -> bool:
    return (
        isinstance(op, OpOverload)
        and op.namespace in _PLAIN_NAMESPACES
        and not op._schema.is_mutable
        and op not in tail
    )


def _make_cast_explicit(copy: fx.Node) -> None:
    """Make the cast of a copy explicit: functionalization loses it for inputs, buffers (2.13)."""
    target, source = (x.meta["val"] for x in copy.args[:2] if isinstance(x, fx.Node))
    # A copy into another dtype than its target's is export's own, of a reassigned buffer.
    if source.dtype == target.dtype or copy.meta["val"].dtype != target.dtype:
        return
    with copy.graph.inserting_before(copy):
        converted = copy.graph.call_function(aten._to_copy.default, (copy.args[1],), {"dtype": target.dtype})
    converted.meta = {**copy.meta, "val": source.to(target.dtype)}
    copy.update_arg(1, converted)


def _decompose_functional(
    program: torch.export.ExportedProgram, there: set[OpOverload], tail: Mapping[OpOverload, Callable[..., Any]]
) -> torch.export.ExportedProgram:
    """A faster ``program.run_decompositions(tail)`` for a program with the ops ``there``.
    PyTorch overrides 500 composite ops for 12 kinds of devices, a quarter of a small compile. This
    overrides the ops of ``program`` and those with a rule, for its devices; PyTorch decomposes the
    rest anyway. Input guards are not generated: nothing runs them, and they are invalid Python
    where one attribute's name begins with another's."""
    composite = {op for op in _composite_ops() if rule_for(op) is not None or op in decomposition_table or op in there}
    composite |= {op for op in there if op.namespace != "aten" and is_preservable(op)}
    with unset_fake_temporarily(), patched([*_dispatch_keys_patches(program), _NO_GUARDS_PATCH, _NLL_LOSS_PATCH]):
        written: torch.export.ExportedProgram = decompose_program(
            program,
            cia_to_decomp={op: tail.get(op, preserved_op) for op in composite},
            python_decomp_table={op: how for op, how in tail.items() if op not in _composite_ops()},
            joint_loss_index=None,
            decompose_custom_triton_ops=False,
        )
    return written


_NO_GUARDS_PATCH: Patch = (
    torch.export.ExportedProgram,
    "module",
    partialmethod(torch.export.ExportedProgram.module, check_guards=False),
)


_NLL_LOSS_PATCH: Patch = (
    decompositions,
    "decomposition_table",
    {op: how for op, how in decomposition_table.items() if op is not aten.nll_loss.default},
)
"""table of fake tensors without nll_loss, whose entry branches on numel == 0, unlike its kernel"""


def _dispatch_keys_patches(program: torch.export.ExportedProgram) -> list[Patch]:
    """Patches that limit PyTorch's dispatch keys to devices of ``program``, CPU and meta."""
    tensors = pytree.tree_leaves([n.meta.get("val") for n in program.graph.nodes])
    devices = {"cpu", "meta", *(x.device.type for x in tensors if isinstance(x, Tensor))}
    names = {dispatch_key_of_device(device) for device in devices}
    lists = ("_AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE", "_BACKEND_KEYS_TO_OVERRIDE")
    of_devices = (
        [k for k in getattr(exported_program, name) if k.name.removeprefix("Autograd") in names] for name in lists
    )
    return [(exported_program, name, keys) for name, keys in zip(lists, of_devices, strict=True)]


@cache
def _composite_ops() -> frozenset[OpOverload]:
    return frozenset(op for op in composite_ops() if isinstance(op, OpOverload) and op.namespace == "aten")


def _is_autograd_program(program: torch.export.ExportedProgram) -> bool:
    """Whether all ops have autograd formulas (no prims), and no tokens order effects."""
    if any(spec.kind is InputKind.TOKEN for spec in program.graph_signature.input_specs):
        return False
    return not any(getattr(n.target, "namespace", "") == "prims" for n in program.graph.nodes)


def decomposed_from(node: fx.Node) -> str:
    """The op that ``node`` was decomposed from; "" if the user called it."""
    return str((node.meta.get("custom") or {}).get(ORIGIN, ""))


@cache
def _trusted_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Functional ops → PyTorch's decompositions, of those that are trusted."""
    known = {**decomposition_table, **dict(core_aten_decompositions().items())}
    return {op: how for op, how in known.items() if isinstance(op, OpOverload) and _has_trusted_decomposition(op)}


def _has_trusted_decomposition(op: OpOverload) -> bool:
    """Whether it is functional, and composite implicit or listed in :data:`_DECOMPOSED_OPS`."""
    schema = op._schema
    if op.namespace != "aten" or not any("Tensor" in str(r.type) for r in schema.returns):
        return False  # returns a number, such as a length
    if any(a.alias_info is not None for a in schema.arguments):
        return False
    return _is_composite(op) or schema.name.removeprefix("aten::") in _DECOMPOSED_OPS


@cache
def _is_composite(op: OpOverload) -> bool:
    return bool(has_kernel(op.name(), "CompositeImplicitAutograd"))

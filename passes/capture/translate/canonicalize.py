"""Canonicalization: one form for what torch.export writes in several. Also dead code elimination,
``nonzero`` as ``where``, and through which results of an op gradients flow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from autoshard.aten import aten
from autoshard.passes.capture.exported.symbolic_shapes import is_data_dependent_number
from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType, map_refs, refs
from autoshard.passes.ir.patterns import Matcher
from autoshard.passes.ir.rewrite import NodeBuilder, rewrite, run_on_meta
from autoshard.passes.rules.facts import has_effect
from autoshard.torch_private.ops import OpOverload


def nonzero_as_where(graph: Graph) -> Graph:
    """``graph`` with each ``nonzero(condition)`` that is read by column as ``where(condition)``."""
    column_of: dict[str, str] = {}
    """reader of a column → the first reader of that column"""

    def by_column(build: NodeBuilder, node: Node) -> bool:
        if node.op is aten.nonzero.default and (columns := _columns_read(node, graph)):
            slots = tuple(sorted(columns))
            column_of.update({name: columns[slot][0] for slot in slots for name in columns[slot]})
            outputs = tuple(columns[slot][0] for slot in slots)
            where = replace(node, op=aten.where.default, args=node.args[:1], kwargs={}, outputs=outputs)
            build.nodes.append(replace(where, output_slots=slots))
            return True
        build.renamed.update({name: column_of[name] for name in node.outputs if name in column_of})
        return not column_of.keys().isdisjoint(node.outputs)

    return rewrite(graph, by_column)


def _columns_read(node: Node, graph: Graph) -> dict[int, list[str]]:
    """Column number → values that read it; empty if anything but columns of ``node`` is read."""
    (value,), matcher, found = node.outputs, Matcher(graph), dict[int, list[str]]()
    if value in graph.returned or not all(use.outputs for use in graph.uses[value]):
        return {}
    for name in (name for use in graph.uses[value] for name in use.outputs):
        if (read := matcher.match("select(_, 1, column) | unbind(_, 1)[column]", Ref(name))) is None:
            return {}
        found.setdefault(read["column"] % len(graph.shape(node.inputs[0])), []).append(name)
    return found


DROPPED_CHECKS = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}
"""assertions of the trace, which are dropped"""

READS_MEMORY_LAYOUT = {aten.as_strided.default, aten.view_as_complex.default, aten.view.dtype}
"""ops that read the memory of their operand, which is made contiguous first, as in the trace"""

OVERWRITING_OPS = {aten.zero.default, aten.fill.Scalar}
"""ops that ignore the values of their operand"""

_IDENTITY_OPS = {aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default, aten.clone.default}
_SHAPE_OPS = {aten.expand.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default}

_CANONICAL_OPS: dict[OpOverload, tuple[OpOverload, int | None]] = {
    # All reshapes take shards of any strides.
    aten.view.default: (aten.reshape.default, None),
    aten._unsafe_view.default: (aten.reshape.default, None),
    # Lazy views are computed: a collective would send the memory behind the view.
    aten._conj.default: (aten.conj_physical.default, None),
    aten._neg_view.default: (aten.neg.default, None),
    # Overwritten values without a gradient are new ones.
    aten.zero.default: (aten.zeros_like.default, None),
    aten.fill.Scalar: (aten.full_like.default, None),
    aten.item.default: (aten._local_scalar_dense.default, None),
    # Uninitialized memory would differ between ranks.
    aten.empty.memory_format: (aten.zeros.default, 1),
    aten.empty_permuted.default: (aten.zeros.default, 1),
    aten.empty_strided.default: (aten.zeros.default, 1),
    aten.empty_like.default: (aten.zeros_like.default, 1),
    aten.new_empty.default: (aten.new_zeros.default, 2),
    aten.new_empty_strided.default: (aten.new_zeros.default, 2),
}
"""op → (op in its place, number of positional arguments that it takes, without a memory format)"""
_PLACEMENT_ARGUMENTS = ("device", "pin_memory", "layout", "non_blocking")
"""arguments that are dropped: a program runs on the device of its module"""


def unchanged_operand(
    op: Any,
    args: Any,
    types: dict[str, TensorType],
    result: Any,
    shape_of: Callable[[Tensor], Sequence[int]],
) -> Ref | None:
    """The operand that ``op`` returns unchanged (clones, dropout without effect), or None.
    ``result``: the op's fake result. ``native_dropout`` stays, as it returns a mask, too."""
    if not args or not isinstance(args[0], Ref) or not isinstance(result, Tensor | tuple):
        return None
    operand: Ref = args[0]
    before = types[operand.name]
    if op in _IDENTITY_OPS or (op is aten.detach.default and not before.grad):
        return operand
    if op is aten.dropout.default:
        return operand if args[1] == 0 or args[2] is False else None
    if not isinstance(result, Tensor):
        return None
    if op is aten._to_copy.default:
        return operand if before.dtype == result.dtype else None
    if op in _SHAPE_OPS or op is aten.slice.Tensor:
        # Data-dependent lengths are known to be equal at run time only.
        open_ = before.unknown or any(is_data_dependent_number(n) for n in result.shape)
        return operand if not open_ and before.shape == tuple(shape_of(result)) else None
    return None


def cat_with_empty(args: Any, types: dict[str, TensorType], result: Any) -> Ref | None:
    """The only operand of a concatenation besides ``torch.tensor([])``, as of an empty KV cache,
    else None. Left in, it would hide that a dim before and behind the concatenation is one."""
    rest: list[Ref] = [ref for ref in args[0] if types[ref.name].shape != (0,) or types[ref.name].grad]
    if len(rest) != 1 or types[rest[0].name].dtype != result.dtype or memory_order(result) != tuple(range(result.ndim)):
        return None
    return rest[0]


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The dims of ``tensor`` in memory order, outermost first."""
    strides = [_traced_length(s) for s in tensor.stride()]
    return tuple(sorted(range(tensor.ndim), key=lambda d: -strides[d]))


def operand_order(node: fx.Node) -> tuple[int, ...]:
    """:func:`memory_order` of the traced first operand; () if it is row-major."""
    value = node.args[0].meta.get("val") if node.args and isinstance(node.args[0], fx.Node) else None
    if not isinstance(value, Tensor):
        return ()
    traced = torch.empty_strided(
        *([_traced_length(n) for n in ns] for ns in (value.shape, value.stride())), device="meta"
    )
    like = torch.empty_like(traced)  # without gaps
    return () if like.is_contiguous() else memory_order(like)


def _traced_length(n: int | torch.SymInt) -> int:
    """A length or stride in the trace; data-dependent ones (for their order only) as of 1024."""
    if isinstance(n, int):
        return n
    if n.node.has_hint():
        return int(n.node.hint)
    return int(n.node.expr.subs(dict.fromkeys(n.node.expr.free_symbols, 1024)))


def live_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that the output, an effect or a random op depends on; assertions do not count."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        op = node.target
        if (
            node.op == "output"
            or (has_effect(node) and op not in DROPPED_CHECKS)
            or any(user in found for user in node.users)
        ):
            found.add(node)
    return [node for node in graph.nodes if node in found]


def remove_dead(graph: Graph) -> Graph:
    """Dead code elimination, of nodes and constants. Random ops and checks stay as effects."""
    needed = set(graph.returned)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if needed.intersection(node.outputs) or has_effect(node):
            kept.append(node)
            needed.update(node.inputs)
    kept.reverse()
    inputs = tuple(i for i in graph.inputs if i.kind != "constant" or i.name in needed or i.fqn in graph.mutations)
    defined = {i.name for i in inputs} | {o for n in kept for o in n.outputs}
    constants = {name: x for name, x in graph.constants.items() if name in defined}
    types = {name: t for name, t in graph.types.items() if name in defined}
    return replace(graph, inputs=inputs, nodes=tuple(kept), types=types, constants=constants)


def canonical_op(op: Any, args: Any, kwargs: dict[str, Any], slots: list[int]) -> tuple[Any, Any, dict[str, Any]]:
    """``(op, args, kwargs)`` in canonical form. ``slots``: the used results. ``native_dropout``
    without its mask becomes ``dropout``, unless draws or gradients would differ: p of 0 or 1,
    ``train`` of None."""
    made, operands = _CANONICAL_OPS.get(op, (op, None))
    if op is aten.native_dropout.default and slots == [0] and args[1] not in (0, 1) and args[2] is not None:
        made = aten.dropout.default
    dropped = {*_PLACEMENT_ARGUMENTS, *(["memory_format"] if operands or op is aten._to_copy.default else [])}
    return made, args[:operands], {k: v for k, v in kwargs.items() if k not in dropped}


class GradientFlow:
    """Whether results of an op require gradients, as autograd says on meta tensors. Cached across
    captures for torch's own ops; others may be redefined."""

    _torchs: ClassVar[dict[str, tuple[bool, ...] | None]] = {}

    def __init__(self) -> None:
        self._others: dict[str, tuple[bool, ...] | None] = {}
        if len(self._torchs) > 10_000:  # entries that the cache may hold
            self._torchs.clear()

    def flags(self, op: Any, args: Any, kwargs: Any, types: dict[str, TensorType], results: list[Any]) -> list[bool]:
        """Per result (slot order) whether it needs a gradient, given the operands' ``types``."""
        if not any(types[ref.name].grad for ref in refs((args, kwargs))):
            return [False] * len(results)
        key = repr((str(op), map_refs((args, kwargs), lambda ref: types[ref.name])))
        answers = self._torchs if op.namespace == "aten" else self._others
        if key not in answers:
            answers[key] = self._ask(op, args, kwargs, types)
        known = answers[key]
        if known is not None and len(known) == len(results):
            return list(known)
        return [isinstance(r, Tensor) and (r.is_floating_point() or r.is_complex()) for r in results]

    @staticmethod
    def _ask(op: Any, args: Any, kwargs: Any, types: dict[str, TensorType]) -> tuple[bool, ...] | None:
        try:
            result = run_on_meta(op, args, kwargs, types, grads=True)
        except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError):
            return None  # no meta kernel, or none for the estimate of a data-dependent number
        results = result if isinstance(result, tuple | list) else (result,)
        return tuple(isinstance(r, Tensor) and r.requires_grad for r in results)

"""``no_grad`` in an exported program: its ops read detached values."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from autoshard.aten import aten
from autoshard.errors import CaptureError
from autoshard.passes.capture.exported.provenance import NO_GRAD_KEY, node_loc
from autoshard.torch_private.autograd import get_unwrapped, is_batchedtensor
from autoshard.torch_private.dispatch import storage_id
from autoshard.torch_private.ops import OpOverload

_MAYBE_COPYING = frozenset("to contiguous reshape flatten type_as float double half bfloat16".split())
"""ops that return their operand, a view, or a copy under one schema, by device, layout or dtype"""
_REGION_OPS = (torch.ops.higher_order.wrap_with_set_grad_enabled, torch.ops.higher_order.wrap_with_autocast)


def detach_no_grad(gm: fx.GraphModule, grads: set[str]) -> None:
    """Insert ``detach`` before reads of values with a gradient by ops marked :data:`NO_GRAD_KEY`.
    Operands are detached, not results, so that in-place writes into outer buffers keep their
    meaning. ``grads``: placeholders with a gradient. Raises :class:`CaptureError` for a write under
    ``no_grad`` into a value with a gradient: a functional graph would differentiate through it."""
    _detach_graph(gm, _GradientTracker(n for n in gm.graph.nodes if n.op == "placeholder" and n.name in grads))


def drop_enable_grad(gm: fx.GraphModule) -> bool:
    """Turn ``enable_grad`` regions off, for a graph without a backward; whether there are any."""
    nodes = [n for m in gm.modules() if isinstance(m, fx.GraphModule) for n in m.graph.nodes]
    enabling = [n for n in nodes if n.target is torch.ops.higher_order.wrap_with_set_grad_enabled and n.args[0]]
    for node in enabling:
        node.args = (False, *node.args[1:])
    gm.recompile()
    return bool(enabling)


def _detach_graph(gm: fx.GraphModule, flow: _GradientTracker) -> None:
    for node in list(gm.graph.nodes):
        if node.target in _REGION_OPS:
            _detach_region(gm, node, flow)
        elif node.op == "call_function" and node not in flow.root:
            if node.meta.get(NO_GRAD_KEY) or flow.is_dead_write(node):
                _detach_operands(gm, node, flow)
            flow.visit(node)
    gm.graph.lint()
    gm.recompile()


def _detach_region(gm: fx.GraphModule, region: fx.Node, flow: _GradientTracker) -> None:
    """Detach in the body of a region, whose nodes then keep module path and source line."""
    index = next(i for i, a in enumerate(region.args) if isinstance(a, fx.Node) and a.op == "get_attr")
    body = getattr(gm, str(getattr(region.args[index], "target", "")))
    placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
    for placeholder, operand in zip(placeholders, region.args[index + 1 :], strict=True):
        flow.link(placeholder, operand)
    flow.regions.append(region)
    _detach_graph(body, flow)
    flow.regions.pop()
    results = next(n for n in body.graph.nodes if n.op == "output").args[0]
    for get in region.users:
        slot: Any = get.args[1]
        flow.link(get, results[slot])
    body.__dict__["forward"] = functools.partial(_interpret_region, body)


def _interpret_region(body: fx.GraphModule, *args: Any) -> Any:
    with fx.traceback.preserve_node_meta():
        return fx.Interpreter(body).run(*args)


def _detach_operands(gm: fx.GraphModule, node: fx.Node, flow: _GradientTracker) -> None:
    written = _mutated_operands(node)
    for operand in node.all_input_nodes:
        if (
            operand in flow.with_gradient
            and operand not in written
            and not isinstance(operand.meta.get("val"), tuple | list)
        ):
            with gm.graph.inserting_before(node):
                detached = gm.graph.call_function(aten.detach.default, (operand,))
            detached.meta = {**node.meta, "val": operand.meta.get("val")}
            flow.visit(detached)
            node.replace_input_with(operand, detached)


class _GradientTracker:
    """Tracks which values may have a gradient, through in-place ops and views (alias analysis)."""

    def __init__(self, sources: Iterable[fx.Node]) -> None:
        self.with_gradient = set(sources)
        self.root: dict[fx.Node, fx.Node] = {}
        """view → the node that owns its storage"""
        self.aliases: dict[fx.Node, set[fx.Node]] = {}
        self.view_base: dict[fx.Node, fx.Node] = {}
        """view → its operand"""
        self.regions: list[fx.Node] = []
        """enclosing regions of the next op, outermost first"""

    def link(self, node: fx.Node, same: Any) -> None:
        """Make ``node`` an alias of ``same``, across the border of a region."""
        if isinstance(same, fx.Node):
            self._alias(node, same)
            if same in self.with_gradient:
                self.with_gradient.add(node)

    def visit(self, node: fx.Node) -> None:
        """Add the next op. Raises :class:`CaptureError` for a write that autograd does not see."""
        enabled = not node.meta.get(NO_GRAD_KEY)
        for operand, argument in _schema_operands(node):
            if _gives_alias(node, operand, argument):
                self._alias(node, operand)
        written = _mutated_operands(node)
        for operand in written:
            if not (enabled and operand in self.with_gradient) and not self.with_gradient.isdisjoint(
                self._same_storage(operand)
            ):
                if node.target is aten.embedding_renorm_.default:
                    raise CaptureError(
                        f"{node_loc(node)}: an embedding with max_norm writes to its table at each look-up. Leave "
                        "out max_norm, and scale the parameter's rows between steps, or the result of the look-up."
                    )
                raise CaptureError(
                    f"{node_loc(node)}: {node.target} writes in place to a value that has a gradient, while autograd "
                    "does not record (under no_grad, or to its detach() or .data). Compute a new tensor instead."
                )
        if (
            enabled
            and node.target is not aten.detach.default
            and not self.with_gradient.isdisjoint(node.all_input_nodes)
        ):
            self.with_gradient.add(node)
            for operand in written:
                self._attach(node, operand)
                self.with_gradient |= self._same_storage(operand)

    def _alias(self, node: fx.Node, operand: fx.Node) -> None:
        self.view_base[node] = operand
        root = self.root[node] = self.root.get(operand, operand)
        self.aliases.setdefault(root, {root}).add(node)

    def is_dead_write(self, write: fx.Node) -> bool:
        """Whether only writes read the ``detach()`` that it writes, as of an EMA into ``x.data``.
        No reader then has the gradient of the written value."""
        found = [x for n in _mutated_operands(write) for x in self._through(n) if x.target is aten.detach.default]
        return bool(found) and not any(self._is_read_after(write, detached) for detached in found)

    def _is_read_after(self, write: fx.Node, detached: fx.Node) -> bool:
        """Whether a node behind ``write`` reads ``detached`` or a view of it, or returns it."""
        family = {n for n in self._same_storage(detached) if detached in self._through(n)} | {write}
        for node in self._after(write):
            if family.isdisjoint(node.all_input_nodes):
                continue
            if not any(o in family and _gives_alias(node, o, argument) for o, argument in _schema_operands(node)):
                return True
            family.add(node)
        return False

    def _after(self, node: fx.Node) -> Iterable[fx.Node]:
        """The nodes behind ``node``, then those behind its enclosing regions."""
        for each in (node, *reversed(self.regions)):
            nodes = list(each.graph.nodes)
            yield from nodes[nodes.index(each) + 1 :]

    def _attach(self, write: fx.Node, written: fx.Node) -> None:
        """Let ``written`` have a gradient from a write on; its ``detach()`` becomes an alias.
        A functional graph would detach the written value. Raises where both are read afterwards."""
        for detached in self._through(written):
            if detached.target is not aten.detach.default:
                continue
            detached.target = aten.alias.default
            others = {n for n in self._same_storage(written) if detached not in self._through(n)}
            if any(n.op == "call_function" and not others.isdisjoint(n.all_input_nodes) for n in self._after(write)):
                raise CaptureError(
                    f"{node_loc(write)}: {write.target} writes a value that has a gradient to a detach() of "
                    "a tensor, which is also read later without a gradient. Compute a new tensor instead."
                )

    def _through(self, node: fx.Node) -> list[fx.Node]:
        """``node``, its operand if it is a view, and so on."""
        found = [node]
        while found[-1] in self.view_base:
            found.append(self.view_base[found[-1]])
        return found

    def _same_storage(self, node: fx.Node) -> set[fx.Node]:
        root = self.root.get(node, node)
        return self.aliases.get(root, set()) | {root}


def _gives_alias(node: fx.Node, operand: fx.Node, argument: Any) -> bool:
    return (argument is None or argument.alias_info is not None) and not _is_copy(node, operand)


def _is_copy(node: fx.Node, operand: fx.Node) -> bool:
    """Whether an op that may copy ``operand`` did so in the trace."""
    if getattr(node.target, "_opname", "") not in _MAYBE_COPYING:
        return False
    results = node.meta.get("val"), operand.meta.get("val")
    storages = [storage_id(_unbatched(x)) for x in results if isinstance(x, Tensor)]
    return len(set(storages)) == 2


def _unbatched(x: Tensor) -> Tensor:
    """The tensor behind a batched one of torch.vmap, which has no storage."""
    while is_batchedtensor(x):
        x = get_unwrapped(x)
    return x


def _mutated_operands(node: fx.Node) -> set[fx.Node]:
    return {
        a for a, s in _schema_operands(node) if s is not None and s.alias_info is not None and s.alias_info.is_write
    }


def _schema_operands(node: fx.Node) -> list[tuple[fx.Node, Any]]:
    """(operand, schema argument) of single tensors; (source, None) of getitem."""
    if node.target is operator.getitem:
        return [(a, None) for a in node.args[:1] if isinstance(a, fx.Node)]
    if not isinstance(node.target, OpOverload):
        return []
    schema = node.target._schema.arguments
    pairs = [
        *zip(node.args, schema, strict=False),
        *((node.kwargs[s.name], s) for s in schema if s.name in node.kwargs),
    ]
    return [(a, s) for a, s in pairs if isinstance(a, fx.Node)]

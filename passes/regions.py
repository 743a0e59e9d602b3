"""no_grad regions of an exported program, written out: detach where a value enters."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autoshard.errors import CaptureError

aten = torch.ops.aten
_NO_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast


def inline_no_grad(gm: fx.GraphModule, grads: set[str]) -> None:
    """Put the nodes of no_grad regions into ``gm`` (and into its autocast regions); what they read is detached.

    Detaching at each use rather than the results keeps the meaning where a region writes into an outer buffer.
    ``grads``: placeholders with a gradient. Raises :class:`CaptureError` where a region writes into a value that
    has a gradient: autograd does not see such a write, a functional graph would differentiate through it.
    """
    flow = _Gradients({n for n in gm.graph.nodes if n.op == "placeholder" and n.name in grads})
    for node in list(gm.graph.nodes):
        if node.target is _NO_GRAD:
            _inline(gm, node, flow)
        elif node.target is _AUTOCAST:
            body, operands = _region(gm, node)
            inner = [n for n in body.graph.nodes if n.op == "placeholder"]
            carried = {p.name for p, o in zip(inner, operands, strict=True) if o in flow}
            inline_no_grad(body, carried)
            flow.visit(node)
        else:
            flow.visit(node)
    gm.graph.lint()
    gm.recompile()


class _Gradients:
    """Which values may carry a gradient, over a program with in-place ops and views."""

    def __init__(self, sources: set[fx.Node]) -> None:
        self.carried = sources
        self.root: dict[fx.Node, fx.Node] = {}
        self.aliases: dict[fx.Node, set[fx.Node]] = {}

    def __contains__(self, node: Any) -> bool:
        return node in self.carried

    def visit(self, node: fx.Node, enabled: bool = True) -> None:
        """Take in the next node; ``enabled``: whether gradients are on where it runs."""
        if node.op != "call_function":
            return
        operands = _operands(node)
        for operand, argument in operands[:1] if node.target is operator.getitem else operands:
            if argument is None or argument.alias_info is not None:
                root = self.root[node] = self.root.get(operand, operand)
                self.aliases.setdefault(root, {root}).add(node)
        written = _written(node)
        for operand in written:
            if (not enabled or operand not in self) and not self.carried.isdisjoint(self._same_storage(operand)):
                raise CaptureError(
                    f"{node.target} writes in place into {operand.name} behind autograd's back (under no_grad, or into "
                    "detach() or .data of it), though it has a gradient. Compute a new tensor instead. "
                    + (f"At: {line}" if (line := node.meta.get("stack_trace", "").strip().rpartition("File ")[2]) else "")
                )
        if enabled and node.target is not aten.detach.default and any(n in self for n in node.all_input_nodes):
            self.carried.add(node)
            for operand in written:
                self.carried |= self._same_storage(operand)

    def _same_storage(self, node: fx.Node) -> set[fx.Node]:
        root = self.root.get(node, node)
        return self.aliases.get(root, set()) | {root}


def _written(node: fx.Node) -> set[fx.Node]:
    return {a for a, s in _operands(node) if s is not None and s.alias_info is not None and s.alias_info.is_write}


def _operands(node: fx.Node) -> list[tuple[fx.Node, Any]]:
    """Single tensor operands with their schema argument (None where the target has no schema)."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return [(a, None) for a in node.args if isinstance(a, fx.Node)] if node.target is operator.getitem else []
    schema = node.target._schema.arguments
    pairs = list(zip(node.args, schema, strict=False)) + [(node.kwargs[s.name], s) for s in schema if s.name in node.kwargs]
    return [(a, s) for a, s in pairs if isinstance(a, fx.Node)]


def _region(gm: fx.GraphModule, region: fx.Node) -> tuple[fx.GraphModule, list[Any]]:
    index = next(i for i, a in enumerate(region.args) if isinstance(a, fx.Node) and a.op == "get_attr")
    attr = region.args[index]
    assert isinstance(attr, fx.Node)
    return getattr(gm, str(attr.target)), list(region.args[index + 1 :])


def _inline(gm: fx.GraphModule, region: fx.Node, flow: _Gradients) -> None:
    enabled = bool(region.args[0])
    body, operands = _region(gm, region)
    nodes = list(body.graph.nodes)
    env: dict[fx.Node, Any] = dict(zip([n for n in nodes if n.op == "placeholder"], operands, strict=True))
    outer = {o for o in operands if isinstance(o, fx.Node)}
    results: Any = next(n for n in nodes if n.op == "output").args[0]
    with gm.graph.inserting_before(region):
        for node in nodes:
            if node.op in ("placeholder", "output"):
                continue
            if node.op == "get_attr":
                name = f"{region.name}_{node.target}"
                gm.add_submodule(name, getattr(body, str(node.target)))
                env[node] = gm.graph.get_attr(name)
                continue
            new = gm.graph.node_copy(node, lambda n: env[n])
            if not enabled:
                _detach_operands(gm, new, outer, flow)
            flow.visit(new, enabled)
            env[node] = new
    for get in list(region.users):
        result = results[get.args[1]] if isinstance(results, tuple | list) else results
        get.replace_all_uses_with(env[result])
        gm.graph.erase_node(get)
    gm.graph.erase_node(region)


def _detach_operands(gm: fx.GraphModule, node: fx.Node, outer: set[fx.Node], flow: _Gradients) -> None:
    """``node`` of a no_grad region reads ``outer`` values that have a gradient detached."""
    written = _written(node)
    for operand in node.all_input_nodes:
        if operand not in outer or operand not in flow or operand in written:
            continue
        with gm.graph.inserting_before(node):
            detached = gm.graph.call_function(aten.detach.default, (operand,))
        detached.meta = {**node.meta, "val": operand.meta.get("val")}
        flow.visit(detached)
        node.replace_input_with(operand, detached)

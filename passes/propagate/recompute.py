"""Recompute (rematerialize): activation checkpointing, ZeRO stages, duplicated cheap operations.

The setting ``recompute=`` decides which states each operation is offered. "none": nothing is
recomputed. "blocks": every repeated module (``layers.3``) keeps its inputs and is recomputed.
"selective": attention matrices are recomputed (Korthikanti et al., arXiv:2205.05198); with a
fused kernel, which keeps none, elementwise operations and norms are, and results of products are
kept (as torchtitan's selective checkpointing). ``{module pattern: True | False}``: matching
modules are recomputed like blocks, or kept. "auto": modules in ``torch.utils.checkpoint`` are
recomputed like blocks; in a model without them the search decides per operation.

A parameter's ZeRO stage says how long it stays gathered (Rajbhandari et al., arXiv:1910.02054).
0: until the forward has used it; the backward gathers it again (stage 3, FSDP). 2: until the
backward has used it. 1: the same, and with several micro-batches its gradient is reduced once per
step; at stage 2 it is reduced in each micro-batch.

Cheap operations on inputs alone (masks, positions, rotary tables) may be duplicated on every
stage instead of sent."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Mapping

from autoshard.errors import HintError, PlanError
from autoshard.mesh import Mesh
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.text import block_path
from autoshard.passes.propagate.prices.roofline import is_fusible, node_flops
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.facts import can_redraw, has_effect, is_view, saved_for_backward

Recompute = str | Mapping[str, bool]
RecomputeOffer = Callable[[Node], tuple[int, ...]]
"""the recompute states that an operation may have"""

RECOMPUTE_SETTINGS = ("auto", "none", "blocks", "selective")


def recompute_offer(graph: Graph, recompute: Recompute, regather: bool = False) -> RecomputeOffer:
    """The recompute states of each operation. ``regather``: products convert operands again in any
    case (Megatron sequence parallelism). Raises :class:`PlanError` for an unknown setting."""
    found = _setting_offer(graph, recompute)
    if not regather or not graph.training:
        return found
    return lambda node: (
        tuple(dict.fromkeys(max(1, state) for state in found(node))) if _has_flops(node) else found(node)
    )


def _has_flops(node: Node) -> bool:
    rule = rule_for(node.op)
    return rule is not None and rule.flops is not None


def _setting_offer(graph: Graph, recompute: Recompute) -> RecomputeOffer:
    if not graph.training or recompute == "none":
        return lambda node: (0,)
    if isinstance(recompute, Mapping):
        return _fixed_offer(_checkpoint_states(graph, _matched_modules(graph, recompute)))
    match recompute:
        case "blocks":
            return _fixed_offer(_checkpoint_states(graph, {node.name: block_path(node.fqn) for node in graph.nodes}))
        case "checkpoints":
            return _fixed_offer(
                _checkpoint_states(graph, {n.name: str(n.checkpoint) for n in graph.nodes if n.checkpoint})
            )
        case "selective":
            return _fixed_offer(_selective_states(graph))
        case "auto":
            return _searched_states
    raise PlanError(
        f"recompute={recompute!r} is not one of {', '.join(map(repr, RECOMPUTE_SETTINGS))} or {{pattern: True | False}}"
    )


def with_model_checkpoints(graph: Graph, recompute: Recompute) -> Recompute:
    """``recompute``; "checkpoints" instead of "auto" if the model uses checkpointing."""
    return "checkpoints" if recompute == "auto" and any(node.checkpoint for node in graph.nodes) else recompute


def _fixed_offer(states: Mapping[str, int]) -> RecomputeOffer:
    return lambda node: (states.get(node.name, 0),)


def _searched_states(node: Node) -> tuple[int, ...]:
    """State 1 (convert operands again, or redraw) exists only for products and dropout."""
    return (0, 1, 2) if _has_flops(node) or can_redraw(node) else (0, 2)


def _matched_modules(graph: Graph, patterns: Mapping[str, bool]) -> dict[str, str]:
    """Node → the outermost module that the last matching pattern (``layers.*``) recomputes."""
    if wrong := [f"{pattern!r}: {what!r}" for pattern, what in patterns.items() if not isinstance(what, bool)]:
        raise HintError(f"recompute: {wrong[0]} is neither True (recomputed) nor False (kept)")
    if unnamed := [pattern for pattern in patterns if not isinstance(pattern, str)]:
        raise HintError(f"recompute: {unnamed[0]!r} is not a pattern of modules, such as 'layers.*'")
    found: dict[str, str] = {}
    used: set[str] = set()
    for node in graph.nodes:
        path = node.fqn.split(".") if node.fqn else []
        inwards = [".".join(path[:depth]) for depth in range(1, len(path) + 1)]
        asked = [(p, next((m for m in inwards if fnmatch.fnmatchcase(m, p)), None)) for p in patterns]
        matched = [(pattern, module) for pattern, module in asked if module is not None]
        used.update(pattern for pattern, _ in matched)
        if matched and patterns[matched[-1][0]]:
            found[node.name] = matched[-1][1]
    if missing := [pattern for pattern in patterns if pattern not in used]:
        raise HintError(f"recompute: the pattern {missing[0]!r} matches no module of the model")
    return found


def _checkpoint_states(graph: Graph, module: Mapping[str, str]) -> dict[str, int]:
    """Recompute states of modules: keep the inputs of each ("": none), recompute what is needed."""
    states: dict[str, int] = {}
    needed: set[str] = set()
    left: set[str] = set()
    for node in reversed(graph.nodes):
        at = module.get(node.name, "")
        if not at:
            continue
        read = any(module.get(user.name) != at for o in node.outputs for user in graph.uses[o])
        leaves = read or not left.isdisjoint(node.outputs)
        if leaves and is_view(node.op):  # the tensor behind a view is kept with it
            left.update(node.inputs[:1])
        keeps = saved_for_backward(node, graph.types)
        inside = bool(keeps.intermediates) and not can_redraw(node)
        wanted = bool(keeps.results) or inside or not needed.isdisjoint(node.outputs)
        states[node.name] = 2 if wanted and not leaves else 1
        inputs = node.inputs if states[node.name] == 2 else [node.inputs[i] for i in keeps.operands]
        if is_view(node.op) and not needed.isdisjoint(node.outputs):
            inputs = node.inputs
        needed.update(inputs)
    return states


def _selective_states(graph: Graph) -> dict[str, int]:
    """Attention matrices and what leads to them from products; else elementwise operations."""
    found = {node.name: 2 for node in graph.nodes if _keeps_matrix(node, graph)}
    products = {n.name for n in graph.nodes if _has_flops(n) and graph.parameters.isdisjoint(n.inputs)}
    for node in graph.nodes:  # from a product of activations to the next one
        if node.name in products and (between := _until_product(node, graph, products)):
            found.update(dict.fromkeys((node.name, *between), 2))
    if found:
        return found
    return {n.name: 2 for n in graph.nodes if is_fusible(n) and block_path(n.fqn)}


def _keeps_matrix(node: Node, graph: Graph) -> bool:
    """Whether an attention operation saves more bytes than its operands and results have."""
    if not _has_flops(node):
        return False
    inside = sum(t.nbytes for t in saved_for_backward(node, graph.types).intermediates)
    return inside > sum(graph.types[n].nbytes for n in node.values)


def _until_product(node: Node, graph: Graph, products: set[str]) -> list[str]:
    """Operations between ``node`` and products of activations; none if others read on the way."""
    found: list[str] = []
    values = set(node.outputs)
    open_ = list(graph.uses[node.outputs[0]])
    while open_:
        user = open_.pop()
        if user.name in products:
            continue
        if not (is_fusible(user) or is_view(user.op)):
            return []
        if user.name not in found:
            found.append(user.name)
            values.update(user.outputs)
            open_ += [u for o in user.outputs for u in graph.uses[o]]
    return found


def offered_zero_stages(
    graph: Graph, mesh: Mesh, pinned: Mapping[str, int], asked: Collection[str], limited: bool
) -> dict[str, tuple[int, ...]]:
    """Parameter → ZeRO stages on offer; only the fastest unless ``limited`` (memory counts).
    ``pinned``: of a named strategy; ``asked``: parameters with a given layout, gathered again,
    as on an ideal network."""
    quickest = 1 if graph.passes > 1 else 2
    free = (0, *range(2, quickest - 1, -1)) if limited else (quickest,)
    found: dict[str, tuple[int, ...]] = {}
    for name in graph.parameters:
        chooses = graph.training and graph.types[name].grad and name not in asked and mesh.hardware.node.latency
        found[name] = (pinned[name],) if name in pinned else free if chooses else (0,)
    return found


CHEAP_FLOPS_PER_ELEMENT = 64.0
"""FLOPs per result element below which repeating beats sending; an outer product is below"""


def duplicable_nodes(graph: Graph, at_most: float = CHEAP_FLOPS_PER_ELEMENT) -> frozenset[str]:
    """Operations that may be duplicated: without gradient, from inputs and constant buffers, cheap
    (``at_most``: FLOPs per element of the result)."""
    fixed = {i.name for i in graph.inputs if i.kind == "parameter" or i.fqn in graph.mutations}
    found = set()
    for node in graph.nodes:
        results = sum(graph.types[o].numel for o in node.outputs)
        if (
            node.outputs
            and not has_effect(node)
            and (node.op.namespace == "aten" or rule_for(node.op) is not None)  # custom operations may draw or write
            and not any(name in fixed for name in node.inputs)
            and not graph.is_differentiable(node)
            and node_flops(node, graph) <= at_most * results
        ):
            found.add(node.name)
        else:
            fixed.update(node.outputs)
    return frozenset(found)

"""Mixture of experts (MoE): routing as users write it becomes one operation, ``experts_op``.
Forms: *dense*: all experts get all rows, and gates [t, e], zero except for chosen experts, weigh
the results. *Sorted*: rows sorted by expert, grouped GEMM. *Capacity*: one-hot dispatch into
buffers and combine. *Loop*: per expert, the rows that chose it, or all rows times its gate. An
expert is two products around an activation; matrices of all experts are one tensor, or modules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard.aten import aten
from autoshard.passes.capture.translate.canonicalize import remove_dead
from autoshard.passes.capture.translate.moe_patterns import (
    ALL_ROWS,
    GATED,
    SORTED,
    STEP,
    TURNS,
    CapacityPatterns,
    ExpertIds,
    ExpertMatrices,
    ExpertMlp,
    OneHotIds,
    buffer_products,
)
from autoshard.passes.ir.graph import Graph, Node, Ref
from autoshard.passes.ir.patterns import Bindings, product_of
from autoshard.passes.ir.rewrite import NodeBuilder, rewrite
from autoshard.passes.rules.families.experts import STACKED
from autoshard.runtime.operations.experts import experts_op


def fuse_expert_routing(graph: Graph) -> Graph:
    """``graph`` with known routings as :func:`~autoshard.runtime.operations.experts.experts_op`."""
    patterns = CapacityPatterns(graph)

    def fused(build: NodeBuilder, node: Node) -> bool:
        found = (m for form in _ROUTING_FORMS if (m := form(node, patterns)) is not None)
        routing = next((m for m in found if _has_ids_per_row(m, node, graph)), None)
        if routing is not None:
            _build_routing(build, routing)
        return routing is not None

    made = rewrite(graph, fused)
    return graph if made is graph else _count_table_wise_experts(remove_dead(made))


@dataclass(frozen=True)
class ExpertRouting:
    """A matched routing: the operands of ``experts_op``."""

    x: Ref
    ids: ExpertIds
    weights: Ref
    experts: ExpertMlp
    single: bool = False
    """whether ids are [rows] (top 1), and weights [rows], or [rows, e] of all experts"""
    drops_zeros: bool = False
    """whether choices of weight 0 are dropped"""


def _has_ids_per_row(routing: ExpertRouting, node: Node, graph: Graph) -> bool:
    """Whether each row of x has its own ids, weights and result, and x and result one dtype."""
    x, weights, result = (graph.types[n] for n in (routing.x.name, routing.weights.name, *node.outputs))
    ids = graph.shape(routing.ids.mask)[:-1] if isinstance(routing.ids, OneHotIds) else graph.shape(routing.ids)
    rows = ids if routing.single else ids[:-1]
    alike = x.shape[:-1] == result.shape[:-1] and ids == weights.shape[: len(ids)]
    flat = isinstance(routing.ids, Ref) and math.prod(rows) == math.prod(x.shape[:-1])  # ids can be reshaped
    return alike and (flat or rows == x.shape[:-1]) and x.dtype == result.dtype


def _count_table_wise_experts(graph: Graph) -> Graph:
    """``graph`` whose types mark expert parameters that may be owned by one rank each."""
    types = dict(graph.types)
    for node in graph.nodes:
        apart = node.op is STACKED and len({*node.inputs}) == len(node.inputs)
        if apart and all(
            n in graph.parameters and len(graph.uses[n]) == 1 and n not in graph.returned for n in node.inputs
        ):
            count = len(node.inputs) // node.argument("parts")
            types |= {n: replace(types[n], tables=count) for n in node.inputs}
    return replace(graph, types=types)


# --- what is built ---


def _build_routing(build: NodeBuilder, routing: ExpertRouting) -> None:
    """``experts_op`` in place of a matched routing."""
    experts, dim = routing.experts, 2 if routing.experts.form[2] else 1
    first, second, *biases = (_joined(build, several, dim) for _, several in experts.weights)
    if experts.turned:
        second = [build(aten.transpose.int, second[0], 1, 2)]
    ids, weights = routing.ids, routing.weights
    if isinstance(ids, OneHotIds):
        ids, weights = _ids_of_mask(build, routing, ids.mask)
    elif (shape := [*build.shape(routing.x)[:-1], build.shape(ids)[-1]]) != [*build.shape(ids)]:
        ids, weights = (build(aten.reshape.default, x, shape) for x in (ids, weights))
    given = [x for several in biases for x in several]
    build.finish(experts_op._opoverload, routing.x, ids, weights, *first, *second, *experts.form, *given)


def _ids_of_mask(build: NodeBuilder, routing: ExpertRouting, mask: Ref) -> tuple[Ref, Ref]:
    """Ids [.., k] of a one-hot mask (-1: dropped choice), and weights [.., k]."""
    weights, chosen = routing.weights, mask
    if build.shape(weights) == build.shape(mask):  # [.., e], of all experts
        weights = build(aten.sum.dim_IntList, build(aten.mul.Tensor, weights, mask), [-1])
    if routing.drops_zeros:
        some = build(aten.unsqueeze.default, build(aten.ne.Scalar, weights, 0), -1)
        chosen = build(aten.mul.Tensor, mask, some)
    place = build(aten.argmax.default, chosen, -1)
    count = build(aten.sum.dim_IntList, chosen, [-1])
    ids = build(aten.sub.Tensor, build(aten.add.Tensor, place, count), 1)
    if routing.single:
        ids, weights = (build(aten.unsqueeze.default, x, -1) for x in (ids, weights))
    return ids, weights


def _joined(build: NodeBuilder, several: Sequence[ExpertMatrices], dim: int) -> list[Ref]:
    """``several`` matrices of each expert as one tensor of all experts; [] if there are none."""
    of_one = [m for m in several if not isinstance(m, Ref)]
    if of_one and (dim == 1 or len(build.shape(of_one[0][0])) == 1):  # gate and up of an expert are adjacent
        return [build(STACKED, [m for each in zip(*of_one, strict=True) for m in each], len(several))]
    parts = [m if isinstance(m, Ref) else build(STACKED, list(m)) for m in several]
    return [build(aten.cat.default, parts, dim)] if len(parts) > 1 else parts


# --- forms of routing, each matched at its last node ---


def _match_dense_routing(node: Node, patterns: CapacityPatterns) -> ExpertRouting | None:
    """Match einsum("etd, te -> td", results of all experts, gates)."""
    found = patterns.match(ALL_ROWS, Ref(node.outputs[0])) if node.op is aten.einsum.default else None
    if found is None or len(patterns.graph.shape(found["x"])) != 2:
        return None
    return ExpertRouting(found["x"], found["ids"], found["weights"], found["mlp"])


def _match_sorted_routing(node: Node, patterns: CapacityPatterns) -> ExpertRouting | None:
    """Match zeros.index_add(0, order // k, grouped experts(x[order // k]) * weights[order])."""
    found = patterns.match(SORTED, Ref(node.outputs[0])) if node.op is aten.index_add.default else None
    shape = patterns.graph.shape(found["ids"]) if found is not None else ()
    if found is None or len(shape) != 2 or shape[-1] != found["top"] or shape != patterns.graph.shape(found["weights"]):
        return None
    return ExpertRouting(found["x"], found["ids"], found["weights"], found["mlp"])


def _match_capacity_routing(node: Node, patterns: CapacityPatterns) -> ExpertRouting | None:
    """Match einsum("..tec, ..ecd -> ..td", combine mask, experts(dispatched rows))."""
    product = product_of(node, patterns.graph) if node.op is aten.einsum.default else None
    if product is None or len(product.operands) != 2:
        return None
    for back, y in itertools.permutations(product.operands):
        of_back, of_y, of_result = product.named(back, y)
        if len(of_back) not in (3, 4) or of_back[-2] not in of_y or len(of_y) not in (3, 4):
            continue
        products = buffer_products(len(of_y), of_y.index(of_back[-2]))
        x, experts = next(patterns.experts(products, y, {}), (None, None))
        filled = patterns.filled(x) if x is not None else None
        if experts is None or filled is None or (of_y, of_result) != (filled[2], of_back[:-2] + of_y[-1]):
            continue
        there, weighed = patterns.placed(filled[0]), patterns.placed(back)
        if there is None or weighed is None or weighed.gates is None:
            continue
        unweighed = there.gates is None or (there.nonzero and there.gates == weighed.gates)
        if there[:3] == weighed[:3] and unweighed and not weighed.nonzero:
            return ExpertRouting(filled[1], there.hot, weighed.gates, experts, there.single, there.gates is not None)
    return None


def _match_expert_loop(node: Node, patterns: CapacityPatterns) -> ExpertRouting | None:
    """Match a loop of out.index_add(0, rows, expert(x[rows]) * weights[rows, slots]) at its end."""
    last = patterns.match(STEP, Ref(node.outputs[0])) if node.outputs else None
    if last is None or _has_next_expert(node, patterns):
        return None
    found: dict[int, Bindings] = {}
    total, sums = Ref(node.outputs[0]), True
    while (step := patterns.match(STEP, total)) is not None:
        total, rows = step["total"], step["rows"]
        sums &= "sum" in step or patterns.match("any(_, _)", rows) is not None
        turns = (m for form in TURNS for m in patterns.matches(form, step["values"], rows=rows))
        turn = next((m for m in turns if isinstance(m["number"], int)), None)
        if turn is None or turn["number"] in found:
            return None
        found[turn["number"]] = turn
    if sorted(found) != list(range(len(found))) or not patterns.is_zero(total):
        return None
    routed = {(m["x"], OneHotIds(m["mask"]) if "mask" in m else m["ids"], m["weights"]) for m in found.values()}
    experts = _merge_experts([found[e]["mlp"] for e in sorted(found)], patterns.graph)
    if len(routed) != 1 or experts is None:
        return None
    ((x, ids, weights),) = routed
    distinct = isinstance(ids, Ref) and patterns.match("distinct()", ids) is not None
    return ExpertRouting(x, ids, weights, experts) if sums or distinct else None  # a turn writes a row once


def _match_gated_loop(node: Node, patterns: CapacityPatterns) -> ExpertRouting | None:
    """Match a loop of out + gates[..., e : e + 1] * expert(x) at its end, with sparse gates."""
    if node.op is not aten.add.Tensor or len(node.inputs) != 2 or node.kwargs or _has_next_expert(node, patterns):
        return None
    found: dict[int, Bindings] = {}
    total: Ref | None = Ref(node.outputs[0])
    while total is not None and not patterns.is_zero(total):
        sum_ = patterns.match("add(a, b)", total)
        sides = [total] if sum_ is None else [sum_["a"], sum_["b"]]
        weighed = {side: one for side in sides if (one := patterns.match(GATED, side)) is not None}
        numbers = [one["number"] for one in weighed.values()]
        if not weighed or not found.keys().isdisjoint(numbers) or len({*sides}) < len(sides):
            return None
        found |= {one["number"]: one for one in weighed.values()}
        total = next((side for side in sides if side not in weighed), None)
    if len(found) < 2 or sorted(found) != list(range(len(found))):
        return None
    ((x, gates), *others) = {(m["x"], m["gates"]) for m in found.values()}
    experts = _merge_experts([found[e]["mlp"] for e in sorted(found)], patterns.graph)
    chosen = patterns.match("gates(ids, weights)", gates) if experts is not None and not others else None
    return ExpertRouting(x, chosen["ids"], chosen["weights"], experts) if chosen and experts else None


def _has_next_expert(node: Node, patterns: CapacityPatterns) -> bool:
    """Whether the loop goes on: another expert adds to the result of ``node``."""
    result = Ref(node.outputs[0])
    for user in patterns.graph.uses[result.name]:
        step = patterns.match(STEP, Ref(user.outputs[0])) if user.outputs else None
        # A turn of a traced loop ends in ``where(any rows, result, before)``.
        traced = user.op is aten.where.self and user.args[1] == result
        if traced or (step is not None and step["total"] == result):
            return True
        if user.op is aten.add.Tensor and any(x != result and patterns.match(GATED, x) for x in user.args):
            return True
    return False


def _merge_experts(experts: Sequence[ExpertMlp], graph: Graph) -> ExpertMlp | None:
    """The experts of a loop as one: all read the same stacked tensors, or each its own matrices."""
    one, shapes = experts[0], list[Any]()
    if all(e == one for e in experts):
        return one if isinstance(one.second, Ref) and graph.shape(one.second)[0] == len(experts) else None
    for e in experts:
        of = [[graph.shape(m) for m in several if isinstance(m, Ref)] for _, several in e.weights]
        shapes.append((e.form, e.turned, of))
    if any(s != shapes[0] for s in shapes) or any(len(s) > 2 for of in shapes[0][2] for s in of):
        return None

    def of_all(name: str) -> Any:
        return tuple(zip(*(getattr(e, name) for e in experts), strict=True))

    biases = {name: of_all(name) for name in ("first_bias", "second_bias")}
    return replace(one, first=of_all("first"), second=tuple(e.second for e in experts), **biases)  # type: ignore[misc]


_ROUTING_FORMS = (
    _match_dense_routing,
    _match_sorted_routing,
    _match_capacity_routing,
    _match_expert_loop,
    _match_gated_loop,
)

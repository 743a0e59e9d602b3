"""Mixture of experts (MoE): routing as users write it becomes one operation, ``experts_op``.

Forms: *dense*: all experts get all rows, and gates [t, e], zero except for chosen experts, weigh
the results. *Sorted*: rows sorted by expert, grouped GEMM. *Capacity*: one-hot dispatch into
buffers and combine. *Loop*: per expert, the rows that chose it, or all rows times its gate.
An expert is two products around an activation; matrices of all experts are one tensor, or modules.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Union

import torch

from autoshard.aten import aten
from autoshard.passes.capture.translate.canonicalize import remove_dead
from autoshard.passes.capture.translate.moe_capacity import CapacityBuffers
from autoshard.passes.capture.translate.moe_patterns import (
    ExpertIds,
    ExpertMaskPatterns,
    OneHotIds,
    ProductMatcher,
    RoutingPatterns,
    einsum_dims,
)
from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType
from autoshard.passes.rules.families.experts import STACKED
from autoshard.runtime.operations.experts import experts_op
from autoshard.torch_private.ops import OpOverload

ExpertMatrices = Union[Ref, tuple[Ref, ...]]
"""matrices of all experts in one tensor, or one per expert"""


def fuse_expert_routing(graph: Graph) -> Graph:
    """``graph`` with known routings as :func:`~autoshard.runtime.operations.experts.experts_op`."""
    patterns, nodes, types = ExpertMaskPatterns(graph), list[Node](), dict(graph.types)
    found = False
    for node in graph.nodes:
        found_here = (m for form in _ROUTING_FORMS if (m := form(node, patterns)) is not None)
        mixture = next((m for m in found_here if _has_ids_per_row(m, node, graph)), None)
        for made, shape in _emit_expert_routing(node, mixture, graph) if mixture is not None else ((node, None),):
            nodes.append(made)
            if shape is not None:
                found = True
                like = types[made.inputs[0]]
                dtype = torch.bool if made.op is aten.ne.Scalar else like.dtype
                grad = dtype.is_floating_point and any(types[n].grad for n in made.inputs)
                types[made.outputs[0]] = TensorType(shape, dtype, grad)
    return _count_table_wise_experts(remove_dead(replace(graph, nodes=tuple(nodes), types=types))) if found else graph


def _has_ids_per_row(mixture: ExpertRouting, node: Node, graph: Graph) -> bool:
    """Whether each row of x has its own ids, weights and result, and x and result one dtype."""
    x, weights, result = (graph.types[n] for n in (mixture.x.name, mixture.weights.name, *node.outputs))
    ids = graph.shape(mixture.ids.mask)[:-1] if isinstance(mixture.ids, OneHotIds) else graph.shape(mixture.ids)
    rows = ids if mixture.single else ids[:-1]
    alike = x.shape[:-1] == result.shape[:-1] and ids == weights.shape[: len(ids)]
    flat = isinstance(mixture.ids, Ref) and math.prod(rows) == math.prod(x.shape[:-1])  # ids can be reshaped
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


class ExpertMlp:
    """Expert MLPs: two products around an activation, of all experts, or of one in a loop."""

    def __init__(
        self,
        x: Ref,
        first: tuple[ExpertMatrices, ...],
        second: ExpertMatrices,
        biases: tuple[tuple[ExpertMatrices, ...], tuple[ExpertMatrices, ...]],
        form: tuple[str, bool, bool],
        turned: bool,
    ) -> None:
        self.x, self.second, self.biases, self.form = x, second, biases, form
        self.turned = turned
        """whether second matrices are [out, in] where the first are [in, out], or vice versa"""
        self.first = first
        """(matrices,), or (gate matrices, up matrices)"""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExpertMlp) and vars(self) == vars(other)

    __hash__ = object.__hash__

    @property
    def weights(self) -> tuple[tuple[str, tuple[ExpertMatrices, ...]], ...]:
        """(operand of ``experts_op``, its matrices or biases); () where it has none."""
        pairs = zip(("first_bias", "second_bias"), self.biases, strict=True)
        return ("first", self.first), ("second", (self.second,)), *pairs


def _emit_expert_routing(
    node: Node, mixture: ExpertRouting, graph: Graph
) -> Iterator[tuple[Node, tuple[int, ...] | None]]:
    """(node, shape of its result) of the nodes that replace ``node`` by ``experts_op``."""
    experts, dim = mixture.experts, 2 if mixture.experts.form[2] else 1
    joined: list[Ref] = []
    for name, several in experts.weights:
        found: list[Ref] = []
        for made, shape in _stack_matrices(node, name, several, dim, graph):
            yield made, shape
            found = [Ref(made.outputs[0])]
        joined += found or [m for m in several if isinstance(m, Ref)]
        if name == "second" and experts.turned:
            n, i, o = shape if found else graph.shape(joined[1])
            yield _replacement_node(node, f"{node.name}_turned", aten.transpose.int, (joined[1], 1, 2)), (n, o, i)
            joined[1] = Ref(f"{node.name}_turned")
    ids, weights = mixture.ids, mixture.weights
    if isinstance(ids, OneHotIds):
        for made, shape in _ids_of_mask(node, mixture, ids.mask, graph):
            yield made, shape
        ids, weights = Ref(f"{node.name}_ids"), Ref(f"{node.name}_weights") if mixture.single else weights
    elif (shape := (*graph.shape(mixture.x)[:-1], graph.shape(ids)[-1])) != graph.shape(ids):  # of other dims of rows
        for name, value in (("ids", ids), ("weights", weights)):
            yield _replacement_node(node, f"{node.name}_{name}", aten.reshape.default, (value, list(shape))), shape
        ids, weights = Ref(f"{node.name}_ids"), Ref(f"{node.name}_weights")
    args = (mixture.x, ids, weights, *joined[:2], *experts.form, *joined[2:])
    yield _replacement_node(node, node.outputs[0], experts_op._opoverload, args), graph.shape(node.outputs[0])


def _ids_of_mask(node: Node, mixture: ExpertRouting, mask: Ref, graph: Graph) -> Iterator[tuple[Node, tuple[int, ...]]]:
    """Nodes that make ids [.., k] of a one-hot mask (-1: dropped choice), and weights [.., k]."""
    shape, number = graph.shape(mask), itertools.count()
    weights, chosen = mixture.weights, mask

    def made(op: OpOverload, *args: Any, name: str = "") -> Node:
        return _replacement_node(node, f"{node.name}_{name or f'routed{next(number)}'}", op, args)

    if graph.shape(weights) == shape:  # [.., e], of all experts
        yield (gated := made(aten.mul.Tensor, weights, mask)), shape
        yield (summed := made(aten.sum.dim_IntList, Ref(gated.name), [-1])), shape[:-1]
        weights = Ref(summed.name)
    if mixture.drops_zeros:
        yield (some := made(aten.ne.Scalar, weights, 0)), shape[:-1]
        yield (wide := made(aten.unsqueeze.default, Ref(some.name), -1)), (*shape[:-1], 1)
        yield (kept := made(aten.mul.Tensor, mask, Ref(wide.name))), shape
        chosen = Ref(kept.name)
    yield (place := made(aten.argmax.default, chosen, -1)), shape[:-1]
    yield (count := made(aten.sum.dim_IntList, chosen, [-1])), shape[:-1]
    yield (both := made(aten.add.Tensor, Ref(place.name), Ref(count.name))), shape[:-1]
    yield (ids := made(aten.sub.Tensor, Ref(both.name), 1, name="" if mixture.single else "ids")), shape[:-1]
    for what, value in (("ids", Ref(ids.name)), ("weights", weights)) if mixture.single else ():
        yield made(aten.unsqueeze.default, value, -1, name=what), (*shape[:-1], 1)


def _replacement_node(node: Node, name: str, op: OpOverload, args: tuple[Any, ...]) -> Node:
    """``node`` with another op and arguments, and one result ``name``."""
    return replace(node, name=name, op=op, args=args, kwargs={}, outputs=(name,), output_slots=(0,))


def _stack_matrices(
    node: Node, name: str, several: Sequence[ExpertMatrices], dim: int, graph: Graph
) -> Iterator[tuple[Node, tuple[int, ...]]]:
    """Nodes that join ``several`` matrices in one tensor, the last result; none if it is one."""

    def made(name: str, op: OpOverload, args: tuple[Any, ...], shape: Sequence[int]) -> Any:
        return _replacement_node(node, f"{node.name}_{name}", op, args), tuple(shape)

    parts = [(m,) if isinstance(m, Ref) else m for m in several]
    if not parts:
        return
    count, apart = len(parts[0]), not isinstance(several[0], Ref)
    shape = list(graph.shape(parts[0][0]))
    if apart and (dim == 1 or len(shape) == 1):  # gate and up of an expert are adjacent
        each = [m for of_one in zip(*parts, strict=True) for m in of_one]
        yield made(name, STACKED, (each, len(parts)), (count, len(parts) * shape[0], *shape[1:]))
        return
    if apart:
        for i, part in enumerate(parts):
            yield made(f"{name}_{i}", STACKED, (list(part),), (count, *shape))
        shape = [count, *shape]
        parts = [(Ref(f"{node.name}_{name}_{i}"),) for i in range(len(parts))]
    if len(parts) > 1:
        shape[dim] *= len(parts)
        yield made(name, aten.cat.default, ([p[0] for p in parts], dim), shape)


def _match_expert_mlp(y: Ref, product: ProductMatcher, patterns: RoutingPatterns) -> ExpertMlp | None:
    """The experts with results ``y``; ``product`` matches a product of rows and matrices."""
    if (second := product(y)) is None:
        return None
    for hidden, gate, activation in patterns.activated(second.rows):
        halves = (gate,) if hidden is None else patterns.halves(gate, hidden) or (gate, hidden)
        made = [m for half in halves if (m := product(half)) is not None]
        if len(made) < len(halves) or len({(m.rows, m.transposed, m.bias is None) for m in made}) > 1:
            continue
        if (made[0].bias is None) != (second.bias is None):
            continue
        first = tuple[ExpertMatrices, ...](m.matrices for m in made)
        biases = (
            tuple[ExpertMatrices, ...](m.bias for m in made if m.bias is not None),
            tuple[ExpertMatrices, ...](m.bias for m in (second,) if m.bias is not None),
        )
        if len({patterns.graph.shape(m.matrices) for m in made}) == 1:
            return ExpertMlp(
                made[0].rows,
                first,
                second.matrices,
                biases,
                (activation, hidden is not None, made[0].transposed),
                turned=second.transposed != made[0].transposed,
            )
    return None


# --- forms of routing, each matched at its last node ---


def _match_dense_routing(node: Node, patterns: RoutingPatterns) -> ExpertRouting | None:
    """Match einsum("etd, te -> td", results of all experts, gates)."""
    if node.op is not aten.einsum.default or len(node.args[1]) != 2:
        return None
    for y, gates in (node.args[1], node.args[1][::-1]):
        if einsum_dims(node, (y, gates)) != ("abc", "ba", "bc"):
            continue
        routed, experts = patterns.gates(gates), _match_expert_mlp(y, patterns.by_expert, patterns)
        if routed is not None and experts is not None and len(patterns.graph.shape(experts.x)) == 2:
            return ExpertRouting(experts.x, *routed, experts)
    return None


def _match_sorted_routing(node: Node, patterns: RoutingPatterns) -> ExpertRouting | None:
    """Match zeros.index_add(0, order // k, grouped experts(x[order // k]) * weights[order])."""
    if node.op is not aten.index_add.default or node.kwargs or node.args[1] != 0 or not patterns.is_zero(node.args[0]):
        return None
    rows, weighted = node.args[2:]
    for y, of_rows in patterns.times(weighted):
        ends: list[str] = []
        experts = _match_expert_mlp(y, patterns.grouped_products(ends), patterns)
        picked = patterns.made(experts.x, aten.index.Tensor, aten.index_select.default) if experts is not None else None
        if experts is None or picked is None or not all(patterns.same(Ref(ends[0]), Ref(end)) for end in ends):
            continue
        order, top = patterns.divided(rows)
        ids = patterns.sorted_ids(order) if order is not None else None
        if order is None or ids is None or not patterns.same(patterns.picks(picked), rows):
            continue
        weights = patterns.weights_in_order(of_rows, order, ids)
        counted = patterns.same(patterns.ends_of(Ref(ends[0])), ids)
        if weights is not None and counted and patterns.graph.shape(ids[0])[-1:] == (top,):
            experts.x = picked.args[0]
            return ExpertRouting(experts.x, ids[0], weights, experts)
    return None


def _match_capacity_routing(node: Node, patterns: RoutingPatterns) -> ExpertRouting | None:
    """Match einsum("..tec, ..ecd -> ..td", combine mask, experts(dispatched rows))."""
    if node.op is not aten.einsum.default or len(node.args[1]) != 2:
        return None
    buffers, dims = CapacityBuffers(patterns), list[int]()
    for back, y in (node.args[1], node.args[1][::-1]):
        of_back, of_y, of_result = einsum_dims(node, (back, y))
        experts = _match_expert_mlp(y, buffers.product(dims), patterns) if len(of_back) in (3, 4) else None
        filled = buffers.filled(experts.x) if experts is not None else None
        if experts is None or filled is None or (of_y, of_result) != (filled[2], of_back[:-2] + of_y[-1]):
            continue
        there, weighed = buffers.placed(filled[0]), buffers.placed(back)
        if there is None or weighed is None or weighed.gates is None or any(of_y[d] != of_back[-2] for d in dims):
            continue
        unweighed = there.gates is None or (there.nonzero and there.gates == weighed.gates)
        if there[:3] == weighed[:3] and unweighed and not weighed.nonzero:
            return ExpertRouting(filled[1], there.hot, weighed.gates, experts, there.single, there.gates is not None)
    return None


def _match_expert_loop(node: Node, patterns: RoutingPatterns) -> ExpertRouting | None:
    """Match a loop of out.index_add(0, rows, expert(x[rows]) * weights[rows, slots]) at its end."""
    if (last := patterns.added(patterns.kept(node) or node)) is None or _has_next_expert(node, patterns):
        return None
    found: dict[int, tuple[ExpertIds, Ref, ExpertMlp]] = {}
    here: Node | None = node
    total, sums = last[0], True
    while here is not None and (step := patterns.added(turn := patterns.kept(here) or here)) is not None:
        total, rows, value = step
        sums &= turn.op is aten.index_add.default or patterns.made(rows, aten.any.dim) is not None
        if (one := _match_loop_turn(rows, value, patterns)) is None or one[0] in found:
            return None
        number, *what = one
        found[number] = tuple(what)  # type: ignore[assignment]
        here = patterns.graph.producers.get(total.name)
    if sorted(found) != list(range(len(found))) or not patterns.is_zero(total):
        return None
    ids, weights, experts = found[0]
    alike = all((i, w) == (ids, weights) for i, w, _ in found.values())
    together = _merge_loop_experts([found[e][2] for e in sorted(found)], patterns.graph) if alike else None
    apart = sums or (isinstance(ids, Ref) and patterns.is_distinct(ids))  # a turn writes a row once
    return ExpertRouting(experts.x, ids, weights, together) if together is not None and apart else None


def _match_gated_loop(node: Node, patterns: RoutingPatterns) -> ExpertRouting | None:
    """Match a loop of out + gates[..., e : e + 1] * expert(x) at its end, with sparse gates."""
    if node.op is not aten.add.Tensor or len(node.inputs) != 2 or node.kwargs or _has_next_expert(node, patterns):
        return None
    found: dict[int, tuple[Ref, ExpertMlp]] = {}
    total: Ref | None = Ref(node.outputs[0])
    while total is not None and not patterns.is_zero(total):
        here = patterns.made(total, aten.add.Tensor)
        sides = [total] if here is None else here.args
        weighed = [(side, one) for side in sides if isinstance(side, Ref) and (one := _gated_expert(side, patterns))]
        if not weighed or not found.keys().isdisjoint(number for _, (number, *_) in weighed):
            return None
        for _, (number, *what) in weighed:
            found[number] = tuple(what)  # type: ignore[assignment]
        rest = [side for side in sides if side not in [side for side, _ in weighed]]
        total = rest[0] if rest else None
    if len(found) < 2 or sorted(found) != list(range(len(found))):
        return None
    gates = {g for g, _ in found.values()}
    routed = patterns.gates(gates.pop()) if len(gates) == 1 else None
    together = _merge_loop_experts([found[e][1] for e in sorted(found)], patterns.graph)
    return ExpertRouting(together.x, *routed, together) if routed is not None and together is not None else None


def _gated_expert(value: Ref, patterns: RoutingPatterns) -> tuple[int, Ref, ExpertMlp] | None:
    """(number, gates, expert) of ``value`` = gates[..., number, None] · expert(x)."""
    for y, factor in patterns.times(value):
        if (column := patterns.column(factor)) is None:
            continue
        gates, number = column
        if (experts := _match_expert_mlp(y, patterns.products_of_expert(number), patterns)) is not None:
            return number, gates, experts
    return None


def _has_next_expert(node: Node, patterns: RoutingPatterns) -> bool:
    """Whether the loop goes on: another expert adds to the result of ``node``."""
    users = patterns.graph.uses[node.outputs[0]]
    steps = (patterns.added(user) for user in users)
    if any(step is not None and step[0].name == node.outputs[0] for step in steps):
        return True
    # A turn of the loop ends in ``where(any rows, result, before)``.
    if any(user.op is aten.where.self and user.args[1] == Ref(node.outputs[0]) for user in users):
        return True
    sides = (side for user in users if user.op is aten.add.Tensor for side in user.args if isinstance(side, Ref))
    return any(side.name != node.outputs[0] and _gated_expert(side, patterns) is not None for side in sides)


def _merge_loop_experts(experts: Sequence[ExpertMlp], graph: Graph) -> ExpertMlp | None:
    """The experts of a loop as one: all read the same stacked tensors, or each its own matrices."""
    one = experts[0]
    if all(e == one for e in experts):
        return one if isinstance(one.second, Ref) and graph.shape(one.second)[0] == len(experts) else None
    if any(
        (e.x, e.form, e.turned, [len(w) for _, w in e.weights])
        != (one.x, one.form, one.turned, [len(w) for _, w in one.weights])
        for e in experts
    ):
        return None
    found: list[tuple[ExpertMatrices, ...]] = []
    for of_all in zip(*(e.weights for e in experts), strict=True):  # of one operand
        parts = [tuple(m for m in each if isinstance(m, Ref)) for each in zip(*(w for _, w in of_all), strict=True)]
        shapes = {graph.shape(m) for part in parts for m in part}
        if len(shapes) > 1 or any(len(s) > 2 for s in shapes):
            return None
        found.append(tuple(parts))
    return ExpertMlp(one.x, found[0], found[1][0], (found[2], found[3]), one.form, one.turned)


def _match_loop_turn(rows: Ref, value: Ref, patterns: RoutingPatterns) -> tuple[int, ExpertIds, Ref, ExpertMlp] | None:
    """(number, ids, weights, experts) of the values that a turn adds to ``rows``."""
    if (chosen := patterns.chosen(rows)) is None:
        return None
    ids, number, _ = chosen
    for y, factor in patterns.times(value):
        experts = _match_expert_mlp(y, patterns.products_of_expert(number), patterns)
        weights = patterns.weights_of_slots(factor, rows, chosen)
        source = patterns.of_rows(experts.x, rows) if experts is not None else None
        if experts is None or weights is None or source is None:
            continue
        experts.x = source
        return number, ids, weights, experts
    return None


_ROUTING_FORMS = (
    _match_dense_routing,
    _match_sorted_routing,
    _match_capacity_routing,
    _match_expert_loop,
    _match_gated_loop,
)

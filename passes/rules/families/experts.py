"""Mixture of experts: grouped GEMM, stacked expert weights. Rows, experts or both are sharded;
where one axis shards both, all-to-all dispatch and combine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from autoshard.aten import aten
from autoshard.layout import Grouped, Owned, Shard
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node, TensorType, tensor_arguments
from autoshard.passes.ir.program import Local, LocalCall, Offset, axes_argument
from autoshard.passes.rules.base import (
    Dims,
    Factors,
    Facts,
    Rule,
    Site,
    Space,
    Types,
    product_saves,
    unsharded_strategies,
)
from autoshard.runtime.operations.experts import experts_op
from autoshard.runtime.operations.grouped import grouped_mm
from autoshard.runtime.operations.stacked import stacked_op
from autoshard.torch_private.ops import OpOverload


def _grouped_mm_factors(node: Node, graph: Graph) -> Space:
    """Rows [s, k] · matrices [e, k, n], group ends [e] → [s, n]; other forms stay replicated."""
    shapes = graph.shapes(node.inputs)
    if [len(s) for s in shapes] != [2, 3, 1]:
        return unsharded_strategies(len(shapes), 1)
    (s, k), (e, _, n), _ = shapes
    even: frozenset[str] = frozenset()
    if node.op is aten._grouped_mm.default:  # its kernel needs rows of multiples of 16 bytes
        unit = 16 // graph.types[node.inputs[0]].dtype.itemsize
        k, n, even = k // unit, n // unit, frozenset("kn")
    return Factors(
        (("s", "k"), ("e", "k", "n"), (None,)),
        (("s", "n"),),
        {"s": s, "k": k, "n": n, "e": e},
        even,
        linear=((0,), (1,)),
    )


def _local_grouped_mm(site: Site) -> LocalCall:
    """Sharded rows: shift the group ends. Sharded matrices: only rows of this rank's groups."""
    node = site.node
    if len(site.inputs) != 3:
        return site.unchanged()
    x, weight, ends = node.args[:3]
    rows, groups = site.inputs[0].axes_of(0), site.inputs[1].axes_of(0)
    if rows:
        size = site.in_type(0).shape[0]
        moved = LocalCall(aten.sub.Tensor, (ends, Offset(size, rows)), {})
        ends = LocalCall(aten.clamp.default, (moved, 0, Local(size, rows)), {})
    if groups:
        return LocalCall("sharded_grouped_mm", (x, weight, ends, site.in_type(1).shape[0], axes_argument(groups)), {})
    return LocalCall(node.op, (x, weight, ends, *node.args[3:]), node.kwargs)


def _grouped_mm_flops(node: Node, graph: Graph) -> float:
    """One matrix per row."""
    return 2.0 * graph.shapes(node.inputs)[0][-1] * graph.types[node.outputs[0]].numel


def _grouped_mm_saves(node: Node, types: Types) -> str:
    x, weight, ends = tensor_arguments(node.op)[:3]
    return f"{ends}; {product_saves(x, weight)}"


def grouped_rule(op: OpOverload) -> Rule:
    """The rule of an op ``(rows, matrices, ends, …)``."""
    return Rule(
        op,
        _grouped_mm_factors,
        _local_grouped_mm,
        _grouped_mm_flops,
        "s k, e k n, _ -> s n",
        sized=False,
        facts=Facts(_grouped_mm_saves),
    )


GROUPED_MM_RULES: tuple[Rule, ...] = (grouped_rule(aten._grouped_mm.default), grouped_rule(grouped_mm._opoverload))

BY_NAME = {"transformers.grouped_mm_fallback.default": grouped_rule}
"""makers of rules for ops that exist only after another library is imported"""


STACKED = stacked_op._opoverload
EXPERT_OWNERS = "owners"
"""label: an axis distributes full experts over ranks, in order"""


def _stacked_strategies(node: Node, graph: Graph) -> Space:
    """All matrices sharded alike; if an expert has several, each of these segments of dim 0."""
    (first, *others), parts = graph.shapes(node.inputs)[0], node.argument("parts")
    rest = tuple(f"d{i}" for i in range(1, 1 + len(others)))
    rows = "rows" if parts == 1 else None
    many = len(node.inputs)
    factors = Factors(
        ((rows, *rest),) * many,
        ((None, rows, *rest),),
        {"rows": first, **dict(zip(rest, others, strict=True))},
        linear=(tuple(range(many)),),
    )
    found = factors.strategies(node, graph)
    if parts > 1:
        each = Strategy(
            f"rows/{parts}", (Shard(0),) * many, (Grouped(1, (1,) * parts),), first, even=True, divides=True
        )
        found = (*found, each)
    if all(graph.types[name].tables for name in node.inputs):
        found = (
            *found,
            Strategy(EXPERT_OWNERS, (Owned(),) * many, (Shard(0),), many // parts, divides=True, joins="none"),
        )
    return found


def _local_stacked(site: Site) -> LocalCall:
    kwargs: dict[str, Any] = {"parts": site.node.argument("parts")} if site.node.argument("parts") > 1 else {}
    if site.axes(EXPERT_OWNERS):
        kwargs["owned"] = site.local_sizes(site.inputs[0], site.in_type(0).shape)[0]
    return LocalCall("stacked", (tuple(site.node.args[0]),), kwargs)


STACKED_RULES: tuple[Rule, ...] = (
    Rule(
        STACKED,
        _stacked_strategies,
        _local_stacked,
        notation="all alike -> new dim unsharded",
        facts=Facts(saves="", joins=True),
        named="stacked",
    ),
)


DISPATCH = "exchange"
"""label: rows and experts sharded, all-to-all dispatch; a dim other than the first is appended"""


def _expert_strategies(node: Node, graph: Graph) -> Space:
    """Factors: rows, experts (summed), hidden features (summed), output columns. Linear in the
    routing weights and in the second matrices."""
    (*rows, _), _, _, first, _, *biases = graph.shapes(node.inputs)
    named = tuple(f"rows {d}" if d else "rows" for d in range(len(rows)))
    row: Dims = (*named, None)
    of_first: Dims = ("experts", "hidden", None)
    of_second: Dims = ("experts", "columns", "hidden")
    if node.argument("transposed"):
        of_first, of_second = (of_first[0], *of_first[:0:-1]), (of_second[0], *of_second[:0:-1])
    of_biases: tuple[Dims, ...] = (("experts", "hidden"), ("experts", "columns")) if biases else ()
    factors = Factors(
        (row, row, row, of_first, of_second, *of_biases),
        ((*named, "columns"),),
        {
            **dict(zip(named, rows, strict=True)),
            "experts": first[0],
            "hidden": _hidden_size(node, graph),
            "columns": graph.shape(node.outputs[0])[-1],
        },
        addends=frozenset({6} if biases else ()),
        linear=((2,), (4, 6) if biases else (4,)),
    )
    found = factors.strategies(node, graph)
    exchanges = tuple(
        _dispatch_strategy(d, n, int(first[0]), len(node.inputs))
        for d, n in enumerate(rows)
        if len(rows) == 1 or n != 1
    )
    if node.argument("interleaved"):  # a chunk of (gate, up) pairs has both
        pairs = (replace(s, label="pairs", even=True, alone=True) if s.label == "hidden" else s for s in found)
        return (*pairs, *exchanges)
    halves = tuple(_gated_halves(s) for s in found if s.label == "hidden" and node.argument("gated"))
    if biases and halves:  # biases of gate and up are not exchanged
        found = tuple(s for s in found if s.label != "hidden")
    return (*found, *exchanges, *halves)


def _gated_halves(hidden: Strategy) -> Strategy:
    """Each rank holds its chunk of gate and of up."""
    dims = {i: p.dim for i, p in enumerate(hidden.inputs) if i in (3, 5) and isinstance(p, Shard)}
    inputs = tuple(Grouped(dims[i]) if i in dims else p for i, p in enumerate(hidden.inputs))
    return replace(hidden, label="hidden/2", inputs=inputs, even=True)


def _hidden_size(node: Node, graph: Graph) -> int:
    """Hidden features between the two products."""
    return graph.shapes(node.inputs)[4][1 if node.argument("transposed") else 2]


def _dispatch_strategy(dim: int, rows: int, experts: int, operands: int) -> Strategy:
    """All-to-all dispatch. ``work``: with fewer experts than ranks some ranks are idle."""
    inputs = (Shard(dim),) * 3 + (Shard(0),) * (operands - 3)
    label, work = (f"{DISPATCH} {dim}" if dim else DISPATCH), ("experts", experts)
    return Strategy(label, inputs, (Shard(dim),), rows, divides=True, joins="none", work=work)


def is_dispatch(strategy: Strategy) -> bool:
    return strategy.label.partition(" ")[0] == DISPATCH


def _local_experts(site: Site) -> LocalCall:
    node = site.node
    x, ids, weights, first, second = node.args[:5]
    form = {name: node.argument(name) for name in ("activation", "gated", "transposed")}
    defaults = {"limit": None, "shift": 0.0, "interleaved": False}
    form |= {name: node.argument(name) for name, default in defaults.items() if node.argument(name) != default}
    more = {name: node.argument(name) for name in ("first_bias", "second_bias") if len(node.inputs) > 5}
    sharding: dict[str, Any] = {}
    if axes := site.inputs[3].axes_of(0):
        sharding |= {"count": site.in_type(3).shape[0], "expert_axes": axes_argument(axes)}
    if axes := tuple(a for a, s in zip(site.mesh.axes, site.choice, strict=True) if is_dispatch(s)):
        sharding["exchange_axes"] = axes_argument(axes)
    if node.argument("gated") and (axes := site.axes("hidden")):
        sharding |= {"hidden": _hidden_size(site.node, site.graph), "hidden_axes": axes_argument(axes)}
    if sharding:
        more["sharding"] = LocalCall("ExpertSharding", (), sharding)
    return LocalCall("experts", (x, ids, weights, first, second, LocalCall("ExpertForm", (), form)), more)


EXPERT_KERNELS = 20
"""two are grouped GEMMs; others sort, gather, activate, weigh and scatter rows"""


def _expert_flops(node: Node, graph: Graph) -> float:
    """Two products per row and chosen expert."""
    _, ids, _, first, second = (graph.types[name] for name in node.inputs[:5])
    return 2.0 * ids.numel * (math.prod(first.shape[1:]) + math.prod(second.shape[1:]))


def _expert_intermediates(node: Node, types: Types) -> tuple[TensorType, ...]:
    """Saved: sorted rows, tensors between the products, results, and row indices."""
    x, ids, _, first, second, *biases = (types[name] for name in node.inputs)
    wide = first.shape[2 if node.argument("transposed") else 1]
    hidden = second.shape[1 if node.argument("transposed") else 2]
    widths = [x.shape[-1], wide, *([hidden, hidden] if node.argument("gated") else [hidden])]
    rows = int(ids.numel)
    made = [TensorType((rows, n), x.dtype) for n in (*widths, types[node.outputs[0]].shape[-1])]
    made += [TensorType((rows, n), x.dtype) for n in (wide, made[-1].shape[1])] if biases else []
    return (*made, TensorType((2, rows), torch.int64))


EXPERT_RULES: tuple[Rule, ...] = (
    Rule(
        experts_op._opoverload,
        _expert_strategies,
        _local_experts,
        _expert_flops,
        "... _, ... k, ... k, experts hidden _, experts columns hidden -> ... columns",
        sends=True,
        facts=Facts(
            "x ids weights first second first_bias second_bias",
            _expert_intermediates,
            addend="weights",
            kernels=EXPERT_KERNELS,
        ),
        named="experts",
    ),
)


RULES: tuple[Rule, ...] = (*GROUPED_MM_RULES, *STACKED_RULES, *EXPERT_RULES)

"""Mixture of experts: sharded rows, sharded experts, or all-to-all dispatch and combine.

With rows and experts sharded along one axis, dispatch sends rows to the ranks of their experts.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from autoshard.layout import Grouped, Shard
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node, TensorType
from autoshard.passes.ir.program import Call, Internal, spell
from autoshard.passes.rules.base import Facts, Rule, Site, Types
from autoshard.passes.rules.factors import Dims, Factors, Space
from autoshard.passes.rules.families.splits import exchanged
from autoshard.runtime.operations.experts import exchanges_rows, experts_op

EXCHANGE = "exchange"
"""label: rows and experts sharded, all-to-all dispatch; a dim other than the first is appended"""


def _strategies(node: Node, graph: Graph) -> Space:
    """Factors: rows, experts (summed), hidden features (summed), output columns.

    Linear in the routing weights and in the second matrices.
    """
    (*rows, _), _, _, first, _, *biases = graph.shapes(node.inputs)
    named = tuple(_of_dim("rows", d) for d in range(len(rows)))
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
            "hidden": _hidden(node, graph),
            "columns": graph.shape(node.outputs[0])[-1],
        },
        addends=frozenset({6} if biases else ()),
        linear=((2,), (4, 6) if biases else (4,)),
    )
    found = factors.strategies(node, graph)
    exchanges = tuple(
        _exchange(d, n, int(first[0]), len(node.inputs)) for d, n in enumerate(rows) if len(rows) == 1 or n != 1
    )
    if node.argument("interleaved"):  # a chunk of (gate, up) pairs has both
        pairs = (replace(s, label="pairs", even=True, alone=True) if s.label == "hidden" else s for s in found)
        return (*pairs, *exchanges)
    halves = tuple(_halves(s) for s in found if s.label == "hidden" and node.argument("gated"))
    if biases and halves:  # biases of gate and up are not exchanged
        found = tuple(s for s in found if s.label != "hidden")
    return (*found, *exchanges, *halves)


def _halves(hidden: Strategy) -> Strategy:
    """Each rank holds its chunk of gate and of up."""
    dims = {i: p.dim for i, p in enumerate(hidden.inputs) if i in (3, 5) and isinstance(p, Shard)}
    inputs = tuple(Grouped(dims[i]) if i in dims else p for i, p in enumerate(hidden.inputs))
    return replace(hidden, label="hidden/2", inputs=inputs, even=True)


def _hidden(node: Node, graph: Graph) -> int:
    """Hidden features between the two products."""
    return graph.shapes(node.inputs)[4][1 if node.argument("transposed") else 2]


def _of_dim(label: str, dim: int) -> str:
    return f"{label} {dim}" if dim else label


def _exchange(dim: int, rows: int, experts: int, operands: int) -> Strategy:
    """All-to-all dispatch. ``work``: with fewer experts than ranks some ranks are idle."""
    inputs = (Shard(dim),) * 3 + (Shard(0),) * (operands - 3)
    label, work = _of_dim(EXCHANGE, dim), ("experts", experts)
    return Strategy(label, inputs, (Shard(dim),), rows, divides=True, joins="none", work=work)


def exchanges(strategy: Strategy) -> bool:
    """Whether the strategy uses all-to-all dispatch."""
    return strategy.label.partition(" ")[0] == EXCHANGE


def _exchange_axes(site: Site) -> tuple[str, ...]:
    return tuple(a for a, s in zip(site.mesh.axes, site.choice, strict=True) if exchanges(s))


def _local(site: Site) -> Call:
    node = site.node
    x, ids, weights, first, second = node.args[:5]
    form = {name: node.argument(name) for name in ("activation", "gated", "transposed")}
    if len(node.inputs) > 5:
        form |= {name: node.argument(name) for name in ("first_bias", "second_bias")}
    defaults = {"limit": None, "shift": 0.0, "interleaved": False}
    form |= {name: node.argument(name) for name, default in defaults.items() if node.argument(name) != default}
    if axes := site.inputs[3].axes_of(0):
        form |= {"count": site.in_type(3).shape[0], "expert_axes": spell(axes)}
    if axes := _exchange_axes(site):
        form["exchange_axes"] = spell(axes)
    if node.argument("gated") and (axes := site.axes("hidden")):
        form |= {"hidden": _hidden(site.node, site.graph), "hidden_axes": spell(axes)}
    return Call("experts", (x, ids, weights, first, second), form)


def _collectives(site: Site) -> tuple[Internal, ...]:
    """All-to-alls of row counts, rows, results and gradients, in expectation of even routing."""
    axes = _exchange_axes(site)
    ranks = site.mesh.size_of(axes)
    if ranks == 1:
        return _of_parts(site)
    local = [layout.max_local_shape(site.in_type(i).shape) for i, layout in enumerate(site.inputs)]
    elsewhere = tuple(a for a in site.inputs[3].axes_of(0) if a not in axes)
    rows = math.prod(local[1]) / site.mesh.size_of(elsewhere) * site.in_type(0).dtype.itemsize
    there, back = rows * local[0][-1], rows * site.outputs[0].max_local_shape(site.out_type().shape)[-1]
    found = [("forward", 8.0 * ranks * local[3][0], "numbers of rows")]
    found += [("forward", there, "rows to their experts"), ("forward", back, "results of experts")]
    if site.grad:
        found.append(("backward", back, "gradients of results of experts"))
    if site.in_type(0).grad:
        found.append(("backward", there, "gradients of rows"))
    return (*_of_parts(site), *(Internal("all_to_all", axes, size, phase, what) for phase, size, what in found))


def _of_parts(site: Site) -> tuple[Internal, ...]:
    """Exchanges for gate and up sharded as one dim: of weights, or of rows."""
    axes, first = site.axes("hidden"), site.in_type(3)
    if site.mesh.size_of(axes) == 1 or not site.node.argument("gated"):
        return ()
    hidden, dim = int(_hidden(site.node, site.graph)), 2 if site.node.argument("transposed") else 1
    local = site.inputs[3].max_local_shape(first.shape)
    weights = math.prod(int(n) for d, n in enumerate(local) if d != dim)
    rows = math.prod(map(int, site.inputs[1].max_local_shape(site.in_type(1).shape)))
    of_rows = exchanges_rows(rows, weights)
    row, grad = (rows, first.grad or site.in_type(0).grad) if of_rows else (weights, first.grad)
    ranks = tuple(site.mesh.size_of(a) for a in axes)
    return exchanged(axes, row * first.dtype.itemsize, 2 * hidden, (hidden, hidden), ranks, grad)


KERNELS = 20
"""two are grouped GEMMs; others sort, gather, activate, weigh and scatter rows"""


def _flops(node: Node, graph: Graph) -> float:
    """Two products per row and chosen expert."""
    _, ids, _, first, second = (graph.types[name] for name in node.inputs[:5])
    return 2.0 * ids.numel * (math.prod(first.shape[1:]) + math.prod(second.shape[1:]))


def _intermediates(node: Node, types: Types) -> tuple[TensorType, ...]:
    """Saved: sorted rows, tensors between the products, results, and row indices."""
    x, ids, _, first, second, *biases = (types[name] for name in node.inputs)
    wide = first.shape[2 if node.argument("transposed") else 1]
    hidden = second.shape[1 if node.argument("transposed") else 2]
    widths = [x.shape[-1], wide, *([hidden, hidden] if node.argument("gated") else [hidden])]
    rows = int(ids.numel)
    made = [TensorType((rows, n), x.dtype) for n in (*widths, types[node.outputs[0]].shape[-1])]
    made += [TensorType((rows, n), x.dtype) for n in (wide, made[-1].shape[1])] if biases else []
    return (*made, TensorType((2, rows), torch.int64))


RULES: tuple[Rule, ...] = (
    Rule(
        experts_op._opoverload,
        _strategies,
        _local,
        _flops,
        "... _, ... k, ... k, experts hidden _, experts columns hidden -> ... columns",
        _collectives,
        facts=Facts(
            "x ids weights first second first_bias second_bias",
            _intermediates,
            rounding="product",
            addend="weights",
            kernels=KERNELS,
        ),
        named="experts",
    ),
)

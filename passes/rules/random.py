"""Random ops. Every rank takes its part of one draw of global shape, so values do not depend on the layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from autoshard.layout import P, R, Shard
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node, TensorType
from autoshard.passes.ir.program import Call
from autoshard.passes.rules.base import Facts, Rule, Site, Types
from autoshard.passes.rules.factors import Factors, argument, input_shapes, numbered, output_shapes, sizes_of, whole
from autoshard.passes.rules.named import ops, spell, unchanged

aten = torch.ops.aten


def cuts(site: Site) -> dict[int, str | tuple[str, ...]]:
    """Tensor dim → the mesh axes that cut it, for the first result."""
    layout = site.outputs[0]
    dims = sorted({p.dim for p in layout.placements if isinstance(p, Shard)})
    return {d: spell(layout.axes_of(d)) for d in dims}


def _lengths(site: Site) -> tuple[Any, ...]:
    """The operand's global shape; a length that depends on the data is read from it at run time."""
    type_, x = site.in_type(0), site.node.args[0]
    return tuple(Call(aten.sym_size.int, (x, d), {}) if d in type_.unknown else n for d, n in enumerate(type_.shape))


def _order(site: Site) -> dict[str, Any]:
    """How the operand lies in memory on one device, where that is not as its dims are numbered; the micro-batches' dim."""
    found = {"order": site.node.order or None, "batch": site.node.batch}
    return {name: value for name, value in found.items() if value is not None}


def _same_shape(node: Node, graph: Graph) -> Factors:
    (shape,) = input_shapes(node, graph)
    dims = numbered(shape)
    return Factors((dims,), (dims,) * len(node.outputs), sizes_of(shape))


def _dropout(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """Linear: summands may be masked alike. The mask of native_dropout is not linear."""
    summands = (Strategy("P(0)", (P,), (P,)),) if node.output_slots in ((0,), ()) else ()
    return (*_same_shape(node, graph).strategies(node, graph), *summands)


def _local_dropout(site: Site) -> Call:
    node = site.node
    if not argument(node, "train"):
        return unchanged(site)
    return Call("dropout", (node.args[0], argument(node, "p"), _lengths(site), cuts(site)), _order(site))


def _native_dropout(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    return _same_shape(node, graph).strategies(node, graph)


def _local_native_dropout(site: Site) -> Call:
    node = site.node
    probability = 0.0 if argument(node, "train") is False else argument(node, "p")
    return Call("native_dropout", (node.args[0], probability, _lengths(site), cuts(site)), _order(site))


def _like(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """The operand gives the shape only; summands of it will do."""
    return (*_same_shape(node, graph).strategies(node, graph), Strategy("P(0)", (P,), (R,)))


def _local_like(site: Site) -> Call:
    node = site.node
    x, *rest = node.args
    return Call("draw_like", (_name(node), x, _lengths(site), cuts(site), *rest), {**node.kwargs, **_order(site)})


def _sized(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    (shape,) = output_shapes(node, graph)
    return Factors((), (numbered(shape),), sizes_of(shape)).strategies(node, graph)


def _local_draw(site: Site) -> Call:
    node = site.node
    dims: dict[str, Any] = {"dims": found} if (found := cuts(site)) else {}
    return Call("draw", (_name(node), *node.args), {**node.kwargs, **dims})


def _of_values(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """Draws that depend on the operand's values, in the order of its elements: whole."""
    return whole(len(node.inputs), len(node.outputs))


def _rrelu(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """In training it draws for the negative elements, in their order: whole."""
    if argument(node, "training"):
        return whole(len(node.inputs), len(node.outputs))
    shape = input_shapes(node, graph)[0]
    dims = numbered(shape)
    return Factors((dims, dims), (dims,) * len(node.outputs), sizes_of(shape)).strategies(node, graph)


def _local_rrelu(site: Site) -> Call:
    node = site.node
    if not argument(node, "training"):
        return unchanged(site)
    return Call("rrelu", (argument(node, "self"), argument(node, "lower"), argument(node, "upper")), {})


def _name(node: Node) -> str:
    return node.op._schema.name.removeprefix("aten::")


LIKE = (
    "rand_like.default randn_like.default randint_like.default randint_like.low_dtype bernoulli.p uniform.default "
    "exponential.default normal_functional.default geometric.default cauchy.default log_normal.default "
    "random.default random.to random.from"
)
SIZED = "rand.default randn.default randint.default randint.low randperm.default normal.float_float"
OF_VALUES = (
    "bernoulli.default multinomial.default normal.Tensor_float normal.Tensor_Tensor normal.float_Tensor "
    "poisson.default binomial.default"
)


def _drops(given: Mapping[str, Any]) -> bool:
    """Whether dropout draws: nothing or all is dropped without."""
    return bool(given["train"]) and given["p"] not in (0, 1)


def _noise(node: Node, types: Types) -> tuple[TensorType, ...]:
    """What dropout multiplies with."""
    return (replace(types[node.inputs[0]], grad=False),) if argument(node, "train") and argument(node, "p") else ()


def _mask(node: Node, types: Types) -> tuple[TensorType, ...]:
    return () if 1 in node.output_slots else (replace(types[node.inputs[0]], dtype=torch.bool, grad=False),)


DRAWN = Facts(saves="")

RULES: tuple[Rule, ...] = (
    Rule(
        aten.dropout.default,
        _dropout,
        _local_dropout,
        notation="... -> ...",
        facts=Facts("", _noise, draws=_drops),
    ),
    Rule(
        aten.native_dropout.default,
        _native_dropout,
        _local_native_dropout,
        notation="... -> ..., ...",
        facts=Facts("result1", _mask, draws=lambda given: given["train"] is not False),
    ),
    *(Rule(op, _like, _local_like, notation="... -> ...", facts=DRAWN) for op in ops(LIKE)),
    *(Rule(op, _sized, _local_draw, notation="-> any dim", facts=DRAWN) for op in ops(SIZED)),
    *(Rule(op, _of_values, _local_draw, notation="whole", facts=DRAWN) for op in ops(OF_VALUES)),
    Rule(
        aten.rrelu_with_noise_functional.default,
        _rrelu,
        _local_rrelu,
        notation="whole",
        facts=Facts("self noise", draws=lambda given: bool(given["training"])),
    ),
)

"""Random ops. Every rank takes its part of one draw of global shape, so values do not depend on the layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from autoshard.aten import aten
from autoshard.layout import I, Layout, Shard
from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType
from autoshard.passes.ir.program import Call, Internal, spell
from autoshard.passes.rules.base import NOTHING, Facts, Rule, Site, Types, rules
from autoshard.passes.rules.factors import Factors, Space, numbered, sizes_of, undivided
from autoshard.passes.rules.families.factory import factory_strategies, like_strategies


def cuts(site: Site) -> dict[int, str | tuple[str, ...]]:
    """Tensor dim → the mesh axes that cut it, for the first result."""
    return _cuts_of(site.outputs[0])


def _cuts_of(layout: Layout) -> dict[int, str | tuple[str, ...]]:
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


def _dropout(node: Node, graph: Graph) -> Factors:
    """Linear: summands may be masked alike. The mask of native_dropout is not linear."""
    (shape,) = graph.shapes(node.inputs)
    dims = numbered(shape)
    linear = ((0,),) if node.output_slots == (0,) else ()
    return Factors((dims,), (dims,) * len(node.outputs), sizes_of(shape), linear=linear)


def _local_dropout(site: Site) -> Call:
    node = site.node
    if not node.argument("train"):
        return site.unchanged()
    return Call("dropout", (node.args[0], node.argument("p"), _lengths(site), cuts(site)), _order(site))


def _local_native_dropout(site: Site) -> Call:
    node = site.node
    train = node.argument("train")
    how = {**_order(site), **({} if train is True else {"train": train})}
    return Call("native_dropout", (node.args[0], node.argument("p"), _lengths(site), cuts(site)), how)


def _local_like(site: Site) -> Call:
    node = site.node
    x, *rest = node.args
    return Call("draw_like", (_name(node), x, _lengths(site), cuts(site), *rest), {**node.kwargs, **_order(site)})


def _local_draw(site: Site) -> Call:
    node = site.node
    dims: dict[str, Any] = {"dims": found} if (found := cuts(site)) else {}
    batch = {} if node.batch is None else {"batch": node.batch}
    return Call("draw", (_name(node), *node.args), {**node.kwargs, **dims, **batch})


def _rrelu(node: Node, graph: Graph) -> Space:
    """In training it draws for the negative elements, in their order: whole."""
    if node.argument("training"):
        return undivided(node, graph)
    shape = graph.shapes(node.inputs)[0]
    dims = numbered(shape)
    return Factors((dims, dims), (dims,) * len(node.outputs), sizes_of(shape))


def _local_rrelu(site: Site) -> Call:
    node = site.node
    if not node.argument("training"):
        return site.unchanged()
    return Call("rrelu", (node.argument("self"), node.argument("lower"), node.argument("upper")), {})


def _multinomial(node: Node, graph: Graph) -> Space:
    """Where eager chooses by one draw for each element, rows and what is chosen from may be cut."""
    (shape,) = graph.shapes(node.inputs)
    count = node.argument("num_samples")
    if isinstance(count, Ref) or (node.argument("replacement") and count != 1):
        return undivided(node, graph)
    dims = numbered(shape)
    last = f"d{len(shape) - 1}"
    return Factors((dims,), ((*dims[:-1], None),), sizes_of(shape), reduced={last: I}, filled=frozenset({last}))


def _local_multinomial(site: Site) -> Call:
    found = _cuts_of(site.inputs[0])
    if not found and site.node.batch is None:
        return _local_draw(site)
    x, count = site.node.argument("self"), site.node.argument("num_samples")
    return Call("multinomial", (x, count, _lengths(site), found), _order(site))


def _candidates(site: Site) -> tuple[Internal, ...]:
    """What the ranks choose from where that is cut: a number and an index for each sample."""
    shape, local = site.in_type(0).shape, site.local_shape("self")
    axes, count = site.inputs[0].axes_of(len(shape) - 1), site.node.argument("num_samples")
    each = math.prod(local[:-1]) * (min(count, local[-1]) if axes else 1)
    values = site.gathered(axes, each * site.in_type(0).dtype.itemsize, "candidates", "I")
    return values + site.gathered(axes, each * torch.int64.itemsize, "their indices", "I")


def _of_values(node: Node, graph: Graph) -> Factors:
    """Of whole operands; any dim of the result may be cut."""
    (shape,) = graph.shapes(node.outputs)
    whole = tuple((None,) * len(s) for s in graph.shapes(node.inputs))
    return Factors(whole, (numbered(shape),), sizes_of(shape))


def _name(node: Node) -> str:
    return node.op._schema.name.removeprefix("aten::")


LIKE = (
    "rand_like.default randn_like.default randint_like.default randint_like.low_dtype bernoulli.p uniform.default "
    "exponential.default normal_functional.default geometric.default cauchy.default log_normal.default "
    "random.default random.to random.from"
)
SIZED = "rand.default randn.default randint.default randint.low randperm.default normal.float_float"
OF_VALUES = (
    "bernoulli.default normal.Tensor_float normal.Tensor_Tensor normal.float_Tensor poisson.default binomial.default"
)


def _drops(given: Mapping[str, Any]) -> bool:
    """Whether dropout draws: nothing or all is dropped without."""
    return bool(given["train"]) and given["p"] not in (0, 1)


def _noise(node: Node, types: Types) -> tuple[TensorType, ...]:
    """What dropout multiplies with."""
    return (replace(types[node.inputs[0]], grad=False),) if node.argument("train") and node.argument("p") else ()


def _mask(node: Node, types: Types) -> tuple[TensorType, ...]:
    return () if 1 in node.output_slots else (replace(types[node.inputs[0]], dtype=torch.bool, grad=False),)


RULES: tuple[Rule, ...] = (
    *rules(
        "dropout.default",
        _dropout,
        _local_dropout,
        "... -> ...",
        facts=Facts("", _noise, draws=_drops, redrawn=True, chains=True),
    ),
    *rules(
        "native_dropout.default",
        _dropout,
        _local_native_dropout,
        "... -> ..., ...",
        facts=Facts("result1", _mask, draws=lambda given: given["train"] is not False, chains=True),
    ),
    *rules(LIKE, like_strategies, _local_like, "... -> ...", facts=NOTHING),
    *rules(SIZED, factory_strategies, _local_draw, "-> any dim", facts=NOTHING),
    *rules(OF_VALUES, _of_values, _local_draw, "-> any dim", facts=NOTHING),
    *rules(
        "multinomial.default",
        _multinomial,
        _local_multinomial,
        "... n -> ... k",
        facts=NOTHING,
        collectives=_candidates,
        sized=False,
    ),
    *rules(
        "rrelu_with_noise_functional.default",
        _rrelu,
        _local_rrelu,
        "whole",
        facts=Facts("self noise", draws=lambda given: bool(given["training"])),
    ),
)

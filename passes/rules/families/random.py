"""Random ops: each rank takes its slice of one draw of global shape, whatever the layout."""

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
    """Tensor dim → mesh axes that shard it, of the first result."""
    return _cuts_of(site.outputs[0])


def _cuts_of(layout: Layout) -> dict[int, str | tuple[str, ...]]:
    dims = sorted({p.dim for p in layout.placements if isinstance(p, Shard)})
    return {d: spell(layout.axes_of(d)) for d in dims}


def _lengths(site: Site) -> tuple[Any, ...]:
    """The operand's global shape; unknown lengths are read at run time."""
    type_, x = site.in_type(0), site.node.args[0]
    return tuple(Call(aten.sym_size.int, (x, d), {}) if d in type_.unknown else n for d, n in enumerate(type_.shape))


def _order(site: Site) -> dict[str, Any]:
    """Options of a draw: memory order on one device if unusual, and the micro-batch dim."""
    found = {"order": site.node.order or None, "batch": site.node.batch}
    return {name: value for name, value in found.items() if value is not None}


def _dropout(node: Node, graph: Graph) -> Factors:
    """Linear in the operand, with one mask for all partial sums; native_dropout's mask is not."""
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
    """In training it draws for negative elements in order, so it runs on full tensors."""
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
    """Rows and choices may be sharded where eager makes one draw per element."""
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
    """All-gathers of candidates over sharded choices: value and index per sample."""
    shape, local = site.in_type(0).shape, site.local_shape("self")
    axes, count = site.inputs[0].axes_of(len(shape) - 1), site.node.argument("num_samples")
    each = math.prod(local[:-1]) * (min(count, local[-1]) if axes else 1)
    values = site.gathered(axes, each * site.in_type(0).dtype.itemsize, "candidates", "I")
    return values + site.gathered(axes, each * torch.int64.itemsize, "their indices", "I")


def _of_values(node: Node, graph: Graph) -> Factors:
    """Operands are replicated; any dim of the result may be sharded."""
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
    """Whether dropout draws; not if p is 0 or 1."""
    return bool(given["train"]) and given["p"] not in (0, 1)


def _noise(node: Node, types: Types) -> tuple[TensorType, ...]:
    """The multiplier of dropout."""
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

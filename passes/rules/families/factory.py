"""Tensor factories and random ops: any dim of the result can be sharded. Each rank takes its slice
of one random draw of global shape, so values do not depend on the layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from autoshard.aten import aten
from autoshard.layout import I, Layout, P, Placement, R, Shard
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType
from autoshard.passes.ir.program import LocalCall, axes_argument
from autoshard.passes.rules.base import (
    KEEPS_NOTHING,
    Factors,
    Facts,
    Rule,
    Site,
    Space,
    Types,
    broadcast,
    numbered_factors,
    rules,
    sizes_of,
    unsharded_only,
)


def factory_strategies(node: Node, graph: Graph) -> Factors:
    """Every dim of the result is a factor; a tensor fill value is a scalar and broadcasts."""
    (shape,) = graph.shapes(node.outputs)
    dims = numbered_factors(shape)
    inputs = tuple(broadcast(s, shape, dims) for s in graph.shapes(node.inputs))
    return Factors(inputs, (dims,), sizes_of(shape))


def _local_fill(site: Site) -> LocalCall:
    """The op with local sizes."""
    return site.unchanged(size=site.local_sizes(site.outputs[0], site.out_type().shape))


def _chunk_of_full(site: Site) -> LocalCall:
    """Values depend on positions: make the full tensor and keep this rank's chunk."""
    made = site.unchanged()
    for dim in range(len(site.out_type().shape)):
        axes = site.outputs[0].axes_of(dim)
        if axes:
            made = LocalCall("slice", (made, dim, axes_argument(axes)), {"of": "R"})
    return made


def like_strategies(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """``zeros_like(x)``: only x's shape is used, so x may also be Partial."""
    (shape,) = graph.shapes(node.outputs)
    dims = numbered_factors(shape)
    found = Factors((dims,), (dims,), sizes_of(shape)).strategies(node, graph)
    return (*found, Strategy("P(0)", (P,), (R,)))


def new_strategies(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """``x.new_zeros(size)``: only x's dtype and device are used, so any placement pair works."""
    (source,), (shape,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    held: list[tuple[Placement, int | None]] = [(I, None), (R, None), (P, None)]
    held += [(Shard(d), n) for d, n in enumerate(source) if int(n) > 1]
    found = []
    for p, limit in held:
        found.append(Strategy("I" if p == I else str(p), (p,), (I if p == I else R,), limit))
        for d, n in enumerate(shape):
            if int(n) > 1:
                found.append(Strategy(f"d{d} of {p}", (p,), (Shard(d),), n, divides=True, joins="results", most=limit))
    return tuple(found)


_SIZED_OPS = "zeros.default ones.default empty.memory_format full.default"
_NEW_OPS = "new_zeros.default new_ones.default new_empty.default new_full.default"
_POSITIONAL = (
    "arange.default arange.start arange.start_step linspace.default logspace.default eye.default eye.m "
    "tril_indices.default triu_indices.default range.default range.step"
)
_LIKE_OPS = "zeros_like.default ones_like.default full_like.default"

FILL_OPS = frozenset(
    getattr(aten, name).default for name in "new_zeros new_ones new_full zeros_like ones_like full_like".split()
)
"""ops whose values do not depend on operands, not even on the one that gives the shape"""


FACTORY_RULES: tuple[Rule, ...] = (
    *rules(_SIZED_OPS, factory_strategies, _local_fill, "-> any dim", facts=KEEPS_NOTHING),
    *rules(_NEW_OPS, new_strategies, _local_fill, "-> any dim", facts=KEEPS_NOTHING),
    *rules(_POSITIONAL, factory_strategies, _chunk_of_full, "-> any dim", facts=KEEPS_NOTHING),
    *rules(_LIKE_OPS, like_strategies, notation="... -> ...", facts=KEEPS_NOTHING),
    *rules("empty_like.default", like_strategies, notation="... -> ...", facts=KEEPS_NOTHING),
    *rules("scalar_tensor.default", factory_strategies, notation="->", facts=KEEPS_NOTHING),
)


def sharded_dim_axes(site: Site) -> dict[int, str | tuple[str, ...]]:
    """Tensor dim → mesh axes that shard it, of the first result."""
    return _layout_dim_axes(site.outputs[0])


def _layout_dim_axes(layout: Layout) -> dict[int, str | tuple[str, ...]]:
    dims = sorted({p.dim for p in layout.placements if isinstance(p, Shard)})
    return {d: axes_argument(layout.axes_of(d)) for d in dims}


def _global_shape(site: Site) -> tuple[Any, ...]:
    """The operand's global shape; unknown lengths are read at run time."""
    type_, x = site.in_type(0), site.node.args[0]
    return tuple(
        LocalCall(aten.sym_size.int, (x, d), {}) if d in type_.unknown else n for d, n in enumerate(type_.shape)
    )


def _draw_options(site: Site) -> dict[str, Any]:
    """Options of a draw: memory order on one device if unusual, and the micro-batch dim."""
    if not site.node.exact:
        return {"exact": False}
    found = {"order": site.node.order or None, "batch": site.node.batch}
    return {name: value for name, value in found.items() if value is not None}


def _dropout_factors(node: Node, graph: Graph) -> Factors:
    """Linear in the operand, with one mask for all partial sums; native_dropout's mask is not."""
    (shape,) = graph.shapes(node.inputs)
    dims = numbered_factors(shape)
    linear = ((0,),) if node.output_slots == (0,) else ()
    return Factors((dims,), (dims,) * len(node.outputs), sizes_of(shape), linear=linear)


def _local_dropout(site: Site) -> LocalCall:
    node = site.node
    if not node.argument("train"):
        return site.unchanged()
    return LocalCall(
        "dropout", (node.args[0], node.argument("p"), _global_shape(site), sharded_dim_axes(site)), _draw_options(site)
    )


def _local_native_dropout(site: Site) -> LocalCall:
    node = site.node
    train = node.argument("train")
    how = {**_draw_options(site), **({} if train is True else {"train": train})}
    return LocalCall(
        "native_dropout", (node.args[0], node.argument("p"), _global_shape(site), sharded_dim_axes(site)), how
    )


def _local_like(site: Site) -> LocalCall:
    node = site.node
    x, *rest = node.args
    return LocalCall(
        "draw_like",
        (_draw_name(node), x, _global_shape(site), sharded_dim_axes(site), *rest),
        {**node.kwargs, **_draw_options(site)},
    )


def _local_draw(site: Site) -> LocalCall:
    node = site.node
    dims: dict[str, Any] = {"dims": found} if (found := sharded_dim_axes(site)) else {}
    batch = {} if node.batch is None else {"batch": node.batch}
    return LocalCall("draw", (_draw_name(node), *node.args), {**node.kwargs, **dims, **batch})


def _rrelu(node: Node, graph: Graph) -> Space:
    """In training it draws for negative elements in order, so it runs on full tensors."""
    if node.argument("training"):
        return unsharded_only(node, graph)
    shape = graph.shapes(node.inputs)[0]
    dims = numbered_factors(shape)
    return Factors((dims, dims), (dims,) * len(node.outputs), sizes_of(shape))


def _local_rrelu(site: Site) -> LocalCall:
    node = site.node
    if not node.argument("training"):
        return site.unchanged()
    return LocalCall("rrelu", (node.argument("self"), node.argument("lower"), node.argument("upper")), {})


def _multinomial_space(node: Node, graph: Graph) -> Space:
    """Rows and choices may be sharded where eager makes one draw per element."""
    (shape,) = graph.shapes(node.inputs)
    count = node.argument("num_samples")
    if isinstance(count, Ref) or (node.argument("replacement") and count != 1):
        return unsharded_only(node, graph)
    dims = numbered_factors(shape)
    last = f"d{len(shape) - 1}"
    return Factors((dims,), ((*dims[:-1], None),), sizes_of(shape), reduced={last: I}, nonempty=frozenset({last}))


def _local_multinomial(site: Site) -> LocalCall:
    found = _layout_dim_axes(site.inputs[0])
    if not found and site.node.batch is None:
        return _local_draw(site)
    x, count = site.node.argument("self"), site.node.argument("num_samples")
    return LocalCall("multinomial", (x, count, _global_shape(site), found), _draw_options(site))


def _of_values(node: Node, graph: Graph) -> Factors:
    """Operands are replicated; any dim of the result may be sharded."""
    (shape,) = graph.shapes(node.outputs)
    whole = tuple((None,) * len(s) for s in graph.shapes(node.inputs))
    return Factors(whole, (numbered_factors(shape),), sizes_of(shape))


def _draw_name(node: Node) -> str:
    return node.op._schema.name.removeprefix("aten::")


LIKE_DRAWS = (
    "rand_like.default randn_like.default randint_like.default randint_like.low_dtype bernoulli.p uniform.default "
    "exponential.default normal_functional.default geometric.default cauchy.default log_normal.default "
    "random.default random.to random.from"
)
SIZED_DRAWS = "rand.default randn.default randint.default randint.low randperm.default normal.float_float"
OF_VALUES = (
    "bernoulli.default normal.Tensor_float normal.Tensor_Tensor normal.float_Tensor poisson.default binomial.default"
)


def _drops(given: Mapping[str, Any]) -> bool:
    """Whether dropout draws; not if p is 0 or 1."""
    return bool(given["train"]) and given["p"] not in (0, 1)


def _dropout_noise(node: Node, types: Types) -> tuple[TensorType, ...]:
    """The multiplier of dropout."""
    return (replace(types[node.inputs[0]], grad=False),) if node.argument("train") and node.argument("p") else ()


def _dropout_mask(node: Node, types: Types) -> tuple[TensorType, ...]:
    return () if 1 in node.output_slots else (replace(types[node.inputs[0]], dtype=torch.bool, grad=False),)


RANDOM_RULES: tuple[Rule, ...] = (
    *rules(
        "dropout.default",
        _dropout_factors,
        _local_dropout,
        "... -> ...",
        facts=Facts("", _dropout_noise, draws=_drops, redrawn=True, chains=True),
    ),
    *rules(
        "native_dropout.default",
        _dropout_factors,
        _local_native_dropout,
        "... -> ..., ...",
        facts=Facts("result1", _dropout_mask, draws=lambda given: given["train"] is not False, chains=True),
    ),
    *rules(LIKE_DRAWS, like_strategies, _local_like, "... -> ...", facts=KEEPS_NOTHING),
    *rules(SIZED_DRAWS, factory_strategies, _local_draw, "-> any dim", facts=KEEPS_NOTHING),
    *rules(OF_VALUES, _of_values, _local_draw, "-> any dim", facts=KEEPS_NOTHING),
    *rules(
        "multinomial.default",
        _multinomial_space,
        _local_multinomial,
        "... n -> ... k",
        facts=KEEPS_NOTHING,
        sends=True,
        sized=False,
    ),
    *rules(
        "rrelu_with_noise_functional.default",
        _rrelu,
        _local_rrelu,
        "unsharded",
        facts=Facts("self noise", draws=lambda given: bool(given["training"])),
    ),
)


RULES: tuple[Rule, ...] = (*FACTORY_RULES, *RANDOM_RULES)

"""Splits of a sharded dim: all results stay sharded, and ranks exchange halos.

So the segments of a fused projection (gate and up; query, key, value) stay sharded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from autoshard.aten import aten
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.program import Call, Internal, spell
from autoshard.passes.ir.sizes import Size
from autoshard.passes.rules.base import NOTHING, Facts, Rule, Site, rules
from autoshard.passes.rules.factors import Factors, numbered, positive, sizes_of
from autoshard.passes.rules.windows import both_ways
from autoshard.runtime.transport.window import Halo, Window, halo_of


def parts_of(size: int, lengths: Sequence[int], ranks: tuple[int, ...]) -> Iterator[Halo]:
    """Halo exchange per result of a split; ``ranks`` of the dim's axes, outer to inner."""
    for end, length in zip(itertools.accumulate(lengths), lengths, strict=True):
        yield halo_of(Window(padding=length - end), size, length, ranks)


def exchanged(
    axes: tuple[str, ...], row: float, size: int, lengths: Sequence[int], ranks: tuple[int, ...], grad: bool
) -> tuple[Internal, ...]:
    """Collectives of a split; ``row``: bytes per position of the dim on a rank."""
    parts = enumerate(parts_of(size, lengths, ranks))
    found = (
        both_ways(axes, row, halo, grad, f"halo of part {i}", f"gradient of the halo of part {i}") for i, halo in parts
    )
    return tuple(itertools.chain.from_iterable(found))


def _split(node: Node, graph: Graph) -> Factors:
    """The dim may be sharded if each rank gets a chunk of every result."""
    (shape,) = graph.shapes(node.inputs)
    dim = positive(node.argument("dim"), len(shape))
    lengths = lengths_of(node, shape[dim])
    fixed = not any(isinstance(n, Size) for n in (shape[dim], *lengths))
    dims = numbered(shape, () if fixed else (dim,))
    sizes = sizes_of(shape) | {f"d{dim}": min(lengths, default=0)}
    return Factors((dims,), (dims,) * len(node.outputs), sizes, linear=((0,),))


def lengths_of(node: Node, size: int) -> list[int]:
    """Lengths of all results of a split."""
    if (given := node.argument("split_sizes", None)) is not None:
        return list(given)
    step = node.argument("split_size", None)
    if isinstance(step, list | tuple):
        return list(step)
    step = -(-size // node.argument("chunks")) if step is None else step
    return [min(step, size - start) for start in range(0, size, step)] if step else [size]


def _local(site: Site) -> Call:
    dim, axes = site.cut_dim
    if (ranks := site.mesh.size_of(tuple(site.inputs[0].grouped))) > 1:
        return _of_parts(site, dim, ranks)
    if site.mesh.size_of(axes) == 1:
        return site.unchanged()
    lengths = lengths_of(site.node, site.in_type(0).shape[dim])
    return Call("split", (site.node.args[0], dim, lengths, spell(axes)), {})


def _of_parts(site: Site, dim: int, ranks: int) -> Call:
    """A local split of this rank's chunks of all segments."""
    lengths = [n // ranks for n in lengths_of(site.node, site.in_type(0).shape[dim])]
    return Call(aten.split.sizes, (site.node.args[0], lengths, dim), {})


def _collectives(site: Site) -> tuple[Internal, ...]:
    dim, axes = site.cut_dim
    if site.mesh.size_of(axes) == 1:
        return ()
    type_ = site.in_type(0)
    local = site.inputs[0].max_local_shape(type_.shape)
    row = math.prod(n for d, n in enumerate(local) if d != dim) * type_.dtype.itemsize
    ranks = tuple(site.mesh.size_of(a) for a in axes)
    return exchanged(axes, row, type_.shape[dim], lengths_of(site.node, type_.shape[dim]), ranks, type_.grad)


VIEW = Facts(saves="", view=True)

RULES: tuple[Rule, ...] = (
    *rules(
        "split.Tensor split.sizes split_with_sizes.default split_with_sizes_copy.default chunk.default",
        _split,
        _local,
        "... d ... -> ... d ..., ...",
        _collectives,
        facts=NOTHING,
    ),
    *rules(
        "unsafe_chunk.default unsafe_split.Tensor unsafe_split_with_sizes.default",
        _split,
        _local,
        "…",
        _collectives,
        facts=VIEW,
    ),
)

"""Attention masks as functions of positions (causal, sliding window, ALiBi), and shared key heads.

Models build masks as tensors [queries, keys], often from ``arange``, and combine them with masks
that depend on data, such as padding. Position masks become a band; data-dependent masks stay.
Repeated key and value heads (grouped-query attention) become shared ones (``enable_gqa``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from autoshard.aten import aten
from autoshard.passes.capture.translate.canonical import remove_dead
from autoshard.passes.capture.translate.documents import documents_of
from autoshard.passes.capture.translate.positions import Known, Linear, Positions, Stripes
from autoshard.passes.capture.translate.slopes import Hidden, Sloped, added, sloped
from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType
from autoshard.passes.ir.sizes import Size
from autoshard.runtime.attention.banded import banded_op
from autoshard.runtime.attention.order import ALL, CAUSAL, Band

ATTENTION = aten.scaled_dot_product_attention.default
BANDED = banded_op._opoverload
_BOTH = {aten.bitwise_and.Tensor, aten.__and__.Tensor, aten.logical_and.default}
HIDDEN = -1e9
"""summands up to this value hide a key; so does the least value of a dtype such as float16"""


def by_position(graph: Graph) -> Graph:
    """``graph`` whose attention has bands of visible keys, and mask tensors only for the rest."""
    positions, nodes, types = Positions(graph), list[Node](), dict(graph.types)
    for node in graph.nodes:
        made = [node]
        if node.op in (ATTENTION, BANDED):
            made = [_sharing(node, graph)]
            if node.argument("attn_mask") is not None and not node.argument("is_causal", False):
                made = _changed(made[0], graph, positions)
        for before in made[:-1]:
            (name,) = before.outputs
            types[name] = TensorType(tuple(made[0].args[1]), graph.types[made[0].inputs[0]].dtype)
        nodes += made
    found = tuple(nodes)
    return graph if found == graph.nodes else remove_dead(replace(graph, nodes=found, types=types))


def _sharing(node: Node, graph: Graph) -> Node:
    """``node`` with the key and value heads before they were repeated: grouped-query attention."""
    key, value = (_repeated(node.argument(name), graph) for name in ("key", "value"))
    if key is None or value is None or node.argument("enable_gqa") or graph.shape(key)[:-1] != graph.shape(value)[:-1]:
        return node
    args, kwargs = node.with_arguments(key=key, value=value, enable_gqa=True)
    return replace(node, args=args, kwargs=kwargs)


def _repeated(heads: Ref, graph: Graph) -> Ref | None:
    """[b, g, t, d] that was repeated to ``heads`` [b, g · n, t, d]: unsqueeze, expand, reshape."""
    chain = [heads]
    for op in (aten.reshape.default, aten.expand.default, aten.unsqueeze.default):
        producer = graph.producers.get(chain[-1].name)
        if producer is not None and producer.op is aten.clone.default:
            producer = graph.producers.get(producer.inputs[0])
        if producer is None or producer.op is not op:
            return None
        chain.append(producer.args[0])
    after, wide, narrow, source = (graph.shape(x) for x in chain)
    if len(source) != 4 or narrow != (*source[:2], 1, *source[2:]) or isinstance(after[1], Size):
        return None
    n = wide[2]
    plain = wide == (*source[:2], n, *source[2:]) and after == (source[0], source[1] * n, *source[2:])
    return chain[-1] if plain else None


def _changed(node: Node, graph: Graph, positions: Positions) -> list[Node]:
    """The attention with a band for the position part of its mask, maybe behind document ids."""
    mask = node.argument("attn_mask")
    lengths = graph.shape(node.inputs[0])[-2], graph.shape(node.inputs[1])[-2]
    if (biased := _by_distance(mask, node, lengths, graph, positions)) is not None:
        return biased
    bands, rest = list[Band](), list[Ref]()
    for part in _parts(mask, graph):
        band = band_of_mask(part, lengths, graph, positions)
        bands.append(ALL if band is None else band)
        if band is None:
            rest.append(part)
    documents = None
    if len(rest) == 1 and (packed := _packed(rest[0], node, graph, positions)) is not None:
        documents, band = packed
        bands.append(band)
    band = within(bands)
    if rest and documents is None and (band == ALL or graph.types[mask.name].grad):
        return [node]
    left = None if not rest else rest[0] if len(rest) == 1 else mask
    if left is None and band in (ALL, CAUSAL) and node.op is ATTENTION:
        args, kwargs = node.with_arguments(attn_mask=None, is_causal=band == CAUSAL)
        return [replace(node, args=args, kwargs=_without_defaults(node, kwargs))]
    (query, *_), (result,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    if query[:-2] != result[:-2]:
        return [node]
    numbers = _numbered(node, documents, graph) if documents is not None else []
    left = Ref(numbers[0].outputs[0]) if numbers else left
    return [*numbers, _banded(node, left, band)]


def _banded(node: Node, mask: Ref | None, band: Band, **form: Any) -> Node:
    """``node`` as banded attention; ``form``: further keyword arguments, such as ``sloped``."""
    given = {
        "before": band.before,
        "after": band.after,
        "scale": node.argument("scale"),
        "enable_gqa": node.argument("enable_gqa") or None,
        **{name: node.argument(name, None) for name in ("sinks", "soft_cap")},
        "dropout_p": node.argument("dropout_p", 0.0) or None,
        **form,
    }
    kwargs = {name: value for name, value in given.items() if value is not None}
    return replace(node, op=BANDED, args=(*node.args[:3], mask), kwargs=kwargs)


def _by_distance(
    mask: Ref, node: Node, lengths: tuple[int, int], graph: Graph, positions: Positions
) -> list[Node] | None:
    """Nodes of an ALiBi attention: slopes [1, h, 1, 1], banded attention; None: another mask."""
    (query, *_), (result,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    dtype = graph.types[mask.name].dtype
    if not dtype.is_floating_point or len(query) != 4 or query[:-2] != result[:-2]:
        return None
    bands, slopes = list[Band | None](), list[Sloped]()
    for part in added(mask, graph, positions):
        if isinstance(part, Hidden):
            bands.append(hidden_band(part, lengths, dtype, positions))
        elif (found := sloped(part, graph, positions)) is not None:
            slopes.append(found)
        else:
            bands.append(band_of_mask(part, lengths, graph, positions))
    known = [band for band in bands if band is not None]
    if len(slopes) != 1 or len(known) < len(bands):
        return None
    (found,), band = slopes, within(known)
    heads = query[1]
    if (found.causal and (band.after is None or band.after > 0)) or graph.types[found.slopes.name].numel != heads:
        return None
    names = f"{node.name}_slopes", f"{node.name}_steps"
    shaped = replace(
        node,
        name=names[0],
        op=aten.reshape.default,
        args=(found.slopes, [1, heads, 1, 1]),
        kwargs={},
        outputs=names[:1],
    )
    scaled = replace(shaped, name=names[1], op=aten.mul.Tensor, args=(Ref(names[0]), found.step), outputs=names[1:])
    made = [shaped] if found.step == 1 else [shaped, scaled]
    return [*made, _banded(node, Ref(made[-1].name), band, sloped=True)]


def hidden_band(part: Hidden, lengths: tuple[int, int], dtype: torch.dtype, positions: Positions) -> Band | None:
    """The band of keys that a masked fill leaves visible; None if it depends on data."""
    known = positions(part.condition)
    if known is None or _shows(part.value, dtype) is not False:  # the fill replaces a bias, hides nothing
        return None

    def values(of: Any) -> float:
        return 0.0 if bool(of) == part.shows else part.value

    if isinstance(known, Linear):
        return _band_of(known._replace(start=values(known.start)), lengths, dtype) if known.is_constant else None
    return _band_of(known._replace(values=tuple(map(values, known.values))), lengths, dtype)


def _packed(part: Ref, node: Node, graph: Graph, positions: Positions) -> tuple[Ref, Band] | None:
    """(document ids [b, t] or [t], band) that ``part`` of the mask of [b, h, t, e] consists of."""
    query, inside = graph.shape(node.inputs[0]), part
    producer = graph.producers.get(inside.name)
    while producer is not None and producer.op is aten.unsqueeze.default:
        inside = producer.args[0]
        producer = graph.producers.get(inside.name)
    bands, found = list[Band](), list[Ref]()
    for one in _parts(inside, graph):
        band = band_of_mask(one, (query[-2], graph.shape(node.inputs[1])[-2]), graph, positions)
        documents = documents_of(one, graph) if band is None else None
        if band is None and documents is None:
            return None
        bands += [] if band is None else [band]
        found += [] if documents is None else [documents]
    *lead, rows, columns = graph.shape(node.argument("attn_mask"))
    if len(found) != 1 or len(query) != 4 or (rows, columns) != graph.shape(inside)[-2:]:
        return None
    *batch, _ = graph.shape(found[0])
    of_batch = tuple(lead) == (*batch, 1) if batch else all(n == 1 for n in lead)
    return (found[0], within(bands)) if of_batch else None


def _numbered(node: Node, documents: Ref, graph: Graph) -> list[Node]:
    """The node that reshapes document ids [b, t] or [t] to [b, 1, 1, t]."""
    *batch, keys = graph.shape(documents)
    name = f"{node.name}_documents"
    shape = [*(batch or [1]), 1, 1, keys]
    return [replace(node, name=name, op=aten.reshape.default, args=(documents, shape), kwargs={}, outputs=(name,))]


def _without_defaults(node: Node, kwargs: dict[str, Any]) -> dict[str, Any]:
    defaults = {a.name: a.default_value for a in node.op._schema.arguments}
    return {name: value for name, value in kwargs.items() if value != defaults[name]}


def _parts(mask: Ref, graph: Graph) -> Iterator[Ref]:
    """The conjuncts of a boolean mask."""
    producer = graph.producers.get(mask.name)
    if producer is None or producer.op not in _BOTH or graph.types[mask.name].dtype != torch.bool:
        yield mask
        return
    for operand in producer.args:
        yield from _parts(operand, graph)


def band_of_mask(part: Ref, lengths: tuple[int, int], graph: Graph, positions: Positions) -> Band | None:
    """The band of keys around a query that a mask shows; None if it is no band."""
    return _band_of(positions(part), lengths, graph.types[part.name].dtype)


def _band_of(known: Known | None, lengths: tuple[int, int], dtype: torch.dtype) -> Band | None:
    """The band that ``known`` shows; see :func:`band_of_mask`."""
    if isinstance(known, Linear) and known.is_constant:
        return ALL if _shows(known.start, dtype) else None
    if not isinstance(known, Stripes) or (known.row, known.column) != (known.rank - 2, known.rank - 1):
        return None
    shown = [_shows(value, dtype) for value in known.values]
    if None in shown or shown.count(True) == 0:
        return None
    first, last = shown.index(True), len(shown) - 1 - shown[::-1].index(True)
    if not all(shown[first : last + 1]):
        return None
    band = Band(
        None if first == 0 else -known.ends[first - 1], None if last == len(known.ends) else known.ends[last] - 1
    )
    return band if _is_certain(known, band, lengths, dtype) else None


def _shows(value: Any, dtype: torch.dtype) -> bool | None:
    """Whether a mask value shows a key, or hides it; None: it is a bias."""
    if dtype == torch.bool:
        return bool(value)
    if value == 0:
        return True
    return False if value <= max(HIDDEN, torch.finfo(dtype).min) else None


def _is_certain(known: Stripes, band: Band, lengths: tuple[int, int], dtype: torch.dtype) -> bool:
    """Whether hidden keys have weight 0: with finite summands only if each query sees some key."""
    if dtype == torch.bool or all(v == 0 or v == -torch.inf for v in known.values):
        return True
    queries, keys = lengths
    if isinstance(queries, Size) or isinstance(keys, Size):
        return band == CAUSAL and str(queries) == str(keys)
    return (band.after is None or band.after >= 0) and (band.before is None or queries - 1 - band.before < keys)


def within(bands: list[Band]) -> Band:
    """The intersection of bands."""
    before = [b.before for b in bands if b.before is not None]
    after = [b.after for b in bands if b.after is not None]
    return Band(min(before, default=None), min(after, default=None))

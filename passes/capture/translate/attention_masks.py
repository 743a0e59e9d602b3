"""Attention masks as functions of positions: causal, sliding window, ALiBi, packed documents.

Models build masks as tensors [queries, keys], often out of ``arange``, and combine them with
masks that depend on the data, such as padding. A mask that is a function of positions becomes a
band (causal or sliding window) of ``banded`` attention, and no mask tensor is needed. Linear
biases (ALiBi) become slopes, document masks become document ids. A data-dependent rest stays a
tensor. Key and value heads that were repeated for grouped-query attention are shared again
(``enable_gqa``)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from autoshard.aten import aten
from autoshard.passes.capture.translate.canonicalize import remove_dead
from autoshard.passes.capture.translate.positions import DiagonalBands, IndexFunction, LinearIndex, PositionAnalysis
from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType
from autoshard.passes.ir.sizes import Size
from autoshard.runtime.attention.masked_attention import banded_op
from autoshard.runtime.attention.ring_geometry import ALL_KEYS, CAUSAL, Band

_ORDER_PRESERVING_VIEWS = frozenset(
    {aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.reshape.default, aten.expand.default}
)


def document_ids_of(mask: Ref, graph: Graph) -> Ref | None:
    """Integer ids [b, t] or [t] if ``mask`` [b, 1, t, t], [b, t, t] or [t, t] is ids == idsᵀ."""
    compares, shape = graph.producers.get(mask.name), graph.shape(mask)
    while compares is not None and compares.op is aten.unsqueeze.default:
        mask = compares.args[0]
        compares = graph.producers.get(mask.name)
    if compares is None or compares.op is not aten.eq.Tensor or len(shape) < 2 or shape[-1] != shape[-2]:
        return None
    inner, keys = graph.shape(mask), shape[-1]
    if inner[-2:] != shape[-2:]:
        return None
    found = set[str]()
    for operand in compares.args:
        if not isinstance(operand, Ref) or graph.types[operand.name].dtype.is_floating_point:
            return None
        found.add(_elements_source(operand, graph).name)
    if len(found) != 1:
        return None
    (name,) = found
    of = graph.shape(name)
    forms = {_orientation(operand, graph, of) for operand in compares.args}
    fits = shape in ((*of[:-1], 1, keys, keys), (*of[:-1], keys, keys))
    return Ref(name) if of[-1:] == (keys,) and len(of) in (1, 2) and forms == {"rows", "columns"} and fits else None


def _elements_source(x: Ref, graph: Graph) -> Ref:
    """The source of ``x`` before views that keep all elements in order."""
    producer = graph.producers.get(x.name)
    while producer is not None and producer.op in _ORDER_PRESERVING_VIEWS:
        before = producer.args[0]
        if graph.types[before.name].numel != graph.types[x.name].numel or len(graph.shape(before)) < 1:
            break
        x, producer = before, graph.producers.get(before.name)
    return x


def _orientation(x: Ref, graph: Graph, of: tuple[int, ...]) -> str:
    """For ``of`` [b, t]: "rows" if ``x`` is [b, t, 1], "columns" if [b, 1, t], else ""."""
    *batch, first, last = (1, *graph.shape(x))
    batch = [n for n in batch if n != 1]
    whole = [n for n in of[:-1] if n != 1]
    if batch != whole:
        return ""
    return "rows" if (first, last) == (of[-1], 1) else "columns" if (first, last) == (1, of[-1]) else ""


_BIAS_VIEWS = frozenset(
    {aten.unsqueeze.default, aten.squeeze.dim, aten.reshape.default, aten.expand.default, aten.clone.default,
     aten._to_copy.default}
)  # fmt: skip
_MASKED_FILLS = {
    aten.masked_fill.Scalar: (0, 1, False),
    aten.where.ScalarOther: (1, 0, True),
    aten.where.self: (1, 0, True),
}
"""op → (index of the kept value, of the condition, whether true means kept); the fill is third"""


class MaskedFill(NamedTuple):
    """A masked fill of an additive mask: ``value`` where ``condition`` is not ``shows``."""

    condition: Ref
    shows: bool
    value: float


class AlibiBias(NamedTuple):
    """The bias slopes · step · (key position), up to a term per query."""

    slopes: Ref
    step: float
    causal: bool
    """whether it holds only for keys up to the query"""


def mask_summands(mask: Ref, graph: Graph, positions: PositionAnalysis) -> Iterator[Ref | MaskedFill]:
    """The summands of an additive (floating point) mask, masked fills included."""
    node = graph.producers.get(mask.name)
    if node is not None and node.op is aten.add.Tensor and len(node.inputs) == 2 and not node.kwargs:
        for operand in node.args:
            yield from mask_summands(operand, graph, positions)
        return
    if node is not None and (found := masked_fill_of(node, positions)) is not None:
        kept, hidden = found
        yield hidden
        yield from mask_summands(kept, graph, positions)
        return
    if node is not None and node.op in _BIAS_VIEWS and positions(mask) is None:
        plain = graph.types[node.args[0].name].dtype.is_floating_point
        if plain and _keeps_positions(node, graph) and graph.shape(node.args[0])[-2:] == graph.shape(mask)[-2:]:
            yield from mask_summands(node.args[0], graph, positions)
            return
    yield mask


def masked_fill_of(node: Node, positions: PositionAnalysis) -> tuple[Ref, MaskedFill] | None:
    """(kept value, masked fill) of ``node``, if it fills a constant number."""
    if node.op not in _MASKED_FILLS:
        return None
    kept, condition, shows = _MASKED_FILLS[node.op]
    number = positions(node.args[2])
    if not isinstance(number, LinearIndex) or not number.is_constant or not isinstance(node.args[kept], Ref):
        return None
    return node.args[kept], MaskedFill(node.args[condition], shows, float(number.start))


def alibi_bias_of(value: Ref, graph: Graph, positions: PositionAnalysis) -> AlibiBias | None:
    """``value`` [..., keys] as an ALiBi bias, else None."""
    keys = graph.shape(value)[-1:]
    found = _slope_product(value, keys[0], graph, positions) if keys else None
    return None if found is None or found[0] is None or not found[1] else AlibiBias(found[0], found[1], found[2])


SlopeProduct = tuple[Ref | None, float, bool]


def _slope_product(value: Ref, keys: int, graph: Graph, positions: PositionAnalysis) -> SlopeProduct | None:
    """(slopes or None, step from key to key, whether only for keys up to the query)."""
    known, node = positions(value), graph.producers.get(value.name)
    if isinstance(known, LinearIndex):
        return None, float(known.steps[-1]), False
    if node is None or graph.shape(value)[-1:] != (keys,):
        return None
    if node.op in _BIAS_VIEWS:
        inner = _slope_product(node.args[0], keys, graph, positions)
        exact = inner is None or inner[0] is None or (_keeps_positions(node, graph) and not _is_upcast(node, graph))
        return inner if exact else None
    if node.op is aten.neg.default:
        inner = _slope_product(node.args[0], keys, graph, positions)
        return inner and (inner[0], -inner[1], inner[2])
    if node.op is aten.slice.Tensor:
        before, after = graph.shape(node.args[0]), graph.shape(value)
        if before[:-1] != after[:-1] or node.argument("step") != 1:
            return None
        inner = _slope_product(node.args[0], before[-1], graph, positions)
        return None if inner is None or inner[2] else inner
    if node.op is aten.abs.default:
        return _abs_distance(positions(node.args[0]))
    if node.op is not aten.mul.Tensor:
        return None
    for one, other in (node.args, node.args[::-1]):
        inner = _slope_product(one, keys, graph, positions) if isinstance(one, Ref) else None
        if inner is None:
            continue
        if not isinstance(other, Ref):
            return inner[0], inner[1] * other, inner[2]
        if inner[0] is None and _has_value_per_head(other, graph):
            return other, inner[1], inner[2]
    return None


def _keeps_positions(node: Node, graph: Graph) -> bool:
    """Whether a view keeps heads, rows and keys in place, and no float was narrower before."""
    narrow, wide = (graph.types[x].dtype for x in (node.inputs[0], node.outputs[0]))
    if narrow.is_floating_point and wide.is_floating_point and torch.finfo(narrow).eps > torch.finfo(wide).eps:
        return False
    before, after = ((1, 1, *graph.shape(x))[-3:] for x in (node.inputs[0], node.outputs[0]))
    if node.op is aten.expand.default:
        before = tuple(new if old == 1 else old for old, new in zip(before, after, strict=True))
    return before == after and graph.types[node.outputs[0]].dtype.is_floating_point


def _is_upcast(node: Node, graph: Graph) -> bool:
    """Whether a cast widens, so that the product was rounded to the narrower type."""
    before, after = (graph.types[name].dtype for name in (node.inputs[0], node.outputs[0]))
    return before.itemsize < after.itemsize


def _has_value_per_head(slopes: Ref, graph: Graph) -> bool:
    """Whether it is [.., h, 1, 1], one number per head, without a gradient."""
    shape, type_ = graph.shape(slopes), graph.types[slopes.name]
    plain = type_.dtype.is_floating_point and not type_.grad and not type_.unknown
    return plain and len(shape) > 2 and shape[-2:] == (1, 1) and math.prod(shape) == shape[-3]


def _abs_distance(known: Any) -> SlopeProduct | None:
    """The product of |row - column|, which falls by one from key to key up to the row."""
    if not isinstance(known, LinearIndex) or known.start or len(known.steps) < 2 or any(known.steps[:-2]):
        return None
    row, column = known.steps[-2:]
    return (None, -abs(float(column)), True) if row == -column != 0 else None


SDPA = aten.scaled_dot_product_attention.default
BANDED_ATTENTION = banded_op._opoverload
_AND_OPS = {aten.bitwise_and.Tensor, aten.__and__.Tensor, aten.logical_and.default}
HIDDEN_SCORE = -1e9
"""summands up to this value hide a key; so does the least value of a dtype such as float16"""


def simplify_masks(graph: Graph) -> Graph:
    """``graph`` whose attention has bands of visible keys, and mask tensors only for the rest."""
    positions, nodes, types = PositionAnalysis(graph), list[Node](), dict(graph.types)
    for node in graph.nodes:
        made = [node]
        if node.op in (SDPA, BANDED_ATTENTION):
            made = [_with_shared_heads(node, graph)]
            if node.argument("attn_mask") is not None and not node.argument("is_causal", False):
                made = _rewrite_mask(made[0], graph, positions)
        for before in made[:-1]:
            (name,) = before.outputs
            types[name] = TensorType(tuple(made[0].args[1]), graph.types[made[0].inputs[0]].dtype)
        nodes += made
    found = tuple(nodes)
    return graph if found == graph.nodes else remove_dead(replace(graph, nodes=found, types=types))


def _with_shared_heads(node: Node, graph: Graph) -> Node:
    """``node`` with the key and value heads before they were repeated: grouped-query attention."""
    key, value = (_unrepeated_heads(node.argument(name), graph) for name in ("key", "value"))
    if key is None or value is None or node.argument("enable_gqa") or graph.shape(key)[:-1] != graph.shape(value)[:-1]:
        return node
    args, kwargs = node.with_arguments(key=key, value=value, enable_gqa=True)
    return replace(node, args=args, kwargs=kwargs)


def _unrepeated_heads(heads: Ref, graph: Graph) -> Ref | None:
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


def _rewrite_mask(node: Node, graph: Graph, positions: PositionAnalysis) -> list[Node]:
    """The attention with a band for the position part of its mask, maybe behind document ids."""
    mask = node.argument("attn_mask")
    lengths = graph.shape(node.inputs[0])[-2], graph.shape(node.inputs[1])[-2]
    if (biased := _as_alibi(mask, node, lengths, graph, positions)) is not None:
        return biased
    bands, rest = list[Band](), list[Ref]()
    for part in _conjuncts(mask, graph):
        band = band_of_mask(part, lengths, graph, positions)
        bands.append(ALL_KEYS if band is None else band)
        if band is None:
            rest.append(part)
    documents = None
    if len(rest) == 1 and (packed := _packed_documents(rest[0], node, graph, positions)) is not None:
        documents, band = packed
        bands.append(band)
    band = intersect_bands(bands)
    if rest and documents is None and (band == ALL_KEYS or graph.types[mask.name].grad):
        return [node]
    left = None if not rest else rest[0] if len(rest) == 1 else mask
    if left is None and band in (ALL_KEYS, CAUSAL) and node.op is SDPA:
        args, kwargs = node.with_arguments(attn_mask=None, is_causal=band == CAUSAL)
        return [replace(node, args=args, kwargs=_without_defaults(node, kwargs))]
    (query, *_), (result,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    if query[:-2] != result[:-2]:
        return [node]
    numbers = _document_ids_node(node, documents, graph) if documents is not None else []
    left = Ref(numbers[0].outputs[0]) if numbers else left
    return [*numbers, _banded_node(node, left, band)]


def _banded_node(node: Node, mask: Ref | None, band: Band, **form: Any) -> Node:
    """``node`` as banded attention; ``form``: further keyword arguments, such as ``alibi_bias_of``."""
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
    return replace(node, op=BANDED_ATTENTION, args=(*node.args[:3], mask), kwargs=kwargs)


def _as_alibi(
    mask: Ref, node: Node, lengths: tuple[int, int], graph: Graph, positions: PositionAnalysis
) -> list[Node] | None:
    """Nodes of an ALiBi attention: slopes [1, h, 1, 1], banded attention; None: another mask."""
    (query, *_), (result,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    dtype = graph.types[mask.name].dtype
    if not dtype.is_floating_point or len(query) != 4 or query[:-2] != result[:-2]:
        return None
    bands, slopes = list[Band | None](), list[AlibiBias]()
    for part in mask_summands(mask, graph, positions):
        if isinstance(part, MaskedFill):
            bands.append(band_of_fill(part, lengths, dtype, positions))
        elif (found := alibi_bias_of(part, graph, positions)) is not None:
            slopes.append(found)
        else:
            bands.append(band_of_mask(part, lengths, graph, positions))
    known = [band for band in bands if band is not None]
    if len(slopes) != 1 or len(known) < len(bands):
        return None
    (found,), band = slopes, intersect_bands(known)
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
    return [*made, _banded_node(node, Ref(made[-1].name), band, sloped=True)]


def band_of_fill(
    part: MaskedFill, lengths: tuple[int, int], dtype: torch.dtype, positions: PositionAnalysis
) -> Band | None:
    """The band of keys that a masked fill leaves visible; None if it depends on data."""
    known = positions(part.condition)
    if known is None or _shows_key(part.value, dtype) is not False:  # the fill replaces a bias, hides nothing
        return None

    def values(of: Any) -> float:
        return 0.0 if bool(of) == part.shows else part.value

    if isinstance(known, LinearIndex):
        return (
            _band_of_function(known._replace(start=values(known.start)), lengths, dtype) if known.is_constant else None
        )
    return _band_of_function(known._replace(values=tuple(map(values, known.values))), lengths, dtype)


def _packed_documents(part: Ref, node: Node, graph: Graph, positions: PositionAnalysis) -> tuple[Ref, Band] | None:
    """(document ids [b, t] or [t], band) that ``part`` of the mask of [b, h, t, e] consists of."""
    query, inside = graph.shape(node.inputs[0]), part
    producer = graph.producers.get(inside.name)
    while producer is not None and producer.op is aten.unsqueeze.default:
        inside = producer.args[0]
        producer = graph.producers.get(inside.name)
    bands, found = list[Band](), list[Ref]()
    for one in _conjuncts(inside, graph):
        band = band_of_mask(one, (query[-2], graph.shape(node.inputs[1])[-2]), graph, positions)
        documents = document_ids_of(one, graph) if band is None else None
        if band is None and documents is None:
            return None
        bands += [] if band is None else [band]
        found += [] if documents is None else [documents]
    *lead, rows, columns = graph.shape(node.argument("attn_mask"))
    if len(found) != 1 or len(query) != 4 or (rows, columns) != graph.shape(inside)[-2:]:
        return None
    *batch, _ = graph.shape(found[0])
    of_batch = tuple(lead) == (*batch, 1) if batch else all(n == 1 for n in lead)
    return (found[0], intersect_bands(bands)) if of_batch else None


def _document_ids_node(node: Node, documents: Ref, graph: Graph) -> list[Node]:
    """The node that reshapes document ids [b, t] or [t] to [b, 1, 1, t]."""
    *batch, keys = graph.shape(documents)
    name = f"{node.name}_documents"
    shape = [*(batch or [1]), 1, 1, keys]
    return [replace(node, name=name, op=aten.reshape.default, args=(documents, shape), kwargs={}, outputs=(name,))]


def _without_defaults(node: Node, kwargs: dict[str, Any]) -> dict[str, Any]:
    defaults = {a.name: a.default_value for a in node.op._schema.arguments}
    return {name: value for name, value in kwargs.items() if value != defaults[name]}


def _conjuncts(mask: Ref, graph: Graph) -> Iterator[Ref]:
    """The conjuncts of a boolean mask."""
    producer = graph.producers.get(mask.name)
    if producer is None or producer.op not in _AND_OPS or graph.types[mask.name].dtype != torch.bool:
        yield mask
        return
    for operand in producer.args:
        yield from _conjuncts(operand, graph)


def band_of_mask(part: Ref, lengths: tuple[int, int], graph: Graph, positions: PositionAnalysis) -> Band | None:
    """The band of keys around a query that a mask shows; None if it is no band."""
    return _band_of_function(positions(part), lengths, graph.types[part.name].dtype)


def _band_of_function(known: IndexFunction | None, lengths: tuple[int, int], dtype: torch.dtype) -> Band | None:
    """The band that ``known`` shows; see :func:`band_of_mask`."""
    if isinstance(known, LinearIndex) and known.is_constant:
        return ALL_KEYS if _shows_key(known.start, dtype) else None
    if not isinstance(known, DiagonalBands) or (known.row, known.column) != (known.rank - 2, known.rank - 1):
        return None
    shown = [_shows_key(value, dtype) for value in known.values]
    if None in shown or shown.count(True) == 0:
        return None
    first, last = shown.index(True), len(shown) - 1 - shown[::-1].index(True)
    if not all(shown[first : last + 1]):
        return None
    band = Band(
        None if first == 0 else -known.ends[first - 1], None if last == len(known.ends) else known.ends[last] - 1
    )
    return band if _hides_exactly(known, band, lengths, dtype) else None


def _shows_key(value: Any, dtype: torch.dtype) -> bool | None:
    """Whether a mask value shows a key, or hides it; None: it is a bias."""
    if dtype == torch.bool:
        return bool(value)
    if value == 0:
        return True
    return False if value <= max(HIDDEN_SCORE, torch.finfo(dtype).min) else None


def _hides_exactly(known: DiagonalBands, band: Band, lengths: tuple[int, int], dtype: torch.dtype) -> bool:
    """Whether hidden keys have weight 0: with finite summands only if each query sees some key."""
    if dtype == torch.bool or all(v == 0 or v == -torch.inf for v in known.values):
        return True
    queries, keys = lengths
    if isinstance(queries, Size) or isinstance(keys, Size):
        return band == CAUSAL and str(queries) == str(keys)
    return (band.after is None or band.after >= 0) and (band.before is None or queries - 1 - band.before < keys)


def intersect_bands(bands: list[Band]) -> Band:
    """The intersection of bands."""
    before = [b.before for b in bands if b.before is not None]
    after = [b.after for b in bands if b.after is not None]
    return Band(min(before, default=None), min(after, default=None))

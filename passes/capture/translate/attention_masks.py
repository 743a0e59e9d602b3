"""Attention masks as functions of positions: causal, sliding window, ALiBi, packed documents. Masks
are built as tensors [queries, keys], out of ``arange`` and of data such as padding. A function
of positions becomes a band of ``banded`` attention, linear biases (ALiBi) slopes, document masks
ids; a data-dependent rest stays a tensor. Key and value heads repeated for grouped-query
attention are shared again (``enable_gqa``)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from autoshard.aten import aten
from autoshard.passes.capture.translate.positions import IndexFunction, PositionAnalysis
from autoshard.passes.ir.graph import Graph, Node, Ref
from autoshard.passes.ir.patterns import Matcher, behind
from autoshard.passes.ir.rewrite import NodeBuilder, rewrite
from autoshard.passes.ir.sizes import Size
from autoshard.runtime.attention.masked_attention import banded_op
from autoshard.runtime.attention.ring_geometry import ALL_KEYS, CAUSAL, Band

SDPA = aten.scaled_dot_product_attention.default
BANDED_ATTENTION = banded_op._opoverload
HIDDEN_SCORE = -1e9
"""summands up to this value hide a key; so does the least value of a dtype such as float16"""

_ORDER_PRESERVING_VIEWS = (
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.reshape.default,
    aten.expand.default,
)
_BIAS_VIEWS = (*_ORDER_PRESERVING_VIEWS, aten.clone.default, aten._to_copy.default)
FILLS = (("masked_fill(kept, condition, number)", False), ("where(condition, kept, number)", True))
"""(masked fill, whether true keeps the value)"""
REPEATED_HEADS = "reshape(copied((wide := expand(copied((narrow := unsqueeze(heads, 2))), _))))"
"""key or value heads [b, g, t, d] as [b, g · n, t, d], for grouped-query attention"""


class MaskedFill(NamedTuple):
    """A masked fill of an additive mask: ``value`` where ``condition`` is not ``shows``."""

    condition: Ref
    shows: bool
    value: float


class Slopes(NamedTuple):
    """A product slopes · step · (key position), up to a term per query, such as ALiBi."""

    slopes: Ref | None
    step: float
    causal: bool = False
    """whether it holds only for keys up to the query"""


class MaskMatcher(Matcher):
    """Matches masks of attention in a graph, and what they are as functions of positions."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph, {"copied(x)": "x | clone(x, memory_format=_)"})
        self.positions = PositionAnalysis(graph)

    def conjuncts(self, mask: Ref) -> Iterator[Ref]:
        found = self.match("(bitwise_and | __and__ | logical_and)(a, b)", mask)
        if found is None or not isinstance(found["b"], Ref) or self.graph.types[mask.name].dtype != torch.bool:
            yield mask
            return
        yield from self.conjuncts(found["a"])
        yield from self.conjuncts(found["b"])

    def fill(self, value: Ref) -> tuple[Ref, MaskedFill] | None:
        """(kept value, masked fill) of ``value``, if it fills a constant number."""
        for form, shows in FILLS:
            if (found := self.match(form, value)) is not None and isinstance(found["kept"], Ref):
                number = self.positions(found["number"])
                if number is not None and number.constant is not None:
                    return found["kept"], MaskedFill(found["condition"], shows, float(number.constant))
        return None

    def summands(self, mask: Ref) -> Iterator[Ref | MaskedFill]:
        """The summands of an additive (floating point) mask, masked fills included."""
        if (both := self.match("add(a, b)", mask)) is not None and isinstance(both["b"], Ref):
            yield from self.summands(both["a"])
            yield from self.summands(both["b"])
        elif (filled := self.fill(mask)) is not None:
            yield filled[1]
            yield from self.summands(filled[0])
        elif (source := self._same_bias(mask)) is not None:
            yield from self.summands(source)
        else:
            yield mask

    def _same_bias(self, mask: Ref) -> Ref | None:
        """The bias that ``mask`` is a view of, with the same queries and keys."""
        node = self.graph.producers.get(mask.name)
        if node is None or node.op not in _BIAS_VIEWS or self.positions(mask) is not None:
            return None
        source: Ref = node.args[0]
        plain = self.graph.types[source.name].dtype.is_floating_point and self._keeps_positions(node)
        return source if plain and self.graph.shape(source)[-2:] == self.graph.shape(mask)[-2:] else None

    # --- documents ---

    def document_ids(self, mask: Ref) -> Ref | None:
        """Integer ids [b, t] or [t] if ``mask`` [b, 1, t, t], [b, t, t], [t, t] is ids == idsᵀ."""
        shape, inner = self.graph.shape(mask), behind(mask, (aten.unsqueeze.default,), self.graph)
        found = self.match("eq(a, b)", inner)
        if found is None or not isinstance(found["b"], Ref) or len(shape) < 2 or shape[-1] != shape[-2]:
            return None
        sides, keys = (found["a"], found["b"]), shape[-1]
        sources = {self._elements_source(x) for x in sides}
        if any(self.graph.types[x.name].dtype.is_floating_point for x in sides) or len(sources) != 1:
            return None
        (ids,) = sources
        of = self.graph.shape(ids)
        forms = {_orientation(self.graph.shape(x), of) for x in sides}
        fits = self.graph.shape(inner)[-2:] == shape[-2:] and shape in (
            (*of[:-1], 1, keys, keys),
            (*of[:-1], keys, keys),
        )
        return ids if of[-1:] == (keys,) and len(of) in (1, 2) and forms == {"rows", "columns"} and fits else None

    def _elements_source(self, x: Ref) -> Ref:
        """The source of ``x`` before views that keep all elements in order."""
        node = self.graph.producers.get(x.name)
        if node is None or node.op not in _ORDER_PRESERVING_VIEWS or not self.graph.shape(node.args[0]):
            return x
        same = self.graph.types[node.inputs[0]].numel == self.graph.types[x.name].numel
        return self._elements_source(node.args[0]) if same else x

    def packed_documents(self, part: Ref, node: Node) -> tuple[Ref, Band] | None:
        """(document ids [b, t] or [t], band) of which ``part`` of a mask [b, h, t, e] consists."""
        query, inside = self.graph.shape(node.inputs[0]), behind(part, (aten.unsqueeze.default,), self.graph)
        bands, found = list[Band](), list[Ref]()
        for one in self.conjuncts(inside):
            if (band := self.band(one, (query[-2], self.graph.shape(node.inputs[1])[-2]))) is not None:
                bands.append(band)
            elif (documents := self.document_ids(one)) is not None:
                found.append(documents)
            else:
                return None
        *lead, rows, columns = self.graph.shape(node.argument("attn_mask"))
        if len(found) != 1 or len(query) != 4 or (rows, columns) != self.graph.shape(inside)[-2:]:
            return None
        *batch, _ = self.graph.shape(found[0])
        of_batch = tuple(lead) == (*batch, 1) if batch else all(n == 1 for n in lead)
        return (found[0], intersect_bands(bands)) if of_batch else None

    # --- slopes ---

    def alibi(self, value: Ref) -> Slopes | None:
        """``value`` [..., keys] as an ALiBi bias, else None."""
        keys = self.graph.shape(value)[-1:]
        found = self._slopes(value, keys[0]) if keys else None
        return found if found is not None and found.slopes is not None and found.step else None

    def _slopes(self, value: Ref, keys: int) -> Slopes | None:
        """``value`` as a product of slopes, or of a number, and key positions."""
        known, node, shape = self.positions(value), self.graph.producers.get(value.name), self.graph.shape(value)
        if known is not None and known.rates is not None:
            return Slopes(None, float(known.rates[-1]))
        if node is None or shape[-1:] != (keys,):
            return None
        if node.op in _BIAS_VIEWS:
            inner = self._slopes(node.args[0], keys)
            exact = inner is None or inner.slopes is None or (self._keeps_positions(node) and not self._is_upcast(node))
            return inner if exact else None
        if node.op is aten.neg.default:
            inner = self._slopes(node.args[0], keys)
            return inner and inner._replace(step=-inner.step)
        if node.op is aten.slice.Tensor:
            *lead, length = self.graph.shape(node.args[0])
            inner = (
                self._slopes(node.args[0], length) if (*lead,) == shape[:-1] and node.argument("step") == 1 else None
            )
            return None if inner is None or inner.causal else inner
        if node.op is aten.abs.default:
            return _abs_distance(self.positions(node.args[0]))
        for sides in self.matches("mul(a, b)", value):
            one, other = sides["a"], sides["b"]
            inner = self._slopes(one, keys) if isinstance(one, Ref) else None
            if inner is not None and not isinstance(other, Ref):
                return inner._replace(step=inner.step * other)
            if inner is not None and inner.slopes is None and self._has_value_per_head(other):
                return inner._replace(slopes=other)
        return None

    def _keeps_positions(self, node: Node) -> bool:
        """Whether a view keeps heads, rows and keys in place, and no float was narrower before."""
        narrow, wide = (self.graph.types[x].dtype for x in (node.inputs[0], node.outputs[0]))
        if narrow.is_floating_point and wide.is_floating_point and torch.finfo(narrow).eps > torch.finfo(wide).eps:
            return False
        before, after = ((1, 1, *self.graph.shape(x))[-3:] for x in (node.inputs[0], node.outputs[0]))
        if node.op is aten.expand.default:
            before = tuple(new if old == 1 else old for old, new in zip(before, after, strict=True))
        return before == after and wide.is_floating_point

    def _is_upcast(self, node: Node) -> bool:
        """Whether a cast widens, so that the product was rounded to the narrower type."""
        before, after = (self.graph.types[name].dtype for name in (node.inputs[0], node.outputs[0]))
        return before.itemsize < after.itemsize

    def _has_value_per_head(self, slopes: Ref) -> bool:
        """Whether it is [.., h, 1, 1], one number per head, without a gradient."""
        shape, type_ = self.graph.shape(slopes), self.graph.types[slopes.name]
        plain = type_.dtype.is_floating_point and not type_.grad and not type_.unknown
        return plain and len(shape) > 2 and shape[-2:] == (1, 1) and math.prod(shape) == shape[-3]

    # --- bands ---

    def band(self, part: Ref, lengths: tuple[int, int]) -> Band | None:
        """The band of keys around a query that a mask shows; None if it is no band."""
        return _band_of_function(self.positions(part), lengths, self.graph.types[part.name].dtype)

    def band_of_fill(self, part: MaskedFill, lengths: tuple[int, int], dtype: torch.dtype) -> Band | None:
        """The band of keys that a masked fill leaves visible; None if it depends on data."""
        known = self.positions(part.condition)
        if known is None or known.values is None or _shows_key(part.value, dtype) is not False:
            return None  # depends on data, or replaces a bias and hides nothing
        shown = tuple((0, 0.0 if bool(of) == part.shows else part.value) for of in known.values)
        return _band_of_function(known._replace(pieces=shown), lengths, dtype)

    def unrepeated_heads(self, value: Ref) -> Ref | None:
        """[b, g, t, d] that was repeated to ``value`` [b, g · n, t, d]."""
        if (found := self.match(REPEATED_HEADS, value)) is None:
            return None
        heads: Ref = found["heads"]
        source, after, wide = (self.graph.shape(x) for x in (heads, value, found["wide"]))
        if len(source) != 4 or isinstance(after[1], Size):
            return None
        n, (b, g, *rest) = wide[2], source
        return heads if wide == (b, g, n, *rest) and after == (b, g * n, *rest) else None


def _orientation(shape: Sequence[int], of: tuple[int, ...]) -> str:
    """For ``of`` [b, t]: "rows" if ``shape`` is [b, t, 1], "columns" if [b, 1, t], else ""."""
    *batch, first, last = (1, *shape)
    if [n for n in batch if n != 1] != [n for n in of[:-1] if n != 1]:
        return ""
    return "rows" if (first, last) == (of[-1], 1) else "columns" if (first, last) == (1, of[-1]) else ""


def _abs_distance(known: IndexFunction | None) -> Slopes | None:
    """|row - column|, which falls by one from key to key up to the row."""
    if known is None or not known.is_diagonal or known.rates is None or known.pieces[0][1]:
        return None
    return Slopes(None, -abs(float(known.rates[-1])), True)


def simplify_masks(graph: Graph) -> Graph:
    """``graph`` whose attention has bands of visible keys, and mask tensors only for the rest."""
    masks = MaskMatcher(graph)

    def simplified(build: NodeBuilder, node: Node) -> bool:
        if node.op not in (SDPA, BANDED_ATTENTION):
            return False
        build.place = made = _with_shared_heads(node, masks)
        if made.argument("attn_mask") is None or made.argument("is_causal", False):
            build.finish(made.op, *made.args, **made.kwargs)
        else:
            _rewrite_mask(build, made, masks)
        return True

    return rewrite(graph, simplified)


def _with_shared_heads(node: Node, masks: MaskMatcher) -> Node:
    """``node`` with the key and value heads before they were repeated: grouped-query attention."""
    key, value = (masks.unrepeated_heads(node.argument(name)) for name in ("key", "value"))
    if key is None or value is None or node.argument("enable_gqa"):
        return node
    if masks.graph.shape(key)[:-1] != masks.graph.shape(value)[:-1]:
        return node
    args, kwargs = node.with_arguments(key=key, value=value, enable_gqa=True)
    return replace(node, args=args, kwargs=kwargs)


def _rewrite_mask(build: NodeBuilder, node: Node, masks: MaskMatcher) -> None:
    """The attention with a band for the position part of its mask, maybe behind document ids."""
    mask, graph = node.argument("attn_mask"), masks.graph
    (query, key, *_), (result,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    lengths, keeps_width = (query[-2], key[-2]), query[:-2] == result[:-2]
    free = node.argument("sinks", None) is None  # slopes leave a term per query open, which matters beside sinks
    if free and len(query) == 4 and keeps_width and (found := _alibi(mask, query[1], lengths, masks)) is not None:
        slopes, band = build(aten.reshape.default, found[0].slopes, [1, query[1], 1, 1]), found[1]
        if found[0].step != 1:
            slopes = build(aten.mul.Tensor, slopes, found[0].step)
        _finish_banded(build, node, slopes, band, sloped=True)
        return
    parts = {part: masks.band(part, lengths) for part in masks.conjuncts(mask)}
    rest, bands = [p for p, band in parts.items() if band is None], [b for b in parts.values() if b is not None]
    packed = masks.packed_documents(rest[0], node) if len(rest) == 1 else None
    if packed is not None:
        bands.append(packed[1])
    band = intersect_bands(bands)
    left = None if not rest else rest[0] if len(rest) == 1 else mask
    stays = rest and packed is None and (band == ALL_KEYS or graph.types[mask.name].grad)
    if left is None and band in (ALL_KEYS, CAUSAL) and node.op is SDPA:
        args, kwargs = node.with_arguments(attn_mask=None, is_causal=band == CAUSAL)
        build.finish(node.op, *args, **_without_defaults(node, kwargs))
    elif stays or not keeps_width:
        build.finish(node.op, *node.args, **node.kwargs)
    else:
        if packed is not None:
            *batch, keys = graph.shape(packed[0])
            left = build(aten.reshape.default, packed[0], [*(batch or [1]), 1, 1, keys])
        _finish_banded(build, node, left, band)


def _finish_banded(build: NodeBuilder, node: Node, mask: Ref | None, band: Band, **form: Any) -> None:
    """``node`` as banded attention; ``form``: further keyword arguments."""
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
    build.finish(BANDED_ATTENTION, *node.args[:3], mask, **kwargs)


def _alibi(mask: Ref, heads: int, lengths: tuple[int, int], masks: MaskMatcher) -> tuple[Slopes, Band] | None:
    """The slopes and the band that a mask consists of; None: another mask."""
    dtype, bands, slopes = masks.graph.types[mask.name].dtype, list[Band | None](), list[Slopes]()
    for part in masks.summands(mask) if dtype.is_floating_point else ():
        if isinstance(part, MaskedFill):
            bands.append(masks.band_of_fill(part, lengths, dtype))
        elif (found := masks.alibi(part)) is not None:
            slopes.append(found)
        else:
            bands.append(masks.band(part, lengths))
    known = [band for band in bands if band is not None]
    if len(slopes) != 1 or len(known) < len(bands) or slopes[0].slopes is None:
        return None
    band, per_head = intersect_bands(known), masks.graph.types[slopes[0].slopes.name].numel == heads
    later = slopes[0].causal and (band.after is None or band.after > 0)
    return (slopes[0], band) if per_head and not later else None


def _without_defaults(node: Node, kwargs: dict[str, Any]) -> dict[str, Any]:
    defaults = {a.name: a.default_value for a in node.op._schema.arguments}
    return {name: value for name, value in kwargs.items() if value != defaults[name]}


def _band_of_function(known: IndexFunction | None, lengths: tuple[int, int], dtype: torch.dtype) -> Band | None:
    """The band that ``known`` shows; see :func:`band_of_mask`."""
    if known is None or known.values is None:
        return None
    if known.constant is not None:
        return ALL_KEYS if _shows_key(known.constant, dtype) else None
    if not known.is_diagonal:
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
    return band if _hides_exactly(known.values, band, lengths, dtype) else None


def _shows_key(value: Any, dtype: torch.dtype) -> bool | None:
    """Whether a mask value shows a key, or hides it; None: it is a bias."""
    if dtype == torch.bool:
        return bool(value)
    if value == 0:
        return True
    return False if value <= max(HIDDEN_SCORE, torch.finfo(dtype).min) else None


def _hides_exactly(values: Sequence[Any], band: Band, lengths: tuple[int, int], dtype: torch.dtype) -> bool:
    """Whether hidden keys have weight 0: with finite summands only if each query sees some key."""
    if dtype == torch.bool or all(v == 0 or v == -torch.inf for v in values):
        return True
    queries, keys = lengths
    if isinstance(queries, Size) or isinstance(keys, Size):
        return band == CAUSAL and str(queries) == str(keys)
    return (band.after is None or band.after >= 0) and (band.before is None or queries - 1 - band.before < keys)


def intersect_bands(bands: list[Band]) -> Band:
    before = [b.before for b in bands if b.before is not None]
    after = [b.after for b in bands if b.after is not None]
    return Band(min(before, default=None), min(after, default=None))

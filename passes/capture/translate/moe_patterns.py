"""Patterns of MoE routing: gates, products by expert, experts' rows, capacity buffers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from autoshard.aten import aten
from autoshard.passes.capture.translate.positions import PositionAnalysis
from autoshard.passes.ir.graph import Graph, Node, Ref
from autoshard.passes.ir.patterns import Bindings, Matcher, is_function, permutation_of, product_of


class OneHotIds(NamedTuple):
    """Expert ids as a one-hot mask, where zero rows stand for dropped choices."""

    mask: Ref


ExpertIds = Ref | OneHotIds

RULES = {
    "picked(x, rows)": "index(x, [rows]) | index_select(x, 0, rows)",
    "read(x)": "index(x, [rows]) | +index(unsqueeze(x, 0), [None, rows])",
    "ranked(x)": "argsort(x, dim=_, stable=_) | sort(x, dim=_, stable=_)[1]",
    "quotient(x, n)": "floor_divide(x, n) | div(x, n, rounding_mode='floor') | div(x, n, rounding_mode='trunc')",
    "counted(ids)": "~cumsum(~bincount(ids, minlength=_), _, dtype=_)",
    "multiplied(x, w, ends)": "_grouped_mm(x, w, ends) | grouped_mm(x, w, ends, full=_)",
    "turned(w)": "t(w) | transpose(w, 0, 1) | transpose(w, 1, 0) | permute(w, [1, 0])",
    "all_turned(w)": "transpose(w, 1, 2) | transpose(w, 2, 1)",
    "distinct()": "+topk(_, _, -1, _, _)[1]",
    "weight(w)": "parameter(w) | select(stack(w), 0, number)",
    # An expert mask with its number, in an unrolled loop over experts.
    "of_expert(masks)": "~mask(masks) | ~squeeze(mask(masks), 0)",
    "mask(masks)": "select(masks, 0, number) | index(masks, [constant(number)])",
    "slots(weights, of)": "column_of(weights, rows, of) | unsqueeze(index(weights, [rows, of]), -1)",
    "column_of(x, rows, of)": "index(unsqueeze(x, -1), [rows, of]) | index(unsqueeze(x, -1), [rows, of, None])",
    "per_row(x)": "unsqueeze(index(x, [rows]), -1) | index(unsqueeze(x, -1), [rows])",
    "added(total, rows, values)": "(sum := index_add(total, 0, rows, values)) | index_put(total, [rows], values, True)"
    " | index_put(total, [rows], add(index(total, [rows]), values))",
    # ``if rows: total = added`` in a traced loop
    "turn(total, rows, values)": "add(zero(turn), where(ne(of_expert(hits(masks)), 0), (turn := added(total,"
    " (rows := where(of_expert(masks))[0] | where(of_expert(masks))[1]), values)), total))",
    "of_number(weights)": "mul(weights, ~eq(ids, number))",
    "hits(masks)": "(gt | greater | ne)(sum(masks, [1, 2]), 0) | (gt | greater | ne)(sum(masks, [2, 1]), 0)",
}

GATES = """+(
    scatter(zeros(), -1, (ids := distinct()), weights)
    | sum(mul(~one_hot(ids, _), unsqueeze(weights, -1)), [-2])
    | einsum("tke,tk->te", ~one_hot(ids, _), weights)
)"""
"""dense gates [.., e], zero but for the chosen experts, before a reshape of the rows"""
COLUMN = "unsqueeze(select(gates, -1, number), -1) | slice(gates, -1, number, _, _)"
"""the gates [.., 1] of one expert"""

# Forms of routing: of each, the operands ``x``, ``ids`` and ``weights``, and the experts ``mlp``.

ALL_ROWS = "einsum('te,etd->td', gates(ids, weights), dense_experts(x, mlp))"
GATED = "mul(column(gates, number), one_expert(x, mlp))"
"""all rows to expert ``number``, times its gates"""
STEP = "added(total, rows, values) | turn(total, rows, values)"
"""``values`` added to the rows of one expert"""

TURN = """
    values = mul(y, factor)
    {}
    y = one_expert(read(x), mlp)
"""
TURNS = tuple(map(TURN.format, (
    """rows = where(eq(ids, number))[0]
       factor = slots(weights, where(eq(ids, number))[1])""",
    """rows = where(of_expert(permute(one_hot(ids, _), [2, 1, 0])))[1]
       factor = slots(weights, where(of_expert(permute(one_hot(ids, _), [2, 1, 0])))[0])""",
    """rows = where(of_expert(permute(one_hot_mask(mask), [2, 1, 0])))[1]
       factor = slots(weights, where(of_expert(permute(mask, [2, 1, 0])))[0])""",
    """rows = any(eq(ids, number), -1)
       factor = per_row(sum(of_number(weights), [-1])) | index(sum(of_number(weights), [-1], True), [rows])""",
    """rows = any(eq(ids, number), -1)
       factor = per_row(select(gates(ids, weights), -1, number))""",
)))  # fmt: skip
"""results of expert ``number`` for the ``rows`` that chose it, times their weights"""

SORTED = """
    out = index_add(zeros(), 0, rows, mul(y, unsqueeze(picked(reshape(weights), order), _)))
    rows = quotient(order, top)
    order = ranked(flat)
    flat = reshape(ids)
    y = grouped_experts(picked(x, rows), mlp)
"""
"""rows sorted by expert"""

ProductForms = tuple[tuple[bool, str], ...]
"""(whether matrices are [.., in, out]; else [.., out, in]; the product of rows and matrices)"""

GROUPED: ProductForms = (
    (False, "multiplied(rows, all_turned(matrices), counted(flat))"),
    (True, "multiplied(rows, matrices, counted(flat))"),
)
DENSE: ProductForms = (
    (True, "einsum('td,edf->etf', rows, matrices) | einsum('etd,edf->etf', rows, matrices)"),
    (False, "einsum('td,efd->etf', rows, matrices) | einsum('etd,efd->etf', rows, matrices)"),
)
OF_ONE: ProductForms = (
    (True, "+linear(rows, turned(weight(matrices))) | +linear(rows, turned(parameter(matrices)), bias)"),
    (False, "+linear(rows, weight(matrices)) | +linear(rows, parameter(matrices), bias)"),
    (False, "+(matmul | mm)(rows, turned(weight(matrices)))"),
    (True, "+(matmul | mm)(rows, weight(matrices))"),
)
ACTIVATIONS = {
    "silu": "silu(gate)",
    "gelu": "gelu(gate)",
    "gelu_tanh": "gelu(gate, approximate='tanh')",
    "relu": "relu(gate)",
}
MLPS = (
    "product(activated(product(x, first, turned, bias), activation), second, second_turned, second_bias)",
    """product(mul(half(whole, 1), activated(half((whole := product(x, first, turned, bias)), 0), activation)),
               second, second_turned, second_bias)""",
    """product(mul(product(x, up, turned, up_bias), activated(product(x, first, turned, bias), activation)),
               second, second_turned, second_bias)""",
)
"""an expert: two products around an activation, whose second half or other product may be a gate"""


class RoutingPatterns(Matcher):
    """Matches patterns of MoE routing in a graph."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph, RULES)
        self.predicates = {
            "zeros": lambda x, _: [()] if self.is_zero(x) else [],
            "constant": lambda x, _: self._constant(x),
            "parameter": lambda x, _: [(x,)] if self._is_matrix(x) else [],
            "stack": lambda x, _: self._stack(x),
            "half": lambda x, _: self._half(x),
            "activated": lambda x, _: self._activated(x),
            "gates": lambda x, _: self._gates(x),
            "column": lambda x, _: self._column(x),
            "one_hot_mask": lambda x, _: [(x,)] if self.is_one_hot(x) else [],
            "dense_experts": partial(self.experts, DENSE),
            "grouped_experts": partial(self.experts, GROUPED),
            "one_expert": partial(self.experts, OF_ONE),
        }
        self.positions = PositionAnalysis(graph)
        self._first: dict[Any, Ref] = {}

    # --- predicates ---

    def is_zero(self, value: Any) -> bool:
        known = self.positions(value)
        return known is not None and known.constant == 0

    def _constant(self, value: Any) -> Iterator[tuple[int]]:
        known = self.graph.constants.get(value.name) if isinstance(value, Ref) else None
        if known is not None and known.numel() == 1:
            yield (int(known),)

    def _is_matrix(self, value: Ref) -> bool:
        """Whether it is a matrix of its own, as of a module per expert."""
        return value.name in self.graph.parameters and len(self.graph.shape(value)) == 2

    def _stack(self, value: Any) -> Iterator[tuple[Ref]]:
        """The matrices of all experts; of several that are computed alike, the first."""
        if len(self.graph.shape(value)) == 3:
            node = self.graph.producers.get(value.name)
            plain = node is not None and is_function(node) and len(node.outputs) == 1
            key = (node.op, repr(node.args), repr(node.kwargs)) if node is not None and plain else value
            yield (self._first.setdefault(key, value),)

    def is_one_hot(self, value: Ref) -> bool:
        """Whether ``value`` is one-hot along the last dim, or zero where a choice was dropped."""
        if self.match("+one_hot(_, _)", value) is not None:
            return True
        for found in self.matches("+mul(hot, ~(kept := _))", value):
            kept = found["kept"]
            mask = isinstance(kept, Ref) and self.graph.types[kept.name].dtype == torch.bool
            if mask and self.is_one_hot(found["hot"]):
                return True
        return False

    def _gates(self, value: Any) -> Iterator[tuple[Ref, Ref]]:
        """(ids, weights) [.., k] of dense gates [.., e]."""
        for found in self.matches(GATES, value):
            ids, weights = found["ids"], found["weights"]
            shapes = self.graph.shapes((ids.name, weights.name))
            if shapes[0] == shapes[1] and len(shapes[0]) > 1:
                yield ids, weights

    def _column(self, value: Any) -> Iterator[tuple[Ref, int]]:
        for found in self.matches(COLUMN, value):
            number = found["number"] or 0
            if isinstance(number, int) and number >= 0 and self.graph.shape(value)[-1] == 1:
                yield found["gates"], number

    # --- experts ---

    def _half(self, value: Any) -> Iterator[tuple[Ref, int]]:
        """(whole, number of the half along its last dim)."""
        for found in self.matches("(split | split_with_sizes | chunk)(whole, _, -1)[slot]", value):
            if self.graph.shape(found["whole"])[-1] == 2 * self.graph.shape(value)[-1]:
                yield found["whole"], found["slot"]

    def _activated(self, value: Any) -> Iterator[tuple[Ref, str]]:
        for name, form in ACTIVATIONS.items():
            if (found := self.match(form, value)) is not None:
                yield found["gate"], name

    def experts(self, products: ProductForms, y: Any, known: Bindings) -> Iterator[tuple[Ref, ExpertMlp]]:
        """(rows, experts) with results ``y``; ``known``: names in ``products``."""
        bound = {name: known[name] for name in ("flat", "number") if name in known}

        def product(value: Any, _: Bindings) -> Iterator[tuple[Ref, Ref, bool, Ref | None]]:
            for transposed, form in products:
                if (found := self.match(form, value, **bound)) is not None:
                    yield found["rows"], found["matrices"], transposed, found.get("bias")
                    return

        self.predicates["product"] = product
        for form in MLPS:
            for found in self.matches(form, y):
                first, biases = ([found[n] for n in names if n in found] for names in _OF_FIRST)
                with_bias = {bias is not None for bias in (*biases, found["second_bias"])}
                if len(with_bias) == 1 and len({self.graph.shape(m) for m in first}) == 1:
                    second = (found["second_bias"],) if True in with_bias else ()
                    kind = found["activation"], form is not MLPS[0], found["turned"]
                    turned = found["turned"] != found["second_turned"]
                    of_first = tuple(biases) if second else ()
                    yield found["x"], ExpertMlp(tuple(first), found["second"], of_first, second, kind, turned)
                    return


_OF_FIRST = (("first", "up"), ("bias", "up_bias"))
ExpertMatrices = Ref | tuple[Ref, ...]
"""matrices of all experts in one tensor, or one per expert"""


@dataclass(frozen=True)
class ExpertMlp:
    """Expert MLPs: two products around an activation, of all experts, or of one in a loop."""

    first: tuple[ExpertMatrices, ...]
    """(matrices,), or (gate matrices, up matrices)"""
    second: ExpertMatrices
    first_bias: tuple[ExpertMatrices, ...]
    second_bias: tuple[ExpertMatrices, ...]
    form: tuple[str, bool, bool]
    """(activation, whether it is gated, whether the first matrices are [in, out])"""
    turned: bool
    """whether second matrices are [out, in] where the first are [in, out], or vice versa"""

    @property
    def weights(self) -> tuple[tuple[str, tuple[ExpertMatrices, ...]], ...]:
        """(operand of ``experts_op``, its matrices or biases); () where it has none."""
        biases = ("first_bias", self.first_bias), ("second_bias", self.second_bias)
        return ("first", self.first), ("second", (self.second,)), *biases


# --- expert capacity ---

DimNames = tuple[str, ...]
"""names of a value's dims: rows, "k" (choices of a row), "e" (experts), "c" (slots, capacity)"""
DimGroups = list[tuple[str, ...]]
"""per dim of a reshaped value the names of the dims that were merged into it, outer to inner"""

_EXACT_COUNT_DTYPES = (torch.int64, torch.int32, torch.float32, torch.float64)
"""dtypes in which counts of rows are exact"""


class DispatchMask(NamedTuple):
    """A dispatch or combine mask [rows, experts, capacity], taken apart."""

    hot: OneHotIds
    """[rows, k, experts], or [rows, experts] with one expert per row"""
    at: Ref
    """one-hot slots"""
    single: bool
    """whether ``hot`` has no dim k"""
    gates: Ref | None
    """factor of a combine mask; None: a dispatch mask"""
    nonzero: bool
    """whether the product was cast to bool: 1 wherever it is not zero"""


def buffer_products(rank: int, place: int) -> ProductForms:
    """Products of buffers of this rank, whose dim ``place`` are the experts, with matrices."""
    rows = "abcd"[:rank]
    expert, width, made = rows[place], rows[-1], rows[:-1] + "z"
    return (
        (True, f"einsum('{rows},{expert}{width}z->{made}', rows, matrices)"),
        (False, f"einsum('{rows},{expert}z{width}->{made}', rows, matrices)"),
    )


class CapacityPatterns(RoutingPatterns):
    """Patterns of expert capacity, too: dispatch and combine masks as one-hot products.

        dispatch [t, e, c] = Σ_k hot [t, k, e] · at [t, k, c]   row t is in slot c of expert e
        combine  [t, e, c] = the same, times the gates          (Lepikhin et al. 2020, GShard)
        y [t] = Σ_ec combine [t, e, c] · expert_e(Σ_t' dispatch [t', e, c] · x [t'])

    A row's slot is the number of earlier rows that chose the expert, a running count of ``hot``.
    So a slot holds at most one row, and y [t] = Σ_k gate [t, k] · expert_(t, k)(x [t]) without buffers.
    """

    def filled(self, buffers: Ref) -> tuple[Ref, Ref, str] | None:
        """(dispatch mask, rows, dims of the buffers) of einsum("..tec, ..td -> buffers")."""
        product = product_of(buffers, self.graph)
        pair = product.operands if product is not None and len(product.operands) == 2 else ()
        for there, x in itertools.permutations(pair):
            of_there, of_x, of_buffers = product.named(there, x)  # type: ignore[union-attr]
            rows, width = of_there[:-2], of_x[-1]
            kept = {*rows[:-1], *of_there[-2:], width}
            if of_x == rows + width and set(of_buffers) == kept and of_buffers[-1] == width not in of_there:
                return there, x, of_buffers
        return None

    def placed(self, value: Ref) -> DispatchMask | None:
        """``value`` [.., t, e, c] as a mask, if it is one and no slot holds two rows."""
        rows = tuple(f"t{i}" for i in range(len(self.graph.shape(value)) - 2))
        behind = [m["x"] for m in self.matches("~(x := _)", value)]
        nonzero = any(self.graph.types[x.name].dtype == torch.bool for x in behind[:-1])
        factors = self._factors(behind[-1], (*rows, "e", "c"))
        if factors is None:
            return None
        chosen = (*rows, "k") if any("k" in dims for _, dims in factors) else rows
        hots = [(v, dims) for v, dims in factors if "e" in dims and self.is_one_hot(v)]
        ats = [(v, dims) for v, dims in factors if "c" in dims]
        gates = [(v, dims) for v, dims in factors if (v, dims) not in (*hots, *ats)]
        if [dims for _, dims in (*hots, *ats)] != [(*chosen, "e"), (*chosen, "c")] or len(gates) > 1:
            return None
        if gates and gates[0][1] != chosen and (gates[0][1] != (*rows, "e") or chosen != rows):
            return None
        (hot, _), (at, _) = hots[0], ats[0]
        if not self._is_apart(at, hot, (*chosen, "e"), rows):
            return None
        return DispatchMask(OneHotIds(hot), at, chosen == rows, gates[0][0] if gates else None, nonzero)

    def _factors(self, value: Ref, dims: DimNames) -> list[tuple[Ref, DimNames]] | None:
        """The factors of ``value``, a product with these dims, summed over "k"; without casts."""
        value = [m["x"] for m in self.matches("~(x := _)", value)][-1]
        node = self.graph.producers.get(value.name)
        if len(dims) != len(self.graph.shape(value)):
            return None
        if node is None or not {"e", "c", ""} & {*dims} or self.is_one_hot(value):
            return [(value, dims)]
        parts: list[tuple[Ref, DimNames]] = []
        if (product := product_of(node, self.graph)) is not None:
            names = dict(zip(product.result, dims, strict=True))
            if len(summed := {*itertools.chain(*product.dims)} - {*product.result}) > 1 or (summed and "k" in dims):
                return None
            names |= dict.fromkeys(summed, "k")
            terms = zip(product.operands, product.dims, strict=True)
            parts = [(x, tuple(names[a] for a in term)) for x, term in terms]
        elif (found := self.match("mul(a, b)", value)) is not None and isinstance(found["b"], Ref):
            for x in (found["a"], found["b"]):  # a dim of length 1 is broadcast: it has no name
                pairs = [*zip(self.graph.shape(x)[::-1], dims[::-1], self.graph.shape(value)[::-1], strict=False)]
                parts.append((x, tuple(d if n == full else "" for n, d, full in pairs)[::-1]))
        elif (found := self.match("unsqueeze(x, dim)", value)) is not None:
            at = found["dim"]
            parts = [(found["x"], dims[:at] + dims[at + 1 :])]
        elif (found := self.match("sum(x, [dim])", value)) is not None and "k" not in dims:
            at = found["dim"]
            parts = [(found["x"], (*dims[:at], "k", *dims[at:]))]
        else:
            return [(value, dims)]
        found_in = [self._factors(x, names) for x, names in parts]
        return None if None in found_in else [*itertools.chain(*found_in)]  # type: ignore[arg-type]

    def _is_apart(self, at: Ref, hot: Ref, dims: DimNames, rows: DimNames) -> bool:
        """Whether slots ``at`` are distinct: running counts of the one-hot ids behind ``hot``."""
        base = self._unmasked(hot)
        found = self.match("~one_hot(place, _)", at)
        place = self._of_chosen(found["place"], (hot, base)) if found is not None else None
        if place is None:
            return False
        after, count = self._seen(place, base, shifted=True)
        sums = self.match("cumsum(x, dim, dtype=_)", count)
        if sums is None or self.graph.types[count.name].dtype not in _EXACT_COUNT_DTYPES:
            return False
        before, start = self._seen(sums["x"], base, shifted=False)
        if not self.alike(start, base):
            return False
        sizes = dict(zip(dims, self.graph.shape(base), strict=True))
        named = _trace_dims(before, [(d,) for d in dims], sizes, self.graph)
        if named is None or {*named[sums["dim"]]} != {rows[-1], *({"k"} & {*dims})}:
            return False
        return _trace_dims(after, named, sizes, self.graph) == [(d,) for d in dims]

    def _unmasked(self, hot: Ref) -> Ref:
        """The one-hot ids that ``hot`` is a masked part of."""
        for found in self.matches("mul(a, b)", hot):
            if self.is_one_hot(found["a"]) and not self.is_one_hot(found["b"]):
                return self._unmasked(found["a"])
        return hot

    def _of_chosen(self, value: Ref, hots: Sequence[Ref]) -> Ref | None:
        """The slots [.., e] that ``value`` reads at the chosen expert: Σ_e slots · hot."""
        found, place = self.match("~sum(slots, [-1])", value), None
        while found is not None:
            value, place = found["slots"], found["slots"] if "hot" in found else None
            ways = (m for hot in hots for m in self.matches("~mul(slots, ~hot)", value, hot=hot))
            found = next((m for m in ways if isinstance(m["slots"], Ref)), None)
        return place

    def _seen(self, value: Ref, base: Ref, shifted: bool) -> tuple[list[Node], Ref]:
        """(reshapes and permutations in order, their source) of ``value``; casts are ignored, as
        are, if ``shifted``, additions of a number, or of ``base``, which is 1 where it
        counts."""
        nodes: list[Node] = []
        while not self.alike(value, base) and (node := self.graph.producers.get(value.name)) is not None:
            if self.graph.types[value.name].dtype not in _EXACT_COUNT_DTYPES:
                break
            if shifted and node.op in (aten.sub.Tensor, aten.add.Tensor) and not node.kwargs:
                more = node.args[1]
                if not isinstance(more, int) and (nodes or self.match("~base", more, base=base) is None):
                    break
            elif node.op is aten.reshape.default or permutation_of(node, self.graph) is not None:
                nodes.append(node)
            elif node.op not in _COPY_OPS:
                break
            value = node.args[0]
        return nodes[::-1], value


_COPY_OPS = (aten._to_copy.default, aten.clone.default)


def _trace_dims(nodes: Sequence[Node], named: DimGroups, sizes: dict[str, int], graph: Graph) -> DimGroups | None:
    """The names of the dims after ``nodes``; None where a reshape splits a named dim."""
    for node in nodes:
        if (order := permutation_of(node, graph)) is not None:
            named = [named[d] for d in order]
            continue
        flat, named = [*itertools.chain(*named)], []
        for length in graph.shape(node.outputs[0]):
            part: tuple[str, ...] = ()
            while flat and math.prod(sizes[d] for d in part) < length:
                part = (*part, flat.pop(0))
            if math.prod(sizes[d] for d in part) != length:
                return None
            named.append(part)
        if flat:
            return None
    return named

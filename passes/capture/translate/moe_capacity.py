"""MoE routing with expert capacity: dispatch and combine masks as one-hot products.

    dispatch [t, e, c] = Σ_k hot [t, k, e] · at [t, k, c]   row t is in slot c of expert e
    combine  [t, e, c] = the same, times the gates          (Lepikhin et al. 2020, GShard)
    y [t] = Σ_ec combine [t, e, c] · expert_e(Σ_t' dispatch [t', e, c] · x [t'])

A row's slot is the number of earlier rows that chose the expert, a running count of ``hot``. So a
slot holds at most one row, and y [t] = Σ_k gate [t, k] · expert_(t, k)(x [t]) without buffers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from autoshard.aten import aten
from autoshard.passes.capture.translate.moe_patterns import (
    ExpertProduct,
    OneHotIds,
    ProductMatcher,
    RoutingPatterns,
    einsum_dims,
)
from autoshard.passes.ir.graph import Node, Ref

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


class CapacityBuffers:
    """Matches dispatch into, and combine out of, capacity buffers in a graph."""

    def __init__(self, patterns: RoutingPatterns) -> None:
        self.patterns, self.graph = patterns, patterns.graph

    def product(self, places: list[int]) -> ProductMatcher:
        """Matcher of buffers [.., c, in] @ matrices; appends their expert dim to ``places``."""

        def product(value: Ref) -> ExpertProduct | None:
            node = self.patterns.made(value, aten.bmm.default, aten.matmul.default, aten.einsum.default)
            operands = [] if node is None else node.args[1] if node.op is aten.einsum.default else node.args
            if node is None or len(operands) != 2:
                return None
            for rows, matrices in (operands, operands[::-1]):
                rank = len(self.graph.shape(rows))
                if rank not in (3, 4) or len(self.graph.shape(matrices)) != 3:
                    continue
                if node.op is not aten.einsum.default:
                    places.append(rank - 3)
                    return ExpertProduct(rows, matrices, True)
                of_rows, of_matrices, of_result = einsum_dims(node, (rows, matrices))
                last, made = of_rows[-1], of_result[-1]
                if of_result[:-1] != of_rows[:-1] or of_matrices[0] not in of_rows[:-1] or made in of_rows:
                    continue
                if set(of_matrices[1:]) == {last, made}:
                    places.append(of_rows.index(of_matrices[0]))
                    return ExpertProduct(rows, matrices, of_matrices[1] == last)
            return None

        return product

    def filled(self, buffers: Ref) -> tuple[Ref, Ref, str] | None:
        """(dispatch mask, rows, dims of the buffers) of einsum("..tec, ..td -> buffers")."""
        node = self.patterns.made(buffers, aten.einsum.default)
        for there, x in (node.args[1], node.args[1][::-1]) if node is not None and len(node.args[1]) == 2 else ():
            of_there, of_x, of_buffers = einsum_dims(node, (there, x))  # type: ignore[arg-type]
            rows, width = of_there[:-2], of_x[-1]
            kept = {*rows[:-1], *of_there[-2:], width}
            if of_x == rows + width and set(of_buffers) == kept and of_buffers[-1] == width not in of_there:
                return there, x, of_buffers
        return None

    def placed(self, value: Ref) -> DispatchMask | None:
        """``value`` [.., t, e, c] as a mask, if it is one and no slot holds two rows."""
        rows = tuple(f"t{i}" for i in range(len(self.graph.shape(value)) - 2))
        without_casts, nonzero = value, False
        while (node := self.patterns.made(without_casts, aten._to_copy.default)) is not None:
            nonzero |= self.graph.types[without_casts.name].dtype == torch.bool
            without_casts = node.args[0]
        factors = self._factors(without_casts, (*rows, "e", "c"))
        if factors is None:
            return None
        chosen = (*rows, "k") if any("k" in dims for _, dims in factors) else rows
        hots = [(v, dims) for v, dims in factors if "e" in dims and self.patterns.is_one_hot(v)]
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
        value = self.patterns.without_casts(value)
        if len(dims) != len(self.graph.shape(value)):
            return None
        if (
            not {"e", "c", ""} & {*dims}
            or self.patterns.is_one_hot(value)
            or (node := self.graph.producers.get(value.name)) is None
        ):
            return [(value, dims)]
        parts: list[tuple[Ref, DimNames]] = []
        if node.op is aten.einsum.default:
            left, _, right = node.args[0].replace(" ", "").partition("->")
            names = dict(zip(right, dims, strict=True))
            if len(summed := {*left} - {*right, ","}) > 1 or (summed and "k" in dims):
                return None
            names |= dict.fromkeys(summed, "k")
            parts = [(x, tuple(names[a] for a in term)) for x, term in zip(node.args[1], left.split(","), strict=True)]
        elif node.op is aten.mul.Tensor and len(node.inputs) == 2:
            for x in node.args:  # a dim of length 1 is broadcast: it has no name
                pairs = [*zip(self.graph.shape(x)[::-1], dims[::-1], self.graph.shape(value)[::-1], strict=False)]
                parts.append((x, tuple(d if n == full else "" for n, d, full in pairs)[::-1]))
        elif node.op is aten.unsqueeze.default:
            at = node.args[1] % len(dims)
            parts = [(node.args[0], dims[:at] + dims[at + 1 :])]
        elif node.op is aten.sum.dim_IntList and len(node.args) == 2 and len(node.args[1]) == 1 and "k" not in dims:
            at = node.args[1][0] % (len(dims) + 1)
            parts = [(node.args[0], (*dims[:at], "k", *dims[at:]))]
        else:
            return [(value, dims)]
        found = [self._factors(x, names) for x, names in parts]
        return None if any(f is None for f in found) else [*itertools.chain(*found)]  # type: ignore[arg-type]

    def _is_apart(self, at: Ref, hot: Ref, dims: DimNames, rows: DimNames) -> bool:
        """Whether slots ``at`` are distinct: running counts of the one-hot ids behind ``hot``."""
        node = self.patterns.made(self.patterns.without_casts(at), aten.one_hot.default)
        base = self._unmasked(hot)
        place = self._of_chosen(node.args[0], (hot, base)) if node is not None else None
        if place is None:
            return False
        after, count = self._seen(place, base, shifted=True)
        sums = self.patterns.made(count, aten.cumsum.default)
        if sums is None or self.graph.types[count.name].dtype not in _EXACT_COUNT_DTYPES:
            return False
        before, start = self._seen(sums.args[0], base, shifted=False)
        if not self.patterns.same(start, base):
            return False
        named = _trace_dims(
            before, [(d,) for d in dims], dict(zip(dims, self.graph.shape(base), strict=True)), self.graph
        )
        if named is None or {*named[sums.args[1] % len(named)]} != {rows[-1], *({"k"} & {*dims})}:
            return False
        sizes = dict(zip(dims, self.graph.shape(base), strict=True))
        return _trace_dims(after, named, sizes, self.graph) == [(d,) for d in dims]

    def _unmasked(self, hot: Ref) -> Ref:
        """The one-hot ids that ``hot`` is a masked part of."""
        for a, b in self.patterns.times(hot):
            if self.patterns.is_one_hot(a) and not self.patterns.is_one_hot(b):
                return self._unmasked(a)
        return hot

    def _of_chosen(self, value: Ref, hots: Sequence[Ref]) -> Ref | None:
        """The slots [.., e] that ``value`` reads at the chosen expert: Σ_e slots · hot."""
        node = self.patterns.made(self.patterns.without_casts(value), aten.sum.dim_IntList)
        if (
            node is None
            or len(node.args) > 2
            or [d % len(self.graph.shape(node.args[0])) for d in node.args[1]]
            != [len(self.graph.shape(node.args[0])) - 1]
        ):
            return None
        place, found = node.args[0], False
        while True:
            sides = (
                (a, self.patterns.without_casts(b)) for a, b in self.patterns.times(self.patterns.without_casts(place))
            )
            rest = next((a for a, b in sides if any(self.patterns.same(b, hot) for hot in hots)), None)
            if rest is None:
                return place if found else None
            place, found = rest, True

    def _seen(self, value: Ref, base: Ref, shifted: bool) -> tuple[list[Node], Ref]:
        """(reshapes and permutations in order, their source) of ``value``; casts are ignored.

        ``shifted``: so is the addition of a number, or of ``base``, which is 1 where it counts.
        """
        nodes: list[Node] = []
        while not self.patterns.same(value, base) and (node := self.graph.producers.get(value.name)) is not None:
            if self.graph.types[value.name].dtype not in _EXACT_COUNT_DTYPES:
                break
            if shifted and node.op in (aten.sub.Tensor, aten.add.Tensor) and not node.kwargs:
                more = node.args[1]
                if not isinstance(more, int) and (
                    nodes or not self.patterns.same(self.patterns.without_casts(more), base)
                ):
                    break
            elif node.op in _DIM_REORDERS:
                nodes.append(node)
            elif node.op not in _COPY_OPS:
                break
            value = node.args[0]
        return nodes[::-1], value


_DIM_REORDERS = (aten.reshape.default, aten.transpose.int, aten.permute.default)
_COPY_OPS = (aten._to_copy.default, aten.clone.default)


def _trace_dims(nodes: Sequence[Node], named: DimGroups, sizes: dict[str, int], graph: Any) -> DimGroups | None:
    """The names of the dims after ``nodes``; None where a reshape splits a named dim."""
    for node in nodes:
        if node.op is aten.transpose.int:
            a, b = (d % len(named) for d in node.args[1:3])
            named = [named[b if i == a else a if i == b else i] for i in range(len(named))]
        elif node.op is aten.permute.default:
            named = [named[d % len(named)] for d in node.args[1]]
        else:
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
